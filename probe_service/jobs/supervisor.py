"""Keeps one worker process running: starts it, restarts it when it dies, records how it died."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from probe_service.errors import ServiceError
from probe_service.jobs.heartbeat import record_death
from probe_service.settings import Settings
from probe_service.store import CorpusStore

__all__ = ["PARENT_PIPE_VARIABLE", "WorkerSupervisor", "settings_environment"]

PARENT_PIPE_VARIABLE = "PROBE_WORKER_PARENT_PIPE"
"""Names an inherited file descriptor whose end of file means that the supervising process is gone."""

_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 30.0
_HEALTHY_AFTER_SECONDS = 15.0
_TERMINATE_WITHIN_SECONDS = 8.0

_log = logging.getLogger(__name__)


def settings_environment(settings: Settings) -> Mapping[str, str]:
    """Return the environment variables that give another process the same settings."""
    written: dict[str, str] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if value is None:
            continue
        if isinstance(value, tuple):
            written[f"PROBE_{name.upper()}"] = json.dumps(value)
        else:
            written[f"PROBE_{name.upper()}"] = str(value)
    return written


class WorkerSupervisor:
    """One supervised worker.

    The worker holds the reading end of a pipe whose other end only this process has: however this process
    ends, the worker notices and ends as well.

    Args:
        settings: Passed on to the worker.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = CorpusStore(settings.home, settings.max_upload_bytes)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="worker-supervisor", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._reading_end, self._writing_end = os.pipe()
        self.restarts = 0

    def start(self) -> None:
        """Start the worker and watch over it in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End the worker: SIGTERM, and SIGKILL if it does not listen."""
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_TERMINATE_WITHIN_SECONDS)
            except subprocess.TimeoutExpired:
                _log.warning("the worker did not end in time and is killed")
                process.kill()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._writing_end)
        os.close(self._reading_end)

    def _supervise(self) -> None:
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            began_at = time.monotonic()
            self._process = self._spawn()
            if self._stopping.is_set():
                self._process.terminate()
            return_code = self._process.wait()
            if self._stopping.is_set():
                return
            try:
                job_id = record_death(
                    self._store, self._settings.home, self._settings.executor_id, return_code
                )
            except ServiceError as error:
                _log.warning("recording the worker's exit: %s", error)
                job_id = None
            if time.monotonic() - began_at > _HEALTHY_AFTER_SECONDS:
                backoff_seconds = _FIRST_BACKOFF_SECONDS
            _log.warning(
                "the worker ended with %s while it held %s; next one in %.1f s",
                return_code,
                f"job {job_id}" if job_id else "no job",
                backoff_seconds,
            )
            self._stopping.wait(backoff_seconds)
            backoff_seconds = min(backoff_seconds * 2, _LONGEST_BACKOFF_SECONDS)
            self.restarts += 1

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **settings_environment(self._settings),
            PARENT_PIPE_VARIABLE: str(self._reading_end),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "probe_service.jobs.worker"],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(self._reading_end,),
        )
