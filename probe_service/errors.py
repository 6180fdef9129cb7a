"""The errors of probe-service: one tree, each with a stable code.

::

    ProbeError
    ├── InputError                 the request or the corpus is at fault (HTTP 4xx, exit 2)
    │   ├── RequestError           request_invalid, batch_size_too_large, temperature_not_positive …
    │   └── CorpusError            corpus_empty, corpus_bad_line, corpus_invalid_utf8 …
    ├── EncoderError               encoder_unknown, encoder_canary_mismatch, encoder_unavailable …
    ├── JobError                   job_not_found, job_not_ready, worker_out_of_memory …
    └── ServiceError               unauthorized, payload_too_large, queue_full, storage_failed …

A code never changes its meaning once released. The message says what was wrong, where, and what to do.
Errors of libraries are translated where they enter; the cause is kept with ``raise … from``.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CorpusError",
    "EncoderError",
    "InputError",
    "JobError",
    "ProbeError",
    "RequestError",
    "ServiceError",
]


class ProbeError(Exception):
    """What went wrong, with a stable code, and where.

    Args:
        code: Stable identifier in snake case, e.g. ``corpus_bad_line``.
        message: What was wrong and what to do, in a sentence or two.
        row: Number of the first bad row, from 1, as an editor counts lines; None where no row is at fault.
        column: Name of the column at fault, if one is.
        count: How many rows have this fault, if they were counted.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        row: int | None = None,
        column: str | None = None,
        count: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.row = row
        self.column = column
        self.count = count

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values: code, message, row, column, count."""
        return {
            "code": self.code,
            "message": self.message,
            "row": self.row,
            "column": self.column,
            "count": self.count,
        }


def _rebuild(cls: type[ProbeError], fields: dict[str, Any]) -> ProbeError:
    return cls(
        fields["code"], fields["message"], row=fields["row"], column=fields["column"], count=fields["count"]
    )


class InputError(ProbeError):
    """The request or the corpus is at fault; sending the same again gives the same error."""


class RequestError(InputError):
    """A parameter is out of range or does not fit the corpus."""


class CorpusError(InputError):
    """The corpus cannot be read as asked, or too little of it is usable."""


class EncoderError(ProbeError):
    """The encoder is unknown, not allowed, unreachable, or fails its check at load."""


class JobError(ProbeError):
    """A job does not exist, is not ready, or was ended from outside."""


class ServiceError(ProbeError):
    """The service itself refuses or fails: authorisation, limits, storage."""
