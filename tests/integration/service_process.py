"""A real service as tests need it: processes of its own, on a free port, with a home of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from probe_service.jobs.heartbeat import live_heartbeats

SERVE = """
import sys
from probe_service.api import run_server
from probe_service.logs import configure_logging
from probe_service.settings import Settings
configure_logging()
run_server(Settings(), with_worker=sys.argv[1] == "with-worker")
"""
READY_WITHIN_SECONDS = 90.0
ENDED = ("succeeded", "failed", "cancelled")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServiceProcess:
    """The API in one process, the worker in another; either can be killed and started again."""

    def __init__(self, home: Path, *, with_worker: bool = True, **settings: str) -> None:
        self.home = home
        self.port = free_port()
        self.with_worker = with_worker
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PROBE_HOME": str(home),
            "PROBE_PORT": str(self.port),
            "PROBE_ENCODER": "minilm",
            "PROBE_DEVICE": "cpu",
            **{f"PROBE_{name.upper()}": value for name, value in settings.items()},
        }
        self.api: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0, trust_env=False)

    def start(self, *, wait_for: str = "/ready") -> ServiceProcess:
        self.home.mkdir(parents=True, exist_ok=True)
        role = "with-worker" if self.with_worker else "alone"
        self.api = self._spawn([sys.executable, "-c", SERVE, role], "api.log")
        self.until_answers(wait_for)
        return self

    def start_worker(self) -> None:
        self.worker = self._spawn([sys.executable, "-m", "probe_service.jobs.worker"], "worker.log")

    def _spawn(self, command: list[str], log_name: str) -> subprocess.Popen[bytes]:
        with (self.home / log_name).open("ab") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def until_answers(self, path: str, within_seconds: float = READY_WITHIN_SECONDS) -> None:
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                if self.http.get(path).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise AssertionError(f"{path} does not answer 200; log:\n{self.log()}")
            time.sleep(0.1)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.home.glob("*.log")))

    def kill_api(self) -> None:
        assert self.api is not None
        self.api.kill()
        self.api.wait()

    def worker_pid(self) -> int:
        deadline = time.monotonic() + READY_WITHIN_SECONDS
        while not (alive := live_heartbeats(self.home)):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return alive[0].pid

    def kill_worker(self) -> None:
        os.kill(self.worker_pid(), signal.SIGKILL)

    def stop(self) -> None:
        self.http.close()
        for process in (self.api, self.worker):
            if process is not None and process.poll() is None:
                process.terminate()
        for process in (self.api, self.worker):
            if process is not None:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    # ------------------------------------------------------------------------------------------- jobs

    def submit(self, name: str, content: bytes, **request: Any) -> str:
        answer = self.http.post(
            "/v1/probes",
            files=[("request", (None, as_json(request), "application/json")), ("file", (name, content))],
        )
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def job(self, job_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/v1/probes/{job_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def until(self, job_id: str, reached: Any, within_seconds: float = 120.0) -> dict[str, Any]:
        deadline = time.monotonic() + within_seconds
        while not reached(job := self.job(job_id)):
            assert time.monotonic() < deadline, f"{job}\n{self.log()}"
            assert job["state"] not in ENDED, job
            time.sleep(0.05)
        return job

    def until_ended(self, job_id: str, within_seconds: float = 120.0) -> dict[str, Any]:
        return self.until(job_id, lambda job: job["state"] in ENDED, within_seconds)

    def recorded_steps(self, job_id: str) -> dict[str, int]:
        """Names of the job's finished steps and when each was recorded, straight from the job database."""
        with sqlite3.connect(self.home / "jobs.sqlite", timeout=30) as database:
            rows = database.execute(
                "SELECT function_name, completed_at_epoch_ms FROM operation_outputs WHERE workflow_uuid = ?",
                (job_id,),
            ).fetchall()
        return dict(rows)

    def cached_vectors(self) -> dict[bytes, int]:
        """Digest of each text with a cached vector, and its row id; a vector written again gets a new one."""
        found: dict[bytes, int] = {}
        for path in (self.home / "vectors").glob("*.sqlite"):
            with sqlite3.connect(path, timeout=30) as cache:
                found.update(cache.execute("SELECT text_digest, rowid FROM vectors").fetchall())
        return found


def as_json(request: dict[str, Any]) -> bytes:
    return json.dumps(request).encode()


def vectors_file(rows: int = 200, dimension: int = 16, seed: int = 0) -> bytes:
    """An .npy corpus: no encoder is needed for it."""
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32))
    return buffer.getvalue()


def texts_file(rows: int) -> bytes:
    """Distinct texts of about twenty words, as .txt."""
    words = "printer password invoice laptop badge travel mailbox screen meeting reset lost slow".split()  # noqa: SIM905
    rng = np.random.default_rng(5)
    lines = (" ".join([f"case {row}", *rng.choice(words, 20)]) for row in range(rows))
    return "\n".join(lines).encode()
