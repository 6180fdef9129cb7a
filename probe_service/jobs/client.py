"""Probes seen from outside the worker: submit, look, cancel, delete. Light: no torch, no probe."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe_service.errors import JobError, ProbeError
from probe_service.jobs.audits import audit_job_id
from probe_service.jobs.queue import JobKind, JobQueue, JobRecord
from probe_service.problems import problem_of
from probe_service.schemas import Job, JobList, ProbeRequest
from probe_service.store import CorpusStore, CorpusWriter

__all__ = ["JobClient", "JobSubmission"]

_KEY_NAMESPACE = uuid.UUID("0b0f1d0e-6f0f-5d5b-9f58-2f8f6a2f7c11")


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


class JobClient:
    """Submits probes and watches them. Methods block briefly on the database: call them from a thread.

    Every method may raise ServiceError `database_unavailable`.

    Args:
        queue: The job database.
        store: Stored corpora and job folders.
    """

    def __init__(self, queue: JobQueue, store: CorpusStore) -> None:
        self._queue = queue
        self._store = store

    def submit(self, submission: JobSubmission, *, idempotency_key: str | None = None) -> str:
        """Queue a job and return its id.

        With a key, the same submission again gives the same id, and the job is not queued a second time.

        Raises:
            JobError: `idempotency_conflict` if the key was used for another submission.
            ServiceError: `queue_full`.
        """
        job_id = str(uuid.uuid4() if idempotency_key is None else uuid.uuid5(_KEY_NAMESPACE, idempotency_key))
        with self._queue.changing:
            earlier = None if idempotency_key is None else self._queue.find(JobKind.PROBE, job_id)
            if earlier is None and not self._queue.enqueue(JobKind.PROBE, job_id, submission.to_json()):
                earlier = self._queue.get(JobKind.PROBE, job_id)
        if (
            earlier is not None
            and JobSubmission.from_json(earlier.fields).fingerprint != submission.fingerprint
        ):
            raise JobError(
                "idempotency_conflict",
                f"The Idempotency-Key was used for another corpus or request (job {job_id}); use a new key.",
            )
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
            ServiceError: `queue_full`, `storage_failed`.
        """
        with self._queue.changing:
            stored = upload.commit(corpus_name, corpus_format)
            submission = JobSubmission(request, stored.id, None, corpus_name)
            try:
                return self.submit(submission, idempotency_key=idempotency_key)
            except ProbeError:
                with contextlib.suppress(ProbeError):
                    self._queue.release_corpus(stored.id)
                raise

    def get(self, job_id: str) -> Job:
        """Return a job as it stands.

        Raises:
            JobError: `job_not_found`.
        """
        return _job(self._queue.get(JobKind.PROBE, job_id))

    def list(self, *, offset: int = 0, limit: int = 50) -> JobList:
        """Return jobs, newest first; only those under way carry their progress."""
        records = self._queue.list(JobKind.PROBE, offset=offset, limit=limit + 1)
        jobs = sorted(map(_job, records[:limit]), key=lambda job: job.created_at, reverse=True)
        return JobList(jobs=jobs, next_offset=offset + limit if len(records) > limit else None)

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop and return it as it stands then; a job that has ended stays as it is.

        Raises:
            JobError: `job_not_found`.
        """
        self._queue.cancel(self._queue.get(JobKind.PROBE, job_id).id)
        return self.get(job_id)

    def delete(self, job_id: str) -> None:
        """Delete a job, its audit, and what they stored.

        Its corpus goes as well, unless that was uploaded for its own sake or another job refers to it. A job that
        is still queued is cancelled first.

        Raises:
            JobError: `job_not_found`; `job_not_ended` while a worker holds it: cancel it first.
        """
        record = self._queue.get(JobKind.PROBE, job_id)
        with self._queue.changing:
            self._queue.remove(audit_job_id(record.id), f"The audit of job {record.id}")
            self._queue.remove(record.id, f"Job {record.id}")
            corpus_id = record.fields["corpus_id"]
            if corpus_id is not None:
                self._queue.release_corpus(corpus_id)

    def delete_corpus(self, corpus_id: str) -> None:
        """Delete a stored corpus.

        Raises:
            RequestError: `corpus_not_found`.
            JobError: `corpus_in_use` by a job that has not ended.
        """
        with self._queue.changing:
            self._store.get(corpus_id)
            users = self._queue.corpus_users(corpus_id, unfinished_only=True)
            if users:
                raise JobError(
                    "corpus_in_use",
                    f"This corpus is still read by {users[0]}; cancel it first.",
                    count=len(users),
                )
            self._store.delete(corpus_id)

    def folder(self, job_id: str) -> Path:
        """Return the folder of a job."""
        return self._store.job_folder(job_id)


def _job(record: JobRecord) -> Job:
    submission = JobSubmission.from_json(record.fields)
    path = f"/v1/probes/{record.id}"
    return Job(
        id=record.id,
        state=record.state,
        corpus_id=submission.corpus_id,
        corpus_name=submission.corpus_name,
        created_at=record.created_at,
        updated_at=record.updated_at,
        request=submission.request,
        progress=record.progress,
        attempts=record.attempts,
        error=None if record.error is None else problem_of(record.error, path),
        links={
            "self": path,
            "events": f"{path}/events",
            "cancel": f"{path}/cancel",
            "report": f"{path}/report",
            "report_html": f"{path}/report.html",
            "chart_svg": f"{path}/chart.svg",
            "chart_png": f"{path}/chart.png",
            "pairs": f"{path}/pairs",
            "audit": f"{path}/audit",
        },
    )
