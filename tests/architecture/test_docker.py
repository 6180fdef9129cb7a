"""The images and the compose file are read as programs read them, and what they name exists."""

from __future__ import annotations

import http.server
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from probe_service.api import create_app
from probe_service.cli import cli
from probe_service.jobs.heartbeat import Heartbeat, write_heartbeat
from probe_service.settings import Settings

SETTINGS = {f"PROBE_{name.upper()}" for name in Settings.model_fields}
TARGETS = ("api", "worker-cpu", "worker-gpu")


@dataclass
class Stage:
    """One stage of a Dockerfile: where it starts from, and its instructions in order."""

    origin: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self, keyword: str) -> list[str]:
        return [argument for name, argument in self.instructions if name == keyword]


@pytest.fixture(scope="module")
def stages(repository) -> dict[str, Stage]:
    text = (repository / "docker" / "Dockerfile").read_text("utf-8")
    without_comments = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, Stage] = {}
    for line in without_comments.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        keyword, _, argument = line.strip().partition(" ")
        if keyword == "FROM":
            origin, name = re.fullmatch(r"(\S+) AS (\S+)", argument).groups()
            current = found[name] = Stage(origin)
        else:
            current.instructions.append((keyword, argument.strip()))
    return found


@pytest.fixture(scope="module")
def compose(repository):
    return yaml.safe_load((repository / "docker-compose.yml").read_text("utf-8"))


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage and all that it starts from, the oldest first."""
    stage = stages[name]
    return [*(lineage(stages, stage.origin) if stage.origin in stages else []), stage]


def last(stages: dict[str, Stage], name: str, keyword: str) -> str:
    return [argument for stage in lineage(stages, name) for argument in stage.arguments(keyword)][-1]


def environment(stages: dict[str, Stage], name: str) -> dict[str, str]:
    arguments = [argument for stage in lineage(stages, name) for argument in stage.arguments("ENV")]
    return dict(pair.split("=", 1) for argument in arguments for pair in argument.split())


def health_command(stages: dict[str, Stage], name: str) -> list[str]:
    options, command = last(stages, name, "HEALTHCHECK").split("CMD ", 1)
    assert "--interval=" in options
    assert "--start-period=" in options
    program, *arguments = json.loads(command)
    assert program == "python"
    return [sys.executable, *arguments]


def test_the_dockerfile_is_linted(repository):
    linter = Path(sys.executable).with_name("hadolint")
    run = subprocess.run(
        [linter, repository / "docker" / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_base_image_is_pinned_by_tag(stages):
    bases = {stage.origin for stage in stages.values()} - set(stages)
    assert bases == {"python:3.11-slim-bookworm"}


def test_what_is_copied_exists_and_is_in_the_build_context(repository, stages):
    ignore = (repository / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in ignore
    copied = set()
    for stage in stages.values():
        for argument in stage.arguments("COPY"):
            *sources, _ = argument.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages
            else:
                copied.update(sources)
    assert copied == {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert [source for source in copied if not (repository / source).exists()] == []


def test_the_wheel_stage_has_what_the_project_file_needs(repository, stages):
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["only-include"], project["project"]["readme"]]
    needed += project["project"]["license-files"]
    copied = " ".join(stages["wheel"].arguments("COPY")).split()
    assert [path for path in needed if Path(path).parts[0] not in copied] == []


@pytest.mark.parametrize("target", TARGETS)
def test_images_run_without_root_and_start_a_command_that_exists(repository, stages, target):
    user, group = last(stages, target, "USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user} " in " ".join(stages["base"].arguments("RUN"))
    scripts = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    (program,) = json.loads(last(stages, target, "ENTRYPOINT"))
    module, function = scripts[program].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    name, *flags = json.loads(last(stages, target, "CMD"))
    options = {
        option
        for parameter in cli.commands[name].params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert set(flags) <= options


@pytest.mark.parametrize(
    ("target", "extras"),
    [("api", "service"), ("worker-cpu", "service,cpu,demo"), ("worker-gpu", "service,gpu,demo")],
)
def test_each_image_has_its_own_extras_at_the_tested_versions(stages, target, extras):
    (source,) = [argument.split()[0].removeprefix("--from=") for argument in stages[target].arguments("COPY")]
    (command,) = stages[source].arguments("RUN")
    assert f"[{extras}]" in command
    assert "--constraint /wheels/constraints.txt" in command


def test_the_images_hold_no_secret(repository):
    text = (repository / "docker" / "Dockerfile").read_text("utf-8")
    assert re.findall(r"(?i)(password|secret|token|api_?key)", text) == []


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_api_is_healthy_if_its_health_route_says_so(stages, status, healthy):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = {"PROBE_PORT": str(server.server_port)}
        run = subprocess.run(
            health_command(stages, "api"), env=os.environ | port, capture_output=True, timeout=60
        )
        server.shutdown()
    assert (run.returncode == 0) is healthy


def test_the_api_has_that_health_route(tmp_path):
    assert "get" in create_app(Settings(home=tmp_path)).openapi()["paths"]["/health"]


@pytest.mark.parametrize("target", ["worker-cpu", "worker-gpu"])
def test_a_worker_is_healthy_while_its_own_heartbeat_is_fresh(stages, target, tmp_path):
    named = environment(stages, target)["PROBE_EXECUTOR_ID"]

    def healthy(executor_id: str, age_seconds: float) -> bool:
        beat = Heartbeat(
            executor_id=executor_id,
            pid=1,
            started_at=0.0,
            beat_at=time.time() - age_seconds,
            job_id=None,
            device="cpu",
            default_encoder="minilm",
            oom_kills=0,
        )
        home = tmp_path / f"{executor_id}-{age_seconds}"
        write_heartbeat(home, beat)
        variables = {"PROBE_HOME": str(home), "PROBE_EXECUTOR_ID": named}
        command = health_command(stages, target)
        return (
            subprocess.run(command, env=os.environ | variables, capture_output=True, timeout=60).returncode
            == 0
        )

    assert healthy(named, age_seconds=0.0)
    assert not healthy(named, age_seconds=60.0)
    assert not healthy("another", age_seconds=0.0)


def test_compose_has_the_api_a_worker_per_profile_and_a_database(compose):
    services = compose["services"]
    assert {name: service.get("profiles", []) for name, service in services.items()} == {
        "api": [],
        "worker-cpu": ["cpu"],
        "worker-gpu": ["gpu"],
        "postgres": [],
    }
    for target in TARGETS:
        assert services[target]["build"] == {
            "context": ".",
            "dockerfile": "docker/Dockerfile",
            "target": target,
        }
        assert services[target]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
        assert services[target]["volumes"] == ["probe:/var/lib/probe"]
    assert set(compose["volumes"]) == {"probe", "postgres"}
    assert "postgres:/var/lib/postgresql/data" in services["postgres"]["volumes"]
    assert services["postgres"]["healthcheck"]["test"][1] == "pg_isready"
    assert re.fullmatch(r"postgres:\d+\.\d+-\w+", services["postgres"]["image"])


def test_only_the_gpu_worker_reserves_a_gpu(compose):
    (device,) = compose["services"]["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert all(
        "deploy" not in service for name, service in compose["services"].items() if name != "worker-gpu"
    )


def test_api_and_workers_share_one_database_and_the_server_agrees(compose):
    urls = {compose["services"][target]["environment"]["PROBE_DATABASE_URL"] for target in TARGETS}
    (url,) = urls
    server = compose["services"]["postgres"]["environment"]
    password = "${POSTGRES_PASSWORD:?put POSTGRES_PASSWORD into the file .env}"
    assert server["POSTGRES_PASSWORD"] == password
    assert url == f"postgresql://{server['POSTGRES_USER']}:{password}@postgres:5432/{server['POSTGRES_DB']}"


def test_every_probe_variable_is_a_setting(compose, stages):
    named = {name for target in TARGETS for name in environment(stages, target) if name.startswith("PROBE_")}
    named |= {
        name
        for target in TARGETS
        for name in compose["services"][target]["environment"]
        if name.startswith("PROBE_")
    }
    assert {"PROBE_HOME", "PROBE_HOST", "PROBE_DATABASE_URL", "PROBE_EXECUTOR_ID"} <= named
    assert named <= SETTINGS


def test_images_agree_on_the_folder_and_workers_differ_in_name(stages):
    homes = {environment(stages, target)["PROBE_HOME"] for target in TARGETS}
    assert homes == {"/var/lib/probe"}
    names = {environment(stages, target)["PROBE_EXECUTOR_ID"] for target in ("worker-cpu", "worker-gpu")}
    assert len(names) == 2


def test_the_api_is_published_on_loopback_only(compose):
    assert compose["services"]["api"]["ports"] == ["127.0.0.1:8000:8000"]
    assert all("ports" not in service for name, service in compose["services"].items() if name != "api")
