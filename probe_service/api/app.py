"""The app: routes, errors, guard, put together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry

from probe_service.api import about, audits, corpora, probes, trials
from probe_service.api.answers import install_error_handlers
from probe_service.api.guard import Guard, RequestMetrics
from probe_service.api.service import Service, require_key
from probe_service.errors import ProbeError
from probe_service.jobs.audits import AuditClient
from probe_service.jobs.client import JobClient
from probe_service.jobs.queue import JobQueue
from probe_service.jobs.supervisor import WorkerSupervisor
from probe_service.jobs.trials import TrialClient
from probe_service.schemas import (
    AuditAnswer,
    AuditRequest,
    CorpusOptions,
    ProbeRequest,
    ProbeSubmission,
    ProblemDetail,
    TrialSubmission,
)
from probe_service.settings import Settings
from probe_service.store import CorpusStore

__all__ = ["create_app"]

_log = logging.getLogger(__name__)


def create_app(settings: Settings, *, with_worker: bool = False) -> FastAPI:
    """Put the service together.

    Args:
        settings: As read from the environment.
        with_worker: Run one supervised worker process for as long as the app runs.
    """
    store = CorpusStore(settings.home, settings.max_upload_bytes)
    queue = JobQueue(settings, store)
    service = Service(
        settings,
        store,
        queue,
        JobClient(queue, store),
        AuditClient(queue, store, settings),
        TrialClient(queue, store),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        store.remove_abandoned_uploads()
        try:
            await run_in_threadpool(queue.check_database)
        except ProbeError as error:
            _log.warning("starting without the job database: %s", error)
        supervisor = WorkerSupervisor(settings) if with_worker else None
        if supervisor is not None:
            supervisor.start()
        try:
            yield
        finally:
            if supervisor is not None:
                await run_in_threadpool(supervisor.stop)
            queue.close()

    app = FastAPI(
        title="probe-service",
        version=about.service_version(),
        description="How big may a contrastive batch be before false negatives spoil training?",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        responses={"default": {"model": ProblemDetail, "description": "An RFC 9457 problem document."}},
    )
    app.state.service = service
    app.state.registry = CollectorRegistry()
    install_error_handlers(app)
    app.include_router(about.router)
    app.include_router(probes.router, dependencies=[Depends(require_key)])
    app.include_router(audits.router, dependencies=[Depends(require_key)])
    app.include_router(trials.router, dependencies=[Depends(require_key)])
    app.include_router(corpora.router, dependencies=[Depends(require_key)])
    app.mount("/assets", StaticFiles(directory=about.dashboard_folder(), check_dir=False), name="assets")
    app.add_middleware(Guard, metrics=RequestMetrics(app.state.registry))
    _describe_bodies(app)
    return app


def _describe_bodies(app: FastAPI) -> None:
    """Add to the OpenAPI description the nouns of bodies that the routes read themselves, as a stream."""
    describe = app.openapi

    def openapi() -> dict[str, object]:
        described = describe()
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        for noun in (
            ProbeSubmission,
            ProbeRequest,
            CorpusOptions,
            AuditRequest,
            AuditAnswer,
            TrialSubmission,
        ):
            schema = noun.model_json_schema(ref_template="#/components/schemas/{model}")
            for name, definition in schema.pop("$defs", {}).items():
                schemas.setdefault(name, definition)
            schemas.setdefault(noun.__name__, schema)
        return described

    app.openapi = openapi  # type: ignore[method-assign]
