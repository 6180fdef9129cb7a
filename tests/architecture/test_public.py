"""`__all__` says what a module offers, and what is meant to be light imports light."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {"probe_service": "probe_service", "probe_client": "clients/python/probe_client"}

HEAVY = {"torch", "transformers", "sentence_transformers", "faiss", "datasets", "pandas", "sklearn", "numba"}
DRAWING = {"altair", "vl_convert"}
SERVING = {"fastapi", "uvicorn", "dbos", "sqlalchemy"}


def defined_names(tree: ast.Module) -> set[str]:
    """Public names that the module itself defines at its top level, without what it imports."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case _:
                pass
    return {name for name in names if not name.startswith("_")}


def imported_names(tree: ast.Module) -> set[str]:
    """Names that the module imports at its top level, those for type checkers included."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def declared_names(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return set(ast.literal_eval(node.value))
            case _:
                pass
    return None


def sources(repository: Path) -> list[Path]:
    return sorted(path for folder in PACKAGES.values() for path in (repository / folder).rglob("*.py"))


def mismatch(tree: ast.Module, *, is_package: bool) -> dict[str, set[str]]:
    """Functions and classes left out of `__all__`, and names in it that are not there.

    A constant may stay out: a test may want to read it, and yet it is nothing to build upon.
    """
    declared = declared_names(tree)
    if declared is None:
        return {}
    defined = defined_names(tree)
    offered = defined | (imported_names(tree) if is_package else set())
    lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    unlisted = {name for name in defined - declared if not name.isupper()}
    found = {"unlisted": unlisted, "absent": set() if lazy else declared - offered}
    return {kind: names for kind, names in found.items() if names}


def test_all_names_what_a_module_defines(repository):
    mismatches = {
        str(path.relative_to(repository)): mismatch(
            ast.parse(path.read_text("utf-8")), is_package=path.name == "__init__.py"
        )
        for path in sources(repository)
    }
    assert {path: found for path, found in mismatches.items() if found} == {}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_packages_offer_what_they_list(name):
    package = importlib.import_module(name)
    assert package.__all__
    for offered in package.__all__:
        assert getattr(package, offered) is not None
    submodules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    visible = {each for each in vars(package) if not each.startswith("_")} - submodules - {"annotations"}
    assert visible <= set(package.__all__)


def modules_loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter once the statement has run."""
    script = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def all_modules(package: str, repository: Path) -> str:
    folder = repository / Path(*package.split("."))
    found = [package, *(f"{package}.{module.name}" for module in pkgutil.iter_modules([str(folder)]))]
    return "import " + ", ".join(found)


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import probe_service", HEAVY | DRAWING | SERVING),
        (
            "import probe_service.schemas, probe_service.errors, probe_service.settings",
            HEAVY | DRAWING | SERVING,
        ),
        ("import probe_client", HEAVY | DRAWING | SERVING | {"scipy", "pyarrow", "numpy"}),
        ("import probe_service.cli", HEAVY | DRAWING | SERVING | {"scipy"}),
        ("import probe_service.charts", HEAVY | DRAWING),
        ("import probe_service.jobs.client", HEAVY | DRAWING),
    ],
)
def test_what_is_meant_to_be_light_imports_light(statement, forbidden):
    assert modules_loaded_by(statement) & forbidden == set()


def test_the_api_imports_light(repository):
    assert modules_loaded_by(all_modules("probe_service.api", repository)) & (HEAVY | DRAWING) == set()


def test_the_estimators_import_numpy_and_scipy_only(repository):
    loaded = modules_loaded_by(all_modules("probe_service.estimate", repository))
    assert "numpy" in loaded
    assert loaded & (HEAVY | DRAWING | SERVING | {"pyarrow", "httpx"}) == set()


def test_the_checks_can_fail():
    assert "decimal" in modules_loaded_by("import statistics")
    source = (
        "__all__ = ['probe', 'gone']\nfrom os import path\nprobe: int = 1\n_hidden = 2\nclass Left: ...\n"
    )
    assert mismatch(ast.parse(source), is_package=False) == {"unlisted": {"Left"}, "absent": {"gone"}}
