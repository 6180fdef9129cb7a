"""The import contracts of pyproject.toml hold, and each of them breaks when a violation is planted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS = "One way down: workflows, probe, stages, nouns"
LIGHT_API = "The API process stays light"
NUMERIC_ESTIMATES = "Estimation is numpy and scipy"
CLIENTS = "Clients know only the nouns"


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in the tree, whatever is installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "clients" / "python")])}
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def copied_tree(tmp_path, repository):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repository / "probe_service", tmp_path / "probe_service", ignore=ignored)
    shutil.copytree(repository / "clients", tmp_path / "clients", ignore=ignored)
    shutil.copy(repository / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold(repository):
    run = lint_imports(repository)
    assert run.returncode == 0, run.stdout + run.stderr
    for contract in (LAYERS, LIGHT_API, NUMERIC_ESTIMATES, CLIENTS):
        assert f"{contract} KEPT" in run.stdout


@pytest.mark.parametrize(
    ("package", "planted", "broken"),
    [
        ("probe_service/estimate", "from probe_service import probe", LAYERS),
        ("probe_service/similarity", "from probe_service import estimate", LAYERS),
        ("probe_service/encode", "from probe_service.jobs import workflows", LAYERS),
        ("probe_service/api", "import torch", LIGHT_API),
        ("probe_service/api", "from probe_service.jobs import workflows", LIGHT_API),
        ("probe_service/api", "from probe_service import encode", LIGHT_API),
        ("probe_service/estimate", "import torch", NUMERIC_ESTIMATES),
        ("probe_service/estimate", "import pyarrow.parquet", NUMERIC_ESTIMATES),
        ("clients/python/probe_client", "from probe_service import store", CLIENTS),
        ("clients/python/probe_client", "import torch", CLIENTS),
    ],
)
def test_a_planted_violation_breaks_its_contract(copied_tree, package, planted, broken):
    (copied_tree / package / "planted.py").write_text(f'"""Planted."""\n\n{planted}\n', "utf-8")
    run = lint_imports(copied_tree)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"{broken} BROKEN" in run.stdout


def test_an_indirect_import_breaks_the_contract_too(copied_tree):
    corpus = copied_tree / "probe_service" / "corpus.py"
    target = corpus if corpus.is_file() else copied_tree / "probe_service" / "corpus" / "__init__.py"
    with target.open("a", encoding="utf-8") as source:
        source.write("\nimport faiss\n")
    (copied_tree / "probe_service" / "api" / "planted.py").write_text(
        "from probe_service import corpus\n", "utf-8"
    )
    run = lint_imports(copied_tree)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"{LIGHT_API} BROKEN" in run.stdout
