"""The job database as jobs of every kind share it: enqueue, look, cancel, remove. Light: no torch, no probe.

A job is a DBOS workflow. What it is to do and its state live in the job database, its files in ``home/jobs/<id>``.
The states of `JobState` come from three places:

=============================================  ==========================================
workflow status                                job state
=============================================  ==========================================
ENQUEUED, never begun                          queued
ENQUEUED after a crash; PENDING                running
CANCELLED, and a live worker still holds it    cancelling
CANCELLED otherwise                            cancelled
SUCCESS                                        succeeded
ERROR, MAX_RECOVERY_ATTEMPTS_EXCEEDED          failed
=============================================  ==========================================
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import sqlalchemy.exc
from dbos import (
    DBOS,
    DBOSClient,
    DBOSPortableJSONSerializer,
    EnqueueOptions,
    PortableWorkflowError,
    WorkflowStatus,
)
from dbos import error as dbos_error
from sqlalchemy.engine import make_url

from probe_service.errors import JobError, ProbeError, RequestError, ServiceError
from probe_service.jobs.heartbeat import Heartbeat, last_exit_cause, live_heartbeats
from probe_service.problems import error_from_json
from probe_service.schemas import JobState, Progress
from probe_service.settings import Settings
from probe_service.store import CorpusStore

__all__ = [
    "APPLICATION_NAME",
    "CURVE_EVENT",
    "PROGRESS_EVENT",
    "QUEUE_NAME",
    "JobKind",
    "JobQueue",
    "JobRecord",
    "prepare_database",
]

APPLICATION_NAME = "probe-service"
QUEUE_NAME = "probes"
"""One queue for all kinds of jobs, since they share one accelerator."""
PROGRESS_EVENT = "progress"
CURVE_EVENT = "curve"

_WAITING = ["ENQUEUED", "DELAYED"]
_UNFINISHED = [*_WAITING, "PENDING"]

_CAUSES = {
    "worker_out_of_memory": "The worker ran out of memory each time it tried this job; probe fewer rows"
    " (max_rows) or smaller batch sizes, or give it more memory.",
    "worker_killed": "The worker was killed each time it tried this job.",
    "worker_crashed": "The worker crashed each time it tried this job; its log says more.",
}

_log = logging.getLogger(__name__)


class JobKind(StrEnum):
    """What a job does; also the name of its workflow."""

    PROBE = "probe"
    AUDIT = "audit"
    """Draws the pairs of an audit of a finished probe."""
    TRIAL = "trial"
    """Trains with several losses at several batch sizes."""


@dataclass(frozen=True)
class JobRecord:
    """A job of any kind as it stands.

    Args:
        id: Of the job.
        fields: What it is to do, as it was enqueued.
        state: Its state.
        created_at, updated_at: Times, ISO 8601.
        progress: As far as it was asked for and there is any.
        attempts: Times that a worker has begun it.
        error: Why it failed, if it did.
    """

    id: str
    fields: dict[str, Any]
    state: JobState
    created_at: str
    updated_at: str
    progress: Progress | None
    attempts: int
    error: ProbeError | None


def prepare_database(settings: Settings) -> None:
    """Create the job database or bring it up to date; safe to call from several processes at once.

    Raises:
        ServiceError: `database_unavailable`.
    """
    with _database_errors():
        url = make_url(settings.resolved_database_url)
        if url.drivername.startswith("sqlite") and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(url.database, timeout=30.0)) as connection:
                # Kept in the file: readers and the one writer no longer wait for each other.
                connection.execute("PRAGMA journal_mode=WAL")
        DBOS.migrate(settings.resolved_database_url)


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
        _log.warning("job database: %s", error)
        raise ServiceError(
            "database_unavailable", "The job database cannot be reached; try again later."
        ) from error


class JobQueue:
    """All jobs of one job database. Methods block briefly on the database: call them from a thread.

    The database is connected to at the first call and may come up later than this process. Every method may raise
    ServiceError `database_unavailable`.

    Args:
        settings: Where the database and the home folder are.
        store: Job folders.
    """

    def __init__(self, settings: Settings, store: CorpusStore) -> None:
        self._settings = settings
        self._store = store
        self._connecting = threading.Lock()
        self._connected: DBOSClient | None = None
        self.changing = threading.RLock()
        """Held while jobs and the corpora that they refer to are created or removed."""

    def enqueue(self, kind: JobKind, job_id: str, fields: dict[str, Any]) -> bool:
        """Queue a job; False, and nothing is changed, where there is one of that id.

        Raises:
            ServiceError: `queue_full`.
        """
        options: EnqueueOptions = {
            "workflow_name": kind,
            "queue_name": QUEUE_NAME,
            "workflow_id": job_id,
            "workflow_id_reuse_policy": "reject",
            "app_version": self._settings.application_version,
        }
        with self._client() as client, self.changing:
            unfinished = client.list_workflows(
                name=list(JobKind), status=_UNFINISHED, load_input=False, load_output=False
            )
            waiting = sum(row.status in _WAITING for row in unfinished)
            if waiting >= self._settings.max_queued_jobs:
                raise ServiceError(
                    "queue_full",
                    f"{waiting} jobs are waiting already, the most that is allowed; try again later.",
                )
            # On SQLite the queue's own clock ticks in whole seconds: number the jobs, so that the first comes
            # first.
            options["priority"] = 1 + max((row.priority or 0 for row in unfinished), default=0)
            submitted_at = datetime.now(UTC).isoformat(timespec="milliseconds")
            try:
                client.enqueue(options, {**fields, "submitted_at": submitted_at})
            except dbos_error.DBOSWorkflowIDInUseError:
                return False
        return True

    def find(self, kind: JobKind, job_id: str) -> JobRecord | None:
        """Return a job as it stands, or None."""
        with self._client() as client:
            rows = client.list_workflows(workflow_ids=[job_id], name=kind, limit=1)
            return self._record(client, rows[0], self._held_jobs(), with_progress=True) if rows else None

    def get(self, kind: JobKind, job_id: str) -> JobRecord:
        """Return a job as it stands.

        Raises:
            JobError: `job_not_found`.
        """
        try:
            record = self.find(kind, str(uuid.UUID(job_id)))
        except ValueError:
            record = None
        if record is None:
            raise JobError("job_not_found", f"There is no job {job_id[:80]!r}; it may have been deleted.")
        return record

    def list(self, kind: JobKind, *, offset: int, limit: int) -> list[JobRecord]:
        """Return jobs of a kind, newest first; only those under way carry their progress."""
        with self._client() as client:
            rows = client.list_workflows(name=kind, sort_desc=True, offset=offset, limit=limit)
            held = self._held_jobs()
            return [self._record(client, row, held, with_progress=row.status == "PENDING") for row in rows]

    def count_by_state(self) -> dict[JobState, int]:
        """Return how many jobs are in each state."""
        counts = dict.fromkeys(JobState, 0)
        with self._client() as client:
            held = self._held_jobs()
            for row in client.list_workflows(name=list(JobKind), load_input=False, load_output=False):
                counts[_state(row, held)] += 1
        return counts

    def corpus_users(self, corpus_id: str, *, unfinished_only: bool) -> Sequence[str]:
        """Return, in words, the jobs that refer to a stored corpus."""
        with self._client() as client:
            rows = client.list_workflows(
                name=list(JobKind), status=_UNFINISHED if unfinished_only else None, load_output=False
            )
        return [
            f"the audit of job {fields['probe_id']}"
            if row.name == JobKind.AUDIT
            else f"job {row.workflow_id}"
            for row in rows
            if (fields := _fields(row))["corpus_id"] == corpus_id
        ]

    def release_corpus(self, corpus_id: str) -> None:
        """Delete a stored corpus that nobody uploaded for its own sake and that no job refers to any more."""
        if not self._store.is_kept(corpus_id) and not self.corpus_users(corpus_id, unfinished_only=False):
            with suppress(RequestError):
                self._store.delete(corpus_id)

    def cancel(self, job_id: str) -> None:
        """Ask a job to stop; one that has ended stays as it is."""
        with self._client() as client:
            row = self._row(client, job_id)
            if row is not None and row.status in _UNFINISHED:
                client.cancel_workflow(job_id)

    def remove(self, job_id: str, what: str) -> None:
        """Delete a job, if it is there, and its folder; one that is still queued is cancelled first.

        Args:
            job_id: Of the job.
            what: Names it in the message.

        Raises:
            JobError: `job_not_ended` while a worker holds it: cancel it first.
        """
        with self._client() as client, self.changing:
            row = self._row(client, job_id)
            if row is None:
                return
            if row.status in _WAITING and not row.recovery_attempts:
                client.cancel_workflow(job_id)
                row = self._row(client, job_id) or row
            state = _state(row, self._held_jobs())
            if not state.ended:
                raise JobError(
                    "job_not_ended", f"{what} is {state}; cancel it, wait until it ended, delete then."
                )
            client.delete_workflow(job_id)
            self._store.delete_job_folder(job_id)

    def is_cancelled(self, job_id: str) -> bool:
        """Whether the job was asked to stop (or deleted); one cheap query."""
        with self._client() as client:
            row = self._row(client, job_id)
        return row is None or row.status == "CANCELLED"

    def hand_back(self, job_id: str) -> None:
        """Put a job that this process's worker leaves in good order at the head of the queue again.

        The orderly restart does not count as one of the job's three attempts.
        """
        with self._client() as client:
            row = self._row(client, job_id)
            if row is not None and row.status == "PENDING":
                client.resume_workflow(job_id, queue_name=QUEUE_NAME)

    def check_database(self) -> None:
        """Raise `database_unavailable` unless the job database answers."""
        with self._client() as client:
            client.check_connection()

    def workers(self) -> Sequence[Heartbeat]:
        """Return the workers that are alive."""
        return live_heartbeats(self._settings.home)

    def close(self) -> None:
        """Close the database connections."""
        with self._connecting:
            if self._connected is not None:
                self._connected.destroy()
                self._connected = None

    @contextmanager
    def _client(self) -> Iterator[DBOSClient]:
        with _database_errors():
            with self._connecting:
                if self._connected is None:
                    prepare_database(self._settings)
                    self._connected = DBOSClient(
                        system_database_url=self._settings.resolved_database_url,
                        serializer=DBOSPortableJSONSerializer(),
                        application_name=APPLICATION_NAME,
                        retry_connection_errors=False,
                    )
            yield self._connected

    def _held_jobs(self) -> frozenset[str]:
        return frozenset(beat.job_id for beat in self.workers() if beat.job_id is not None)

    @staticmethod
    def _row(client: DBOSClient, job_id: str) -> WorkflowStatus | None:
        rows = client.list_workflows(
            workflow_ids=[job_id], name=list(JobKind), limit=1, load_input=False, load_output=False
        )
        return rows[0] if rows else None

    def _record(
        self, client: DBOSClient, row: WorkflowStatus, held: frozenset[str], *, with_progress: bool
    ) -> JobRecord:
        fields = _fields(row)
        at, progress = self._progress(client, row.workflow_id) if with_progress else (None, None)
        attempts = row.recovery_attempts or 0
        state = _state(row, held)
        if state is JobState.QUEUED and progress is not None:
            state = JobState.RUNNING  # handed back by a worker that was told to stop
        return JobRecord(
            id=row.workflow_id,
            fields=fields,
            state=state,
            created_at=fields["submitted_at"],
            updated_at=max(_iso(row.updated_at), fields["submitted_at"], at or ""),
            progress=progress,
            attempts=attempts if row.status != "MAX_RECOVERY_ATTEMPTS_EXCEEDED" else attempts - 1,
            error=self._error(row) if state is JobState.FAILED else None,
        )

    @staticmethod
    def _progress(client: DBOSClient, job_id: str) -> tuple[str | None, Progress | None]:
        event = client.get_event(job_id, PROGRESS_EVENT, timeout_seconds=0)
        if event is None:
            return None, None
        curve = client.get_event(job_id, CURVE_EVENT, timeout_seconds=0) or {}
        return event["at"], Progress.model_validate({**event["progress"], **curve})

    def _error(self, row: WorkflowStatus) -> ProbeError:
        if row.status == "MAX_RECOVERY_ATTEMPTS_EXCEEDED":
            cause = last_exit_cause(self._store.job_folder(row.workflow_id))
            return JobError(cause, _CAUSES[cause])
        if isinstance(row.error, PortableWorkflowError) and isinstance(row.error.data, dict):
            return error_from_json(row.error.data)
        return ServiceError(
            "internal_error", "The job failed for a reason that is ours; the worker's log has it."
        )


def _state(row: WorkflowStatus, held: frozenset[str]) -> JobState:
    if row.status in _WAITING:
        return JobState.RUNNING if row.recovery_attempts else JobState.QUEUED
    if row.status == "CANCELLED":
        return JobState.CANCELLING if row.workflow_id in held else JobState.CANCELLED
    return {"PENDING": JobState.RUNNING, "SUCCESS": JobState.SUCCEEDED}.get(row.status, JobState.FAILED)


def _fields(row: WorkflowStatus) -> dict[str, Any]:
    if row.input is None:
        raise ServiceError("internal_error", f"Job {row.workflow_id} was read without its input.")
    fields: dict[str, Any] = row.input["args"][0]
    return fields


def _iso(epoch_milliseconds: int | None) -> str:
    return datetime.fromtimestamp((epoch_milliseconds or 0) / 1000, UTC).isoformat(timespec="milliseconds")
