"""What the routes share: settings, store, jobs; and who may call them."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from probe_service.errors import ServiceError
from probe_service.jobs.audits import AuditClient
from probe_service.jobs.client import JobClient
from probe_service.jobs.queue import JobQueue
from probe_service.jobs.trials import TrialClient
from probe_service.settings import Settings
from probe_service.store import CorpusStore

__all__ = ["Service", "ServiceDependency", "require_key"]


@dataclass(frozen=True)
class Service:
    """The parts of the running service.

    Args:
        settings: As read from the environment.
        store: Corpora and job folders.
        queue: The job database.
        jobs: Probes in it.
        audits: Their audits.
        trials: Trials in it.
    """

    settings: Settings
    store: CorpusStore
    queue: JobQueue
    jobs: JobClient
    audits: AuditClient
    trials: TrialClient

    def default_encoder(self) -> str | None:
        """Return the encoder of requests that name none: as set, else as a live worker says, else None."""
        if self.settings.encoder is not None:
            return self.settings.encoder
        return next((worker.default_encoder for worker in self.queue.workers()), None)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(_service)]

_bearer = HTTPBearer(auto_error=False, description="One of the keys in PROBE_API_KEYS, where any are set.")


def require_key(
    service: ServiceDependency,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> None:
    """Refuse a request without one of the keys, if keys are set.

    Raises:
        ServiceError: `unauthorized`.
    """
    keys = service.settings.api_keys
    if not keys:
        return
    given = b"" if credentials is None else credentials.credentials.encode()
    # Every key is compared, so that the time taken tells nothing of which one nearly matched.
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if not any(matches):
        raise ServiceError("unauthorized", "Send one of the service's keys: Authorization: Bearer KEY.")
