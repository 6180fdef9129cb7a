"""A tiny encoder on disk, and probes of small corpora."""

from __future__ import annotations

from functools import partial

import pytest

from tests.unit.measure.probing import probe_in


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
    return partial(probe_in, tmp_path)
