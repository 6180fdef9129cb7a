"""How errors look over HTTP: one table from code to status, and RFC 9457 problem documents.

Both the API (answers) and the job client (the `error` of a failed job) build their problems here, so that a
fault found at once and the same fault found later are the same object. Light: pydantic only.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from probe_service.errors import (
    CorpusError,
    EncoderError,
    InputError,
    JobError,
    ProbeError,
    RequestError,
    ServiceError,
)
from probe_service.schemas import ProblemDetail

__all__ = [
    "HTTP_STATUS",
    "error_from_json",
    "error_to_json",
    "http_status",
    "problem_of",
    "translate_validation_error",
]

HTTP_STATUS: dict[str, int] = {
    "bad_request": 400,
    "unauthorized": 401,
    "cross_origin_refused": 403,
    "audit_not_found": 404,
    "chart_not_found": 404,
    "corpus_not_found": 404,
    "job_not_found": 404,
    "route_not_found": 404,
    "method_not_allowed": 405,
    "audit_labels_incomplete": 409,
    "corpus_in_use": 409,
    "idempotency_conflict": 409,
    "job_not_ended": 409,
    "job_not_ready": 409,
    "payload_too_large": 413,
    "media_type_unsupported": 415,
    "queue_full": 429,
    "internal_error": 500,
    "database_unavailable": 503,
    "worker_unavailable": 503,
    "encoder_unavailable": 503,
    "encoder_hub_unreachable": 503,
    "storage_failed": 503,
    "worker_crashed": 500,
    "worker_killed": 500,
    "worker_out_of_memory": 500,
}
"""Codes whose status differs from that of their branch of the error tree."""

_TITLES: dict[int, str] = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Payload too large",
    415: "Unsupported media type",
    422: "Unprocessable input",
    429: "Too many requests",
    500: "Internal error",
    503: "Service unavailable",
}

_BRANCHES: dict[str, type[ProbeError]] = {
    branch.__name__: branch
    for branch in (CorpusError, EncoderError, InputError, JobError, ProbeError, RequestError, ServiceError)
}


def http_status(error: ProbeError) -> int:
    """Return the HTTP status of an error: by its code, else by its branch of the tree."""
    if error.code in HTTP_STATUS:
        return HTTP_STATUS[error.code]
    if isinstance(error, InputError | EncoderError):
        return 422
    if isinstance(error, JobError):
        return 409
    return 500


def problem_of(error: ProbeError, instance: str | None = None) -> ProblemDetail:
    """Return the problem document of an error.

    Args:
        error: What went wrong.
        instance: Path of the request or of the job that it concerns.
    """
    status = http_status(error)
    return ProblemDetail(
        type=f"urn:probe-service:error:{error.code}",
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=error.message,
        code=error.code,
        row=error.row,
        column=error.column,
        count=error.count,
        instance=instance,
    )


def error_to_json(error: ProbeError) -> dict[str, Any]:
    """Return an error as plain JSON values from which `error_from_json` rebuilds it."""
    return {"branch": type(error).__name__, **error.to_dict()}


def error_from_json(fields: dict[str, Any]) -> ProbeError:
    """Rebuild an error from the fields of `error_to_json`."""
    branch = _BRANCHES.get(fields["branch"], ProbeError)
    return branch(
        fields["code"],
        fields["message"],
        row=fields["row"],
        column=fields["column"],
        count=fields["count"],
    )


def translate_validation_error(error: ValidationError) -> RequestError:
    """Turn pydantic's error into one of ours, with a stable code and the path of the first field at fault.

    `temperature_not_positive` and `batch_size_too_small` have codes of their own; everything else is
    `request_invalid`.
    """
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    first = faults[0]
    path = ".".join(str(part) for part in first["loc"])
    field = str(first["loc"][-1]) if first["loc"] else ""
    code = "request_invalid"
    if first["type"] == "value_error" and field == "temperature":
        code = "temperature_not_positive"
    elif first["type"] == "value_error" and field == "batch_sizes" and "at least 2 rows" in first["msg"]:
        code = "batch_size_too_small"
    message = first["msg"].removeprefix("Value error, ")
    where = f"{path}: " if path else ""
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    return RequestError(code, f"{where}{message}{more}", column=path or None, count=len(faults))
