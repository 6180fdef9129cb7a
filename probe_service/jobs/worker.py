"""The worker process: owns the accelerator and runs one job at a time from the queue.

``python -m probe_service.jobs.worker`` reads its settings from the environment. It says that it lives every
second, asks twice a second whether its job was cancelled, and on SIGTERM lets the running step finish, puts
the job back at the head of the queue and ends. Killed, it is resumed by the next worker with the same
executor id.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, PortableWorkflowError
from dbos import error as dbos_error

from probe_service.encode import default_encoder_name
from probe_service.errors import ProbeError, ServiceError
from probe_service.jobs.heartbeat import Heartbeat, heartbeat_path, oom_kills, record_death, write_heartbeat
from probe_service.jobs.queue import APPLICATION_NAME, QUEUE_NAME, JobQueue, prepare_database
from probe_service.jobs.supervisor import PARENT_PIPE_VARIABLE
from probe_service.jobs.workflows import Desk, register_workflows
from probe_service.logs import configure_logging
from probe_service.settings import Settings
from probe_service.store import CorpusStore

__all__ = ["run_worker"]

_BEAT_SECONDS = 1.0
_CANCEL_POLL_SECONDS = 0.5
_QUEUE_POLL_SECONDS = 0.25
_STEP_GRACE_SECONDS = 2.5
_LOCK_WAIT_SECONDS = 20.0

_log = logging.getLogger(__name__)


def run_worker(settings: Settings) -> None:
    """Run jobs until SIGTERM or SIGINT, or until the supervising process is gone; does not return before.

    Raises:
        ServiceError: `worker_duplicate` if another worker runs under this executor id;
            `database_unavailable`.
    """
    with _sole_worker(settings):
        _serve_queue(settings)


def _serve_queue(settings: Settings) -> None:
    store = CorpusStore(settings.home, settings.max_upload_bytes)
    record_death(store, settings.home, settings.executor_id, None)
    prepare_database(settings)
    jobs = JobQueue(settings, store)
    heart = _Heart(settings)
    desk = Desk(jobs.is_cancelled, heart.beat)
    heart.desk = desk
    register_workflows(settings, store, desk)
    config: DBOSConfig = {
        "name": APPLICATION_NAME,
        "system_database_url": settings.resolved_database_url,
        "serializer": DBOSPortableJSONSerializer(),
        "application_version": settings.application_version,
        "executor_id": settings.executor_id,
        "log_level": "WARNING",
    }
    _import_encoders()
    DBOS(config=config)
    logging.getLogger("dbos").addFilter(_is_news)
    DBOS.launch()
    DBOS.register_queue(QUEUE_NAME, worker_concurrency=1, polling_interval_sec=_QUEUE_POLL_SECONDS)

    stop = threading.Event()

    def ask_to_stop(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    _stop_with_parent(stop)
    heart.beat()
    threading.Thread(target=heart.beat_forever, name="heartbeat", daemon=True).start()
    _log.info("worker %s ready (device %s)", settings.executor_id, heart.device)
    while not stop.wait(1.0):
        pass
    _log.info("worker %s stops", settings.executor_id)
    desk.stop(_STEP_GRACE_SECONDS)
    job_id = desk.job_id
    if job_id is not None:
        with contextlib.suppress(ProbeError):
            jobs.hand_back(job_id)
    heart.stop()
    # The job's thread may be in the middle of a step: end without waiting for it.
    logging.shutdown()
    os._exit(0)


def _import_encoders() -> None:
    """Import the library of encoders before the first job needs it.

    It takes seconds, in which a job could not be cancelled.
    """
    with contextlib.suppress(ImportError):  # a worker that only asks remote encoders can do without
        importlib.import_module("sentence_transformers")


def _is_news(record: logging.LogRecord) -> bool:
    """Drop DBOS's tracebacks of jobs that failed or were cancelled in good order."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, PortableWorkflowError | dbos_error.DBOSAwaitedWorkflowCancelledError)


class _Heart:
    """Writes the worker's heartbeat and looks for cancellations, each in its rhythm."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._writing = threading.Lock()
        self._stopped = False
        self._started_at = time.time()
        self._oom_kills = oom_kills()
        self.device = _device(settings)
        self._default_encoder = default_encoder_name(settings)
        self.desk: Desk | None = None

    def beat(self) -> None:
        with self._writing:
            if self._stopped:
                return
            write_heartbeat(
                self._settings.home,
                Heartbeat(
                    executor_id=self._settings.executor_id,
                    pid=os.getpid(),
                    started_at=self._started_at,
                    beat_at=time.time(),
                    job_id=self.desk.job_id if self.desk is not None else None,
                    device=self.device,
                    default_encoder=self._default_encoder,
                    oom_kills=self._oom_kills,
                ),
            )

    def beat_forever(self) -> None:
        beaten_at = 0.0
        while True:
            try:
                if time.monotonic() - beaten_at >= _BEAT_SECONDS:
                    self.beat()
                    beaten_at = time.monotonic()
                if self.desk is not None:
                    self.desk.look_for_cancellation()
            except ProbeError as error:
                _log.warning("heartbeat: %s", error)
            time.sleep(_CANCEL_POLL_SECONDS)

    def stop(self) -> None:
        with self._writing:
            self._stopped = True
            heartbeat_path(self._settings.home, self._settings.executor_id).unlink(missing_ok=True)


def _device(settings: Settings) -> str:
    import torch

    return settings.device or ("cuda" if torch.cuda.is_available() else "cpu")


def _stop_with_parent(stop: threading.Event) -> None:
    descriptor = os.environ.get(PARENT_PIPE_VARIABLE)
    if descriptor is None:
        return

    def watch() -> None:
        with open(int(descriptor), "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor, not a path
            while pipe.read(1):
                pass
        _log.warning("the supervising process is gone")
        stop.set()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextlib.contextmanager
def _sole_worker(settings: Settings) -> Iterator[None]:
    """Hold the executor id's lock: a second worker of that id would take the first one's job away."""
    path: Path = heartbeat_path(settings.home, settings.executor_id).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_WAIT_SECONDS
    with path.open("w", encoding="ascii") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A predecessor may still be winding down.
                if time.monotonic() >= deadline:
                    raise ServiceError(
                        "worker_duplicate",
                        f"Another worker runs as {settings.executor_id!r};"
                        " give each its own PROBE_EXECUTOR_ID.",
                    ) from None
                time.sleep(0.2)
        yield


def main() -> int:
    """Run a worker with the settings of the environment; the process's exit code."""
    configure_logging()
    try:
        run_worker(Settings())
    except ProbeError as error:
        _log.error("%s", error)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
