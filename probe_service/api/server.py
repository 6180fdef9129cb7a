"""Serving: the API in this process, and one supervised worker beside it."""

from __future__ import annotations

import logging
import socket

import uvicorn

from probe_service.api.app import create_app
from probe_service.errors import ServiceError
from probe_service.settings import Settings

__all__ = ["run_server"]

_GRACEFUL_SECONDS = 3

_log = logging.getLogger(__name__)


def run_server(settings: Settings, *, with_worker: bool) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: Address, port (0: any that is free; the log says which), limits.
        with_worker: Run one supervised worker process as well; it ends when this process does, however that
            ends.

    Raises:
        ServiceError: `address_unavailable`.
    """
    listener = _listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(settings, with_worker=with_worker),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
    )
    _log.info("listening on http://%s:%s", f"[{host}]" if ":" in host else host, port)
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise ServiceError(
            "address_unavailable", f"Cannot listen on {host}:{port}: {error.strerror}; choose another --port."
        ) from error
