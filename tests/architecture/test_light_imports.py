"""The API process and the job client stay light in fact, not only by contract: what they import is looked at."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "faiss",
    "sentence_transformers",
    "transformers",
    "datasets",
    "altair",
    "vl_convert",
    "probe_service.probe",
    "probe_service.encode",
    "probe_service.similarity",
    "probe_service.jobs.workflows",
)

LOOK = "import sys; {statement}; print([name for name in {heavy!r} if name in sys.modules])"


def heavy_modules_after(statement: str) -> str:
    command = LOOK.format(statement=statement, heavy=HEAVY)
    found = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.parametrize(
    "module", ["probe_service.api", "probe_service.jobs.client", "probe_service.jobs.supervisor"]
)
def test_importing_loads_nothing_heavy(module):
    assert heavy_modules_after(f"import {module}") == "[]"


def test_making_the_app_loads_nothing_heavy(tmp_path):
    statement = (
        "from pathlib import Path; from probe_service.settings import Settings;"
        " from probe_service.api import create_app;"
        f" create_app(Settings(home=Path({str(tmp_path)!r}))).openapi()"
    )
    assert heavy_modules_after(statement) == "[]"


def test_the_check_can_fail():
    planted = "import probe_service.api; import probe_service.jobs.workflows"
    assert "'torch'" in heavy_modules_after(planted)
    assert "'probe_service.jobs.workflows'" in heavy_modules_after(planted)
