"""The command for a lent GPU runs through, tiny, on a CPU: a slip in it would cost the time on the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_dry_run(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--dry-run", "--json", str(tmp_path / "found.json")],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == []
    assert "rows end to end without padding, cosines of 32 texts within" in done.stdout
    assert "faiss-gpu is left out: there is no GPU" in done.stdout
    assert {row["kind"] for row in found["checked"]} >= {
        "random",
        "positives",
        "duplicates",
        "crowded",
        "histogram",
    }
    for table in ("peaks", "kernel", "search", "encoding", "batches"):
        assert found[table]
        assert f"\n## {table}\n" in done.stdout
