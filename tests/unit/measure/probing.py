"""Probes of rows that are written down in a test."""

from __future__ import annotations

import json

from probe_service.probe import run_probe
from probe_service.schemas import ProbeRequest
from probe_service.settings import Settings


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def probe_in(folder, rows, *, name="rows", **request):
    """Write rows as JSON lines into a folder and probe them there; s₀ is .5 where the request does not say."""
    file = write_rows(folder / f"{name}.jsonl", rows)
    return run_probe(
        ProbeRequest.model_validate({"worst_case_similarity": 0.5} | request),
        file,
        folder / f"work-{name}",
        settings=Settings(home=folder / "home", device="cpu"),
        job_id="test",
        name=file.name,
    )
