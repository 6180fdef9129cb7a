"""The errors of the client: one tree.

::

    ProbeClientError
    ├── ApiError               the service answered with a problem: code, status, row, column, count
    ├── ConnectionFailed       no answer came: refused, reset, timed out, or away for too long
    ├── AnswerNotUnderstood    an answer came that is not what this version of the service would say
    ├── WaitTimeout            `wait` reached its own limit; the job goes on
    ├── JobFailed              the job ended with a problem: code, row, column, count
    └── JobCancelled           the job was stopped on request

Errors of httpx and pydantic never leave the client; they are kept as the cause.
"""

# ruff: noqa: N818 - the names say what happened
from __future__ import annotations

from probe_service.schemas import AuditJob, Job, ProblemDetail


class ProbeClientError(Exception):
    """Base of everything that the client raises about the service."""


class _WithProblem(ProbeClientError):
    """An error that carries the service's problem document."""

    def __init__(self, problem: ProblemDetail) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        row = (
            f" (row {self.row})"
            if self.row is not None and f"row {self.row}" not in self.problem.detail
            else ""
        )
        return f"{self.problem.detail}{row} [{self.code}]"

    @property
    def code(self) -> str:
        """The stable code, e.g. ``corpus_bad_line``."""
        return self.problem.code

    @property
    def row(self) -> int | None:
        """Number of the first bad row, from 1; None where no row is at fault."""
        return self.problem.row

    @property
    def column(self) -> str | None:
        """Name of the column at fault, if one is."""
        return self.problem.column

    @property
    def count(self) -> int | None:
        """How many rows have this fault, if they were counted."""
        return self.problem.count


class ApiError(_WithProblem):
    """The service answered a request with a problem.

    Args:
        problem: The problem document; made up from the status where there was none (a proxy's page, say).
        retry_after_seconds: What the service asked to wait before the next try, if it did.
    """

    def __init__(self, problem: ProblemDetail, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(problem)
        self.retry_after_seconds = retry_after_seconds

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status


class ConnectionFailed(ProbeClientError):
    """No answer came; nothing is said about the request or the corpus."""


class AnswerNotUnderstood(ProbeClientError):
    """An answer came that does not fit the schemas; client and service are probably of different versions."""


class WaitTimeout(ProbeClientError):
    """`wait` reached its limit; the job goes on.

    Args:
        job_id: The job.
        job: Its last known state; None if the service was never reached.
        timeout_seconds: The limit that was reached.
    """

    def __init__(self, job_id: str, job: Job | AuditJob | None, timeout_seconds: float) -> None:
        super().__init__(job_id, job, timeout_seconds)
        self.job_id = job_id
        self.job = job
        self.timeout_seconds = timeout_seconds

    def __str__(self) -> str:
        state = "never seen" if self.job is None else self.job.state.value
        waited = f"job {self.job_id} is {state} after {self.timeout_seconds:g} seconds"
        return f"{waited}; it goes on: wait again, or cancel it"


class JobFailed(_WithProblem):
    """The job ended with a problem.

    Args:
        job: The job, or the audit, in its final state.
        problem: What the job ended with.
    """

    def __init__(self, job: Job | AuditJob, problem: ProblemDetail) -> None:
        super().__init__(problem)
        self.job = job


class JobCancelled(ProbeClientError):
    """The job was stopped on request.

    Args:
        job: The job, or the audit, in its final state.
    """

    def __init__(self, job: Job | AuditJob) -> None:
        super().__init__(job)
        self.job = job

    def __str__(self) -> str:
        return f"job {self.job.id} was cancelled"
