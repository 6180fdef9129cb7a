"""What stands around every request: security headers, a check of its origin, and counting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from probe_service.api.answers import problem_response
from probe_service.errors import ServiceError

__all__ = ["PAGE_POLICY", "Guard", "RequestMetrics"]

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:;"
    " connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the service's own pages. Vega sets styles on what it draws, hence inline
styles.
"""

_STRICTEST_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
_LINGER_SECONDS = 1.5
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestMetrics:
    """Counts and durations of requests, for Prometheus.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "probe_http_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "probe_http_request_seconds",
            "Seconds until an answer began.",
            ["method", "route"],
            registry=registry,
        )


class Guard:
    """ASGI middleware around the whole app.

    A browser sends a page's origin along with whatever that page posts; one that is not ours is refused,
    since a form on any web page could otherwise post to a service on the visitor's own machine.

    Args:
        app: The app within.
        metrics: Counts what passes.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at = time.perf_counter()

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Content-Security-Policy", _STRICTEST_POLICY)
                headers.setdefault("Cache-Control", "no-store")
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.requests.labels(scope["method"], route, message["status"]).inc()
                self._metrics.seconds.labels(scope["method"], route).observe(time.perf_counter() - began_at)
            elif scope.get("state", {}).get("body_unread") and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _linger(receive)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        if _is_foreign(scope):
            refusal = ServiceError(
                "cross_origin_refused", "Requests from pages of other origins are refused."
            )
            await problem_response(refusal, Request(scope))(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)


async def _linger(receive: Receive) -> None:
    """Swallow what a refused client still sends, for a moment.

    Closing at once would reset the connection, and with it might go the answer that the client has not read yet.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass


def _is_foreign(scope: Scope) -> bool:
    if scope["method"] in _SAFE_METHODS:
        return False
    headers = Headers(scope=scope)
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != headers.get("host")
