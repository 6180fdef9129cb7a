"""A tiny encoder on disk, and probes of small corpora with it."""

from __future__ import annotations

import json

import pytest

from probe_service.probe import run_probe
from probe_service.schemas import ProbeRequest
from probe_service.settings import Settings


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """A random two-layer BERT with mean pooling, which has dropout."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    from tests.unit.encode.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    base = write_checkpoint(folder, "a/base", "bert", weights="model.safetensors")
    model = SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, "mean")], device="cpu")
    model.save(str(folder / "saved"), create_model_card=False)
    return str(folder / "saved")


@pytest.fixture
def probe_rows(tmp_path):
    """Writes rows as JSON lines and probes them."""

    def probe(rows, *, name="rows", **request):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return run_probe(
            ProbeRequest.model_validate({"worst_case_similarity": 0.5} | request),
            file,
            tmp_path / f"work-{name}",
            settings=Settings(home=tmp_path / "home", device="cpu"),
            job_id="test",
            name=file.name,
        )

    return probe
