"""Jobs seen from outside the worker: submit, look, cancel, delete. Light: no torch, no probe.

A job is a DBOS workflow. Its input (request, corpus id, name) and its state live in the job database, its
files in ``home/jobs/<id>``. The states of `JobState` come from three places:

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

import contextlib
import hashlib
import json
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
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
from probe_service.problems import error_from_json, problem_of
from probe_service.schemas import Job, JobList, JobState, ProbeRequest, ProblemDetail, Progress
from probe_service.settings import Settings
from probe_service.store import CorpusStore, CorpusWriter

__all__ = [
    "APPLICATION_NAME",
    "CURVE_EVENT",
    "PROGRESS_EVENT",
    "QUEUE_NAME",
    "WORKFLOW_NAME",
    "JobClient",
    "JobSubmission",
    "prepare_database",
]

APPLICATION_NAME = "probe-service"
QUEUE_NAME = "probes"
WORKFLOW_NAME = "probe"
PROGRESS_EVENT = "progress"
CURVE_EVENT = "curve"

_KEY_NAMESPACE = uuid.UUID("0b0f1d0e-6f0f-5d5b-9f58-2f8f6a2f7c11")
_WAITING = ["ENQUEUED", "DELAYED"]
_UNFINISHED = [*_WAITING, "PENDING"]

_CAUSES = {
    "worker_out_of_memory": "The worker ran out of memory each time it tried this job; probe fewer rows"
    " (max_rows) or smaller batch sizes, or give it more memory.",
    "worker_killed": "The worker was killed each time it tried this job.",
    "worker_crashed": "The worker crashed each time it tried this job; its log says more.",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobSubmission:
    """What a job is to do: small, and kept in the job database.

    Args:
        request: What to measure.
        corpus_id: SHA-256 of a stored corpus, or None.
        hf: Name of a Hugging Face data set, or None; exactly one of the two is given.
        corpus_name: Name for people.
    """

    request: ProbeRequest
    corpus_id: str | None
    hf: str | None
    corpus_name: str

    def to_json(self) -> dict[str, Any]:
        """Return the submission as plain JSON values."""
        return {
            "request": self.request.model_dump(mode="json"),
            "corpus_id": self.corpus_id,
            "hf": self.hf,
            "corpus_name": self.corpus_name,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> JobSubmission:
        """Rebuild a submission from `to_json`."""
        return cls(
            request=ProbeRequest.model_validate(fields["request"]),
            corpus_id=fields["corpus_id"],
            hf=fields["hf"],
            corpus_name=fields["corpus_name"],
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that distinguishes one submission from another."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


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


class JobClient:
    """Submits jobs and watches them. Methods block briefly on the database: call them from a thread.

    The database is connected to at the first call and may come up later than this process.

    Args:
        settings: Where the database and the home folder are.
        store: Stored corpora and job folders.
    """

    def __init__(self, settings: Settings, store: CorpusStore) -> None:
        self._settings = settings
        self._store = store
        self._connecting = threading.Lock()
        # Held while jobs and the corpora that they refer to are created or deleted.
        self._changing = threading.RLock()
        self._connected: DBOSClient | None = None

    def submit(self, submission: JobSubmission, *, idempotency_key: str | None = None) -> str:
        """Queue a job and return its id.

        With a key, the same submission again gives the same id, and the job is not queued a second time.

        Raises:
            JobError: `idempotency_conflict` if the key was used for another submission.
            ServiceError: `queue_full`, `database_unavailable`.
        """
        job_id = str(uuid.uuid4() if idempotency_key is None else uuid.uuid5(_KEY_NAMESPACE, idempotency_key))
        options: EnqueueOptions = {
            "workflow_name": WORKFLOW_NAME,
            "queue_name": QUEUE_NAME,
            "workflow_id": job_id,
            "workflow_id_reuse_policy": "reject",
            "app_version": self._settings.application_version,
        }
        with self._client() as client, self._changing:
            if idempotency_key is not None and (earlier := self._row(client, job_id)) is not None:
                return self._same_submission(earlier, submission)
            unfinished = client.list_workflows(
                name=WORKFLOW_NAME, status=_UNFINISHED, load_input=False, load_output=False
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
                client.enqueue(options, {**submission.to_json(), "submitted_at": submitted_at})
            except dbos_error.DBOSWorkflowIDInUseError:
                earlier = self._row(client, job_id)
                if earlier is None:
                    raise
                return self._same_submission(earlier, submission)
        return job_id

    def submit_upload(
        self,
        upload: CorpusWriter,
        corpus_format: str,
        request: ProbeRequest,
        corpus_name: str,
        *,
        idempotency_key: str | None = None,
    ) -> str:
        """Store an upload and queue a job that reads it; if the job is refused, the upload is not kept.

        Raises:
            JobError: `idempotency_conflict`.
            ServiceError: `queue_full`, `database_unavailable`, `storage_failed`.
        """
        with self._changing:
            stored = upload.commit(corpus_name, corpus_format)
            submission = JobSubmission(request, stored.id, None, corpus_name)
            try:
                return self.submit(submission, idempotency_key=idempotency_key)
            except ProbeError:
                with contextlib.suppress(ProbeError):
                    self._release_corpus(stored.id)
                raise

    def get(self, job_id: str) -> Job:
        """Return a job as it stands.

        Raises:
            JobError: `job_not_found`.
            ServiceError: `database_unavailable`.
        """
        with self._client() as client:
            return self._job(
                client, self._existing_row(client, job_id), self._held_jobs(), with_progress=True
            )

    def list(self, *, offset: int = 0, limit: int = 50) -> JobList:
        """Return jobs, newest first; only those under way carry their progress."""
        with self._client() as client:
            rows = client.list_workflows(name=WORKFLOW_NAME, sort_desc=True, offset=offset, limit=limit + 1)
            held = self._held_jobs()
            jobs = [
                self._job(client, row, held, with_progress=row.status == "PENDING") for row in rows[:limit]
            ]
            jobs.sort(key=lambda job: job.created_at, reverse=True)
            return JobList(jobs=jobs, next_offset=offset + limit if len(rows) > limit else None)

    def count_by_state(self) -> dict[JobState, int]:
        """Return how many jobs are in each state."""
        counts = dict.fromkeys(JobState, 0)
        with self._client() as client:
            held = self._held_jobs()
            for row in client.list_workflows(name=WORKFLOW_NAME, load_input=False, load_output=False):
                counts[_state(row, held)] += 1
        return counts

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop and return it as it stands then; a job that has ended stays as it is.

        Raises:
            JobError: `job_not_found`.
        """
        with self._client() as client:
            if self._existing_row(client, job_id).status in _UNFINISHED:
                client.cancel_workflow(job_id)
        return self.get(job_id)

    def delete(self, job_id: str) -> None:
        """Delete a job and what it stored.

        Its corpus goes as well, unless that was uploaded for its own sake or another job refers to it. A job that
        is still queued is cancelled first.

        Raises:
            JobError: `job_not_found`; `job_not_ended` while a worker holds it: cancel it first.
        """
        job = self.get(job_id)
        if job.state is JobState.QUEUED:
            job = self.cancel(job_id)
        if not job.state.ended:
            raise JobError(
                "job_not_ended", f"Job {job_id} is {job.state}; cancel it, wait until it ended, delete then."
            )
        with self._changing:
            with self._client() as client:
                client.delete_workflow(job_id)
            self._store.delete_job_folder(job_id)
            if job.corpus_id is not None:
                self._release_corpus(job.corpus_id)

    def delete_corpus(self, corpus_id: str) -> None:
        """Delete a stored corpus.

        Raises:
            RequestError: `corpus_not_found`.
            JobError: `corpus_in_use` by a job that has not ended.
        """
        with self._changing:
            self._store.get(corpus_id)
            users = self._corpus_users(corpus_id, _UNFINISHED)
            if users:
                raise JobError(
                    "corpus_in_use",
                    f"Job {users[0]} still reads this corpus; cancel it first.",
                    count=len(users),
                )
            self._store.delete(corpus_id)

    def _release_corpus(self, corpus_id: str) -> None:
        """Delete a corpus that nobody uploaded for its own sake and that no job refers to any more."""
        if not self._store.is_kept(corpus_id) and not self._corpus_users(corpus_id, None):
            with contextlib.suppress(RequestError):
                self._store.delete(corpus_id)

    def _corpus_users(self, corpus_id: str, statuses: Sequence[str] | None) -> Sequence[str]:
        with self._client() as client:
            rows = client.list_workflows(
                name=WORKFLOW_NAME, status=None if statuses is None else [*statuses], load_output=False
            )
        return [row.workflow_id for row in rows if _fields(row)["corpus_id"] == corpus_id]

    def watch(self, job_id: str, *, poll_seconds: float = 0.5) -> Iterator[Job]:
        """Yield the job now and whenever it changed, until it has ended."""
        last: Job | None = None
        while last is None or not last.state.ended:
            job = self.get(job_id)
            if job != last:
                yield job
                last = job
            if not job.state.ended:
                time.sleep(poll_seconds)

    def wait(self, job_id: str, timeout_seconds: float) -> Job:
        """Return the job once it has ended, or as it stands when the time is up."""
        deadline = time.monotonic() + timeout_seconds
        for job in self.watch(job_id, poll_seconds=0.2):
            if time.monotonic() >= deadline:
                return job
        return self.get(job_id)

    def is_cancelled(self, job_id: str) -> bool:
        """Whether the job was asked to stop (or deleted); one cheap query."""
        with self._client() as client:
            row = self._row(client, job_id, load=False)
        return row is None or row.status == "CANCELLED"

    def hand_back(self, job_id: str) -> None:
        """Put a job that this process's worker leaves in good order at the head of the queue again.

        The orderly restart does not count as one of the job's three attempts.
        """
        with self._client() as client:
            row = self._row(client, job_id, load=False)
            if row is not None and row.status == "PENDING":
                client.resume_workflow(job_id, queue_name=QUEUE_NAME)

    def check_database(self) -> None:
        """Raise `database_unavailable` unless the job database answers."""
        with self._client() as client:
            client.check_connection()

    def workers(self) -> Sequence[Heartbeat]:
        """Return the workers that are alive."""
        return live_heartbeats(self._settings.home)

    def job_folder(self, job_id: str) -> Path:
        """Return the folder of a job."""
        return self._store.job_folder(job_id)

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
    def _row(client: DBOSClient, job_id: str, *, load: bool = True) -> WorkflowStatus | None:
        rows = client.list_workflows(
            workflow_ids=[job_id], name=WORKFLOW_NAME, limit=1, load_input=load, load_output=load
        )
        return rows[0] if rows else None

    def _existing_row(self, client: DBOSClient, job_id: str) -> WorkflowStatus:
        try:
            row = self._row(client, str(uuid.UUID(job_id)))
        except ValueError:
            row = None
        if row is None:
            raise JobError("job_not_found", f"There is no job {job_id[:80]!r}; it may have been deleted.")
        return row

    @staticmethod
    def _same_submission(row: WorkflowStatus, submission: JobSubmission) -> str:
        if JobSubmission.from_json(_fields(row)).fingerprint != submission.fingerprint:
            raise JobError(
                "idempotency_conflict",
                f"The Idempotency-Key was used for another corpus or request (job {row.workflow_id});"
                " use a new key.",
            )
        return row.workflow_id

    def _job(
        self, client: DBOSClient, row: WorkflowStatus, held: frozenset[str], *, with_progress: bool
    ) -> Job:
        fields = _fields(row)
        submission = JobSubmission.from_json(fields)
        at, progress = self._progress(client, row.workflow_id) if with_progress else (None, None)
        attempts = row.recovery_attempts or 0
        state = _state(row, held)
        if state is JobState.QUEUED and progress is not None:
            state = JobState.RUNNING  # handed back by a worker that was told to stop
        error = self._problem(row) if state is JobState.FAILED else None
        path = f"/v1/probes/{row.workflow_id}"
        return Job(
            id=row.workflow_id,
            state=state,
            corpus_id=submission.corpus_id,
            corpus_name=submission.corpus_name,
            created_at=fields["submitted_at"],
            updated_at=max(_iso(row.updated_at), fields["submitted_at"], at or ""),
            request=submission.request,
            progress=progress,
            attempts=attempts if row.status != "MAX_RECOVERY_ATTEMPTS_EXCEEDED" else attempts - 1,
            error=error,
            links={
                "self": path,
                "events": f"{path}/events",
                "cancel": f"{path}/cancel",
                "report": f"{path}/report",
                "report_html": f"{path}/report.html",
                "chart_svg": f"{path}/chart.svg",
                "chart_png": f"{path}/chart.png",
                "pairs": f"{path}/pairs",
            },
        )

    @staticmethod
    def _progress(client: DBOSClient, job_id: str) -> tuple[str | None, Progress | None]:
        event = client.get_event(job_id, PROGRESS_EVENT, timeout_seconds=0)
        if event is None:
            return None, None
        curve = client.get_event(job_id, CURVE_EVENT, timeout_seconds=0) or []
        return event["at"], Progress.model_validate({**event["progress"], "curve": curve})

    def _problem(self, row: WorkflowStatus) -> ProblemDetail:
        instance = f"/v1/probes/{row.workflow_id}"
        error: ProbeError
        if row.status == "MAX_RECOVERY_ATTEMPTS_EXCEEDED":
            cause = last_exit_cause(self._store.job_folder(row.workflow_id))
            error = JobError(cause, _CAUSES[cause])
        elif isinstance(row.error, PortableWorkflowError) and isinstance(row.error.data, dict):
            error = error_from_json(row.error.data)
        else:
            error = ServiceError(
                "internal_error", "The job failed for a reason that is ours; the worker's log has it."
            )
        return problem_of(error, instance)


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
