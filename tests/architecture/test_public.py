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


def top_level_names(tree: ast.Module) -> set[str]:
    """All names that a module has once it is imported, those for type checkers included."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.If():
                names |= top_level_names(ast.Module(node.body, []))
            case _:
                pass
    return names


def declared_names(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return set(ast.literal_eval(node.value))
            case _:
                pass
    return None


def absent_names(tree: ast.Module) -> set[str]:
    """Names in `__all__` that the module does not have; a module-level `__getattr__` may make them when asked."""
    names = top_level_names(tree)
    return set() if "__getattr__" in names else (declared_names(tree) or set()) - names


def trespasses(importing: ast.Module, trees: dict[str, ast.Module]) -> set[str]:
    """What a module imports from another one that does not offer it: private, or left out of its `__all__`."""
    found = set()
    for node in ast.walk(importing):
        if not isinstance(node, ast.ImportFrom) or node.module not in trees:
            continue
        offered = declared_names(trees[node.module])
        for alias in node.names:
            is_module = f"{node.module}.{alias.name}" in trees
            if not is_module and (
                alias.name.startswith("_") or (offered is not None and alias.name not in offered)
            ):
                found.add(f"{node.module}.{alias.name}")
    return found


@pytest.fixture(scope="module")
def trees(repository) -> dict[str, ast.Module]:
    """The parsed source of every module, by its import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((repository / folder).rglob("*.py")):
            parts = path.relative_to(repository / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text("utf-8"))
    assert len(found) > 20
    return found


def test_what_all_names_is_there(trees):
    absent = {name: absent_names(tree) for name, tree in trees.items()}
    assert {name: names for name, names in absent.items() if names} == {}


def test_modules_use_of_each_other_only_what_is_offered(trees):
    found = {name: trespasses(tree, trees) for name, tree in trees.items()}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_packages_offer_what_they_list(name):
    package = importlib.import_module(name)
    assert package.__all__
    for offered in package.__all__:
        assert getattr(package, offered) is not None
    own = {each for each, value in vars(package).items() if getattr(value, "__module__", "").startswith(name)}
    assert {each for each in own if not each.startswith("_")} <= set(package.__all__)


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
    ],
)
def test_what_is_meant_to_be_light_imports_light(statement, forbidden):
    assert modules_loaded_by(statement) & forbidden == set()


def test_the_estimators_import_numpy_and_scipy_only(repository):
    everything = all_modules("probe_service.estimate", repository)
    # Its loops are compiled by numba, and imported only where they run.
    without_loops = everything.replace(", probe_service.estimate.compiled", "")
    assert without_loops != everything
    loaded = modules_loaded_by(without_loops)
    assert "numpy" in loaded
    assert loaded & (HEAVY | DRAWING | SERVING | {"pyarrow", "httpx"}) == set()
    assert modules_loaded_by(everything) & (HEAVY | DRAWING | SERVING | {"pyarrow", "httpx"}) == {"numba"}


def test_the_checks_can_fail():
    assert "decimal" in modules_loaded_by("import statistics")
    offering = ast.parse(
        "__all__ = ['probe', 'gone']\nfrom os import path\nprobe = 1\nclass Left: ...\n_own = 2\n"
    )
    assert absent_names(offering) == {"gone"}
    using = ast.parse("def run():\n    from core import probe, Left, _own, parts\n")
    core = {"core": offering, "core.parts": ast.Module([], [])}
    assert trespasses(using, core) == {"core.Left", "core._own"}
