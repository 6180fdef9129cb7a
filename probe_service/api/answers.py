"""Errors as RFC 9457 problem documents: how every exception leaves the API."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from probe_service.errors import ProbeError, RequestError, ServiceError
from probe_service.problems import problem_of, translate_validation_error

__all__ = ["PROBLEM_MEDIA_TYPE", "install_error_handlers", "problem_response"]

PROBLEM_MEDIA_TYPE = "application/problem+json"

_RETRY_AFTER_SECONDS = {
    "queue_full": 10,
    "database_unavailable": 5,
    "worker_unavailable": 5,
    "storage_failed": 30,
}

_log = logging.getLogger(__name__)


def problem_response(error: ProbeError, request: Request) -> Response:
    """Return the answer for an error: status, problem document, and the headers that go with it."""
    problem = problem_of(error, request.url.path)
    headers = {}
    if error.code in _RETRY_AFTER_SECONDS:
        headers["Retry-After"] = str(_RETRY_AFTER_SECONDS[error.code])
    if error.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    if getattr(request.state, "body_unread", False):
        # The rest of the body is not wanted: say so, or the client would send all of it first.
        headers["Connection"] = "close"
    return Response(
        problem.model_dump_json(), status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers
    )


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProbeError)
    return problem_response(error, request)


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    fault = RequestError(
        "request_invalid", f"{where}: {first['msg']}", column=where, count=len(error.errors())
    )
    return problem_response(fault, request)


async def _noun_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    return problem_response(translate_validation_error(error), request)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return problem_response(
            ServiceError("route_not_found", f"There is nothing at {request.url.path}."), request
        )
    if error.status_code == 405:
        fault = ServiceError("method_not_allowed", f"{request.method} is not offered at {request.url.path}.")
        answer = problem_response(fault, request)
        answer.headers.update(error.headers or {})
        return answer
    return problem_response(RequestError("bad_request", str(error.detail)), request)


async def _disconnected(request: Request, _error: Exception) -> Response:
    # Nobody is there to read it; the handler keeps a lost upload out of the error log.
    return problem_response(
        RequestError("bad_request", "The request ended before its body was complete."), request
    )


async def _unexpected(request: Request, _error: Exception) -> Response:
    return problem_response(
        ServiceError("internal_error", "Something went wrong on our side; see the log."), request
    )


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the app leave as a problem document."""
    app.add_exception_handler(ProbeError, _ours)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(ValidationError, _noun_validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _unexpected)
