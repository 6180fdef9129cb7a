"""The tested versions are named for everything that is installed, and the project file keeps its promises."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

EXTRAS = ("service", "cpu", "demo", "dev")


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def pinned(repository):
    lines = (repository / "constraints.txt").read_text("utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each.specifier for each in requirements}


def direct_requirements(project, extras):
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return [Requirement(line) for line in lines]


def closure(requirements):
    """Names of all distributions that the requirements bring in on this platform, as installed here."""
    found, pending = {}, list(requirements)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if extras <= found.get(name, frozenset()) and name in found:
            continue
        found[name] = found.get(name, frozenset()) | extras
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            if needed.marker is None or any(needed.marker.evaluate(each) for each in environments):
                pending.append(needed)
    return set(found)


def test_every_package_of_the_closure_is_pinned_to_the_version_that_runs_here(project, pinned):
    names = closure(direct_requirements(project, EXTRAS))
    assert len(names) > 60
    assert sorted(names - set(pinned)) == []
    differing = {
        name: importlib.metadata.version(name)
        for name in names
        if not pinned[name].contains(Version(importlib.metadata.version(name)).public, prereleases=True)
    }
    assert differing == {}


def test_every_pin_is_one_exact_version_without_a_build(repository, pinned):
    assert all(re.fullmatch(r"==[^*+]+", str(specifier)) for specifier in pinned.values())
    assert str(pinned["torch"]) == "==2.13.0"


def test_every_pin_satisfies_the_project_file(project, pinned):
    for requirement in direct_requirements(project, [*EXTRAS, "gpu"]):
        (pin,) = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version), requirement


def test_cpu_and_gpu_differ_only_in_faiss(project):
    extras = project["optional-dependencies"]
    names = {extra: {Requirement(line).name for line in extras[extra]} for extra in ("cpu", "gpu")}
    assert names["cpu"] ^ names["gpu"] == {"faiss-cpu", "faiss-gpu"}


def test_the_base_install_has_no_torch(project):
    names = closure(direct_requirements(project, ()))
    assert names.isdisjoint({"torch", "transformers", "sentence-transformers", "fastapi", "dbos", "pandas"})
