"""Audits of finished probes seen from outside the worker: draw, look, cancel, delete. Light: no torch, no probe.

A probe has one audit at most. The job that draws its pairs has an id that follows from the probe's, and a folder of its
own, in which the labels are collected once the job has succeeded.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from typing import Any

from probe_service.audit import AuditFolder
from probe_service.errors import JobError
from probe_service.jobs.queue import JobKind, JobQueue, JobRecord
from probe_service.problems import problem_of
from probe_service.schemas import AuditJob, AuditRequest, JobState
from probe_service.settings import Settings
from probe_service.store import CorpusStore

__all__ = ["AuditClient", "AuditSubmission", "audit_job_id"]

_NAMESPACE = uuid.UUID("5c5a3f0e-52a4-5a52-9d0b-6a1f7c2b9e44")


def audit_job_id(probe_id: str) -> str:
    """Return the id of the job that draws the audit of a probe."""
    return str(uuid.uuid5(_NAMESPACE, probe_id))


@dataclass(frozen=True)
class AuditSubmission:
    """What the drawing of an audit is to do: small, and kept in the job database.

    Args:
        probe_id: The finished probe; its report says how the corpus is read and encoded.
        wanted: How much is asked.
        corpus_id, hf, corpus_name: As of the probe's `JobSubmission`.
    """

    probe_id: str
    wanted: AuditRequest
    corpus_id: str | None
    hf: str | None
    corpus_name: str

    def to_json(self) -> dict[str, Any]:
        """Return the submission as plain JSON values."""
        return {**asdict(self), "wanted": self.wanted.model_dump(mode="json")}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> AuditSubmission:
        """Rebuild a submission from `to_json`."""
        own = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**own, "wanted": AuditRequest.model_validate(fields["wanted"])})


class AuditClient:
    """Has audits drawn and watches them. Methods block briefly on the database: call them from a thread.

    Every method may raise JobError `job_not_found` where there is no such probe, and ServiceError
    `database_unavailable`.

    Args:
        queue: The job database.
        store: Stored corpora and job folders.
        settings: Where the labels are kept.
    """

    def __init__(self, queue: JobQueue, store: CorpusStore, settings: Settings) -> None:
        self._queue = queue
        self._store = store
        self._settings = settings

    def submit(self, probe_id: str, wanted: AuditRequest) -> AuditJob:
        """Queue the drawing of an audit. The same again changes nothing; one that failed or was cancelled is replaced.

        Args:
            probe_id: A probe that has succeeded.
            wanted: How much is asked.

        Raises:
            JobError: `audit_exists` where there is another.
            RequestError: `corpus_not_found` where the corpus was deleted meanwhile.
            ServiceError: `queue_full`.
        """
        probe = self._queue.get(JobKind.PROBE, probe_id)
        job_id = audit_job_id(probe.id)
        corpus = {name: probe.fields[name] for name in ("corpus_id", "hf", "corpus_name")}
        submission = AuditSubmission(probe.id, wanted, **corpus)
        with self._queue.changing:
            earlier = self._queue.find(JobKind.AUDIT, job_id)
            if earlier is not None and earlier.state in (JobState.FAILED, JobState.CANCELLED):
                self._queue.remove(job_id, f"The audit of job {probe.id}")
                earlier = None
            if earlier is None:
                if submission.corpus_id is not None:
                    self._store.get(submission.corpus_id)
                self._queue.enqueue(JobKind.AUDIT, job_id, submission.to_json())
        if earlier is not None and AuditSubmission.from_json(earlier.fields) != submission:
            raise JobError(
                "audit_exists",
                f"Job {probe.id} has an audit of another size or for another judge; delete it first. Its labels are used again.",
            )
        return self.get(probe.id)

    def get(self, probe_id: str) -> AuditJob:
        """Return the audit of a probe as it stands.

        Raises:
            JobError: `audit_not_found`.
        """
        return self._audit(self._existing(probe_id))

    def cancel(self, probe_id: str) -> AuditJob:
        """Ask the drawing to stop and return the audit as it stands then; one that is drawn stays as it is.

        Raises:
            JobError: `audit_not_found`.
        """
        self._queue.cancel(self._existing(probe_id).id)
        return self.get(probe_id)

    def delete(self, probe_id: str) -> None:
        """Delete the audit of a probe. Its labels are kept by the texts that were shown, for later audits.

        Raises:
            JobError: `audit_not_found`; `job_not_ended` while it is being drawn: cancel it first.
        """
        self._queue.remove(self._existing(probe_id).id, f"The audit of job {probe_id}")

    def folder(self, probe_id: str) -> AuditFolder:
        """Return the drawn audit of a probe.

        Raises:
            JobError: `audit_not_found`; `audit_not_ready` before the pairs are drawn; `audit_without_pairs` where they
                never will be.
        """
        record = self._existing(probe_id)
        if record.state is JobState.SUCCEEDED:
            return self._folder(record)
        if record.state in (JobState.FAILED, JobState.CANCELLED):
            raise JobError(
                "audit_without_pairs",
                f"The drawing of this audit has {record.state}; there is nothing to label.",
            )
        raise JobError(
            "audit_not_ready",
            f"The drawing of this audit is {record.state}; its pairs are there once it succeeded.",
        )

    def _existing(self, probe_id: str) -> JobRecord:
        probe = self._queue.get(JobKind.PROBE, probe_id)
        record = self._queue.find(JobKind.AUDIT, audit_job_id(probe.id))
        if record is None:
            raise JobError("audit_not_found", f"Job {probe.id} has no audit; draw one first.")
        return record

    def _folder(self, record: JobRecord) -> AuditFolder:
        return AuditFolder(self._store.job_folder(record.id), self._settings.home)

    def _audit(self, record: JobRecord) -> AuditJob:
        submission = AuditSubmission.from_json(record.fields)
        path = f"/v1/probes/{submission.probe_id}/audit"
        return AuditJob(
            id=submission.probe_id,
            state=record.state,
            created_at=record.created_at,
            updated_at=record.updated_at,
            request=submission.wanted,
            progress=record.progress,
            attempts=record.attempts,
            error=None if record.error is None else problem_of(record.error, path),
            counts=self._folder(record).counts() if record.state is JobState.SUCCEEDED else None,
            links={
                "self": path,
                "cancel": f"{path}/cancel",
                "pairs": f"{path}/pairs",
                "labels": f"{path}/labels",
                "sheet_jsonl": f"{path}/pairs.jsonl",
                "sheet_csv": f"{path}/pairs.csv",
                "report": f"{path}/report",
                "chart": f"{path}/chart.json",
            },
        )
