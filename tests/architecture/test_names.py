"""Names say what a thing is: no junk drawers among the modules, none of the banned words among the names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCES = ("probe_service", "clients", "tests", "benchmarks", "examples", "docs")
BANNED_MODULES = {"util", "utils", "helper", "helpers", "manager", "managers", "data", "misc", "common"}
BANNED_IN_NAMES = {"percentage", "percentages", "utils", "helper", "helpers", "manager"}
BANNED_NAMES = {"data"}
BANNED_WORD = re.compile("percentage", re.IGNORECASE)

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
JAVASCRIPT_DECLARATION = re.compile(r"\b(?:const|let|var|function|class)\s+([A-Za-z_$][\w$]*)")


def offends(name: str) -> bool:
    words = {word.lower() for word in WORDS.findall(name)}
    return name.strip("_") in BANNED_NAMES or bool(words & BANNED_IN_NAMES)


def names_given(tree: ast.AST) -> list[tuple[str, int]]:
    """Names that the source itself chooses: what it defines, assigns, takes as an argument or imports as."""
    given = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                given.append((node.name, node.lineno))
            case ast.arg():
                given.append((node.arg, node.lineno))
            case ast.Name(ctx=ast.Store()):
                given.append((node.id, node.lineno))
            case ast.Attribute(ctx=ast.Store()):
                given.append((node.attr, node.lineno))
            case ast.alias(asname=str()):
                given.append((node.asname, node.lineno))
            case _:
                pass
    return given


def files(repository: Path, *suffixes: str) -> list[Path]:
    return sorted(
        path
        for folder in SOURCES
        for path in (repository / folder).rglob("*")
        if path.suffix in suffixes and path != Path(__file__).resolve() and "__pycache__" not in path.parts
    )


def test_no_module_is_a_junk_drawer(repository):
    modules = files(repository, ".py", ".js")
    assert len(modules) > 10
    assert [str(path) for path in modules if {path.stem, path.parent.name} & BANNED_MODULES] == []


def test_no_python_name_is_banned(repository):
    offending = [
        f"{path.relative_to(repository)}:{line}: {name}"
        for path in files(repository, ".py")
        for name, line in names_given(ast.parse(path.read_text("utf-8")))
        if offends(name)
    ]
    assert offending == []


def test_no_javascript_name_is_banned(repository):
    offending = [
        f"{path.relative_to(repository)}: {name}"
        for path in files(repository, ".js")
        for name in JAVASCRIPT_DECLARATION.findall(path.read_text("utf-8"))
        if offends(name)
    ]
    assert offending == []


def test_rates_are_fractions_in_every_text(repository):
    texts = [*files(repository, ".py", ".js", ".html", ".md"), *repository.glob("*.md")]
    offending = [
        f"{path.relative_to(repository)}:{number}"
        for path in texts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if BANNED_WORD.search(line)
    ]
    assert offending == []


def test_clients_is_a_folder_and_not_a_package(repository):
    assert not (repository / "clients" / "__init__.py").exists()
    assert not (repository / "clients" / "python" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def load_utils(): ...", ["load_utils"]),
        ("class JobManager: ...", ["JobManager"]),
        ("data = 1", ["data"]),
        ("self.data = 1", ["data"]),
        ("def read(data): ...", ["data"]),
        ("import pandas as data", ["data"]),
        ("for percentage in []: ...", ["percentage"]),
        ("from contextlib import contextmanager", []),
        ("client.post('/', data={})", []),
        ("metadata = database_url = 1", []),
    ],
)
def test_the_check_can_fail(source, found):
    assert [name for name, _ in names_given(ast.parse(source)) if offends(name)] == found
