"""Trials seen from outside the worker: submit, look, cancel, delete. Light: no torch, no probe."""

from __future__ import annotations

import uuid
from typing import Any

from probe_service.errors import JobError
from probe_service.jobs.queue import JobKind, JobQueue, JobRecord
from probe_service.problems import problem_of
from probe_service.schemas import TrialJob, TrialJobList, TrialReport, TrialSubmission
from probe_service.store import CorpusStore
from probe_service.trial import TrialFolder

__all__ = ["TrialClient", "submission_of"]

_KEY_NAMESPACE = uuid.UUID("8d7b1f52-3c0e-5f64-9a7e-2f1f4f0b6c35")


def submission_of(fields: dict[str, Any]) -> TrialSubmission:
    """Rebuild a submission from the fields of its job."""
    return TrialSubmission.model_validate({name: fields[name] for name in TrialSubmission.model_fields})


class TrialClient:
    """Submits trials and watches them. Methods block briefly on the database: call them from a thread.

    Every method may raise ServiceError `database_unavailable`.

    Args:
        queue: The job database.
        store: Stored corpora and job folders.
    """

    def __init__(self, queue: JobQueue, store: CorpusStore) -> None:
        self._queue = queue
        self._store = store

    def submit(self, submission: TrialSubmission, *, idempotency_key: str | None = None) -> TrialJob:
        """Queue a trial.

        With a key, the same submission again gives the same trial, and it is not queued a second time.

        Raises:
            JobError: `idempotency_conflict` if the key was used for another submission.
            RequestError: `corpus_not_found`.
            ServiceError: `queue_full`.
        """
        key = None if idempotency_key is None else uuid.uuid5(_KEY_NAMESPACE, idempotency_key)
        job_id = str(key or uuid.uuid4())
        with self._queue.changing:
            if submission.corpus_id is not None:
                stored = self._store.get(submission.corpus_id)
                submission = submission.model_copy(update={"name": submission.name or stored.name})
            elif submission.hf is not None:
                submission = submission.model_copy(update={"name": submission.name or submission.hf})
            self._queue.enqueue(JobKind.TRIAL, job_id, submission.model_dump(mode="json"))
            queued = self._queue.get(JobKind.TRIAL, job_id)
        if submission_of(queued.fields) != submission:
            raise JobError(
                "idempotency_conflict",
                f"The Idempotency-Key was used for another corpus or request (trial {job_id}); use a new key.",
            )
        return self._trial(queued)

    def get(self, job_id: str) -> TrialJob:
        """Return a trial as it stands.

        Raises:
            JobError: `job_not_found`.
        """
        return self._trial(self._queue.get(JobKind.TRIAL, job_id))

    def list(self, *, offset: int = 0, limit: int = 50) -> TrialJobList:
        """Return trials, newest first, without their tables; only those under way carry their progress."""
        records = self._queue.list(JobKind.TRIAL, offset=offset, limit=limit + 1)
        jobs = sorted(
            (self._trial(record, with_table=False) for record in records[:limit]),
            key=lambda job: job.created_at,
            reverse=True,
        )
        return TrialJobList(trials=jobs, next_offset=offset + limit if len(records) > limit else None)

    def report(self, job_id: str) -> TrialReport:
        """Return what a trial has found so far; the whole once its `complete` is true.

        Raises:
            JobError: `job_not_found`; `job_not_ready` before its first cell has finished; `job_without_report` where none
                ever will.
        """
        record = self._queue.get(JobKind.TRIAL, job_id)
        report = self._folder(record).report()
        if report is not None:
            return report
        if record.state.ended:
            raise JobError("job_without_report", f"Trial {record.id} has {record.state}; there is no report.")
        raise JobError(
            "job_not_ready",
            f"Trial {record.id} is {record.state}; there is something to report once its first cell has finished.",
        )

    def cancel(self, job_id: str) -> TrialJob:
        """Ask a trial to stop and return it as it stands then; what has finished of it stays.

        Raises:
            JobError: `job_not_found`.
        """
        self._queue.cancel(self._queue.get(JobKind.TRIAL, job_id).id)
        return self.get(job_id)

    def delete(self, job_id: str) -> None:
        """Delete a trial and what it stored; its corpus as well, unless that is used elsewhere.

        Raises:
            JobError: `job_not_found`; `job_not_ended` while a worker holds it: cancel it first.
        """
        record = self._queue.get(JobKind.TRIAL, job_id)
        with self._queue.changing:
            self._queue.remove(record.id, f"Trial {record.id}")
            corpus_id = record.fields["corpus_id"]
            if corpus_id is not None:
                self._queue.release_corpus(corpus_id)

    def _folder(self, record: JobRecord) -> TrialFolder:
        return TrialFolder(self._store.job_folder(record.id))

    def _trial(self, record: JobRecord, *, with_table: bool = True) -> TrialJob:
        submission = submission_of(record.fields)
        report = self._folder(record).report() if with_table else None
        path = f"/v1/trials/{record.id}"
        return TrialJob(
            id=record.id,
            state=record.state,
            corpus_id=submission.corpus_id,
            corpus_name=submission.name or "digits",
            created_at=record.created_at,
            updated_at=record.updated_at,
            request=submission.request,
            progress=record.progress,
            attempts=record.attempts,
            error=None if record.error is None else problem_of(record.error, path),
            table=[] if report is None else report.table,
            links={
                "self": path,
                "cancel": f"{path}/cancel",
                "report": f"{path}/report",
                "chart": f"{path}/charts/scores.json",
                "masking_chart": f"{path}/charts/masking.json",
            },
        )
