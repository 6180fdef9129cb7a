"""What the documents say is so: settings, schemas, commands, links."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from pydantic_core import PydanticUndefined

from probe_service.api import create_app
from probe_service.cli import cli
from probe_service.schemas import ProbeRequest
from probe_service.settings import Settings

ROW = re.compile(r"^\| `(PROBE_\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


@pytest.fixture(scope="module")
def readme(repository):
    return (repository / "README.md").read_text("utf-8")


def shell_lines(markdown: str) -> list[str]:
    """Command lines of the shell blocks, with continued lines joined and comments dropped."""
    blocks = [
        body.replace("\\\n", " ") for language, body in FENCE.findall(markdown) if language in {"sh", "bash"}
    ]
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def shown_default(name: str) -> str:
    field = Settings.model_fields[name]
    if name == "home":
        return "`~/.cache/probe-service`"
    assert field.default is not PydanticUndefined
    if field.default is None:
        return "unset"
    return f"`{json.dumps(field.default) if isinstance(field.default, tuple) else field.default}`"


def test_every_setting_is_documented_as_it_is(repository):
    documented = {
        variable: (default, meaning)
        for variable, default, meaning in ROW.findall(
            (repository / "docs" / "settings.md").read_text("utf-8")
        )
    }
    settings = {
        f"PROBE_{name.upper()}": (shown_default(name), field.description)
        for name, field in Settings.model_fields.items()
    }
    assert documented == settings


def test_a_documented_default_home_is_the_real_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PROBE_HOME", raising=False)
    assert Settings().home == tmp_path / ".cache" / "probe-service"


def export_schemas(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, tree / "docs" / "export_schemas.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_exported_schemas_are_those_of_the_models(repository):
    run = export_schemas(repository)
    assert run.returncode == 0, run.stderr


def test_a_stale_schema_is_noticed(repository, tmp_path):
    shutil.copytree(repository / "docs", tmp_path / "docs")
    exported = tmp_path / "docs" / "report.schema.json"
    exported.write_text(exported.read_text("utf-8").replace('"batch_size"', '"size"'), "utf-8")
    run = export_schemas(tmp_path)
    assert run.returncode == 1
    assert "report.schema.json" in run.stderr
    assert "request.schema.json" not in run.stderr


def test_the_exported_request_schema_judges_like_the_model(repository):
    schema = json.loads((repository / "docs" / "request.schema.json").read_text("utf-8"))
    judge = jsonschema.Draft202012Validator(schema)
    judge.check_schema(schema)
    assert judge.is_valid({})
    assert judge.is_valid(ProbeRequest(batch_sizes=(16, 64), budget=0.1).model_dump(mode="json"))
    assert not judge.is_valid({"budget": 1.5})
    assert not judge.is_valid({"batchsizes": [16]})


def test_the_exported_report_schema_names_the_figures_of_a_curve(repository):
    schema = json.loads((repository / "docs" / "report.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert {
        "schema_version",
        "curve",
        "encoder",
        "corpus",
        "evidence",
        "advice",
        "warnings",
        "timings",
    } <= set(schema["required"])
    figures = schema["$defs"]["CurvePoint"]["properties"]
    assert {"batch_size", "top_k", "top_k_mean", "hardest_negative", "pairs_above"} <= set(figures)
    assert {"false_negative_softmax_share", "false_negative_gradient_share", "xi"} <= set(figures)
    assert set(schema["$defs"]["Estimate"]["properties"]) == {"value", "low", "high", "method"}


def test_the_readme_begins_with_the_two_commands(readme):
    assert shell_lines(readme)[:2] == ["make demo", "make test"]


def test_every_make_command_in_the_documents_is_a_target(repository, readme):
    makefile = (repository / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split())
    assert targets == phony
    texts = [readme, (repository / "CONTRIBUTING.md").read_text("utf-8")]
    named = {
        target for text in texts for target in re.findall(r"(?:^|`)(?: *)make ([a-z]+)", text, re.MULTILINE)
    }
    assert {"demo", "test", "serve"} <= named
    assert named <= targets


def test_every_probe_command_in_the_readme_exists_with_its_flags(readme):
    lines = [line.split(" | ")[0] for line in shell_lines(readme) if line.startswith("probe ")]
    assert lines
    for line in lines:
        words = shlex.split(line)
        command = cli.commands.get(words[1])
        assert command is not None, line
        options = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= options, line


def test_every_route_in_the_readme_exists(readme, tmp_path):
    routes = create_app(Settings(home=tmp_path)).openapi()["paths"]
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", route)) for route in routes]
    named = [path for line in shell_lines(readme) for path in re.findall(r"http://[^/ ]+(/\S+)", line)]
    assert len(named) >= 3
    assert [path for path in named if not any(pattern.fullmatch(path) for pattern in patterns)] == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/settings.md"])
def test_relative_links_lead_somewhere(repository, document):
    path = repository / document
    links = [link for link in LINK.findall(path.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_decisions_are_numbered_and_follow_the_template(repository):
    decisions = sorted((repository / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:3]) for path in decisions] == list(range(len(decisions)))
    for path in decisions:
        text = path.read_text("utf-8")
        assert text.startswith(f"# {path.name[:3] if path.name[:3] != '000' else 'NNN'}: "), path.name
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Question", "Decision", "Why", "What follows"]
