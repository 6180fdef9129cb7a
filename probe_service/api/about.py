"""Routes about the service itself: health, readiness, metrics, encoders, its page and its documentation."""

from __future__ import annotations

import functools
import html
import importlib.metadata
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from probe_service.api.guard import PAGE_POLICY
from probe_service.api.service import ServiceDependency, require_key
from probe_service.charts import vega_bundle
from probe_service.errors import ProbeError, ServiceError
from probe_service.known_encoders import KNOWN_ENCODERS
from probe_service.schemas import SCHEMA_VERSION, EncoderList, ListedEncoder, Noun

__all__ = ["ServiceInfo", "dashboard_folder", "router", "service_version"]

router = APIRouter()


class WorkerInfo(Noun):
    """A worker that is alive."""

    executor_id: str
    device: str
    job_id: str | None


class ServiceInfo(Noun):
    """What this service is and what it allows."""

    name: str
    version: str
    schema_version: str
    default_encoder: str | None
    key_required: bool
    max_upload_bytes: int
    max_inline_bytes: int
    max_row_bytes: int
    max_queued_jobs: int
    workers: list[WorkerInfo]


@router.get("/health", tags=["service"])
def health() -> dict[str, str]:
    """Say that this process answers."""
    return {"status": "ok"}


@router.get("/ready", tags=["service"])
def ready(service: ServiceDependency) -> dict[str, str]:
    """Say that jobs can be taken and will be run: the database answers, a worker lives; else 503."""
    service.queue.check_database()
    if not service.queue.workers():
        raise ServiceError("worker_unavailable", "No worker is alive; jobs are kept until one is.")
    return {"status": "ready"}


@router.get("/info", tags=["service"], response_model=ServiceInfo)
def info(service: ServiceDependency) -> ServiceInfo:
    """Say what this service is and what it allows."""
    settings = service.settings
    return ServiceInfo(
        name="probe-service",
        version=service_version(),
        schema_version=SCHEMA_VERSION,
        default_encoder=service.default_encoder(),
        key_required=bool(settings.api_keys),
        max_upload_bytes=settings.max_upload_bytes,
        max_inline_bytes=settings.max_inline_bytes,
        max_row_bytes=settings.max_row_bytes,
        max_queued_jobs=settings.max_queued_jobs,
        workers=[
            WorkerInfo(executor_id=worker.executor_id, device=worker.device, job_id=worker.job_id)
            for worker in service.queue.workers()
        ],
    )


@router.get("/metrics", tags=["service"], response_class=Response)
def metrics(request: Request, service: ServiceDependency) -> Response:
    """Return counts for Prometheus."""
    present = CollectorRegistry()
    jobs = Gauge("probe_jobs", "Jobs by state.", ["state"], registry=present)
    workers = Gauge("probe_workers_alive", "Workers alive.", registry=present)
    reachable = Gauge("probe_database_up", "Whether the job database answers.", registry=present)
    try:
        for state, count in service.queue.count_by_state().items():
            jobs.labels(state).set(count)
        reachable.set(1)
    except ProbeError:
        reachable.set(0)
    workers.set(len(service.queue.workers()))
    counted: CollectorRegistry = request.app.state.registry
    return Response(generate_latest(counted) + generate_latest(present), media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/v1/encoders", tags=["encoders"], response_model=EncoderList, dependencies=[Depends(require_key)]
)
def list_encoders(service: ServiceDependency) -> EncoderList:
    """List the encoders that requests may name."""
    default = service.default_encoder()
    allowed = service.settings.allowed_encoders
    names = list(KNOWN_ENCODERS) if allowed is None else list(allowed)
    if service.settings.encoder is not None:
        names.append(service.settings.encoder)
    listed = []
    for name in dict.fromkeys(names):
        known = KNOWN_ENCODERS.get(name)
        listed.append(
            ListedEncoder(
                name=name,
                hub_name=known.hub_name if known else None,
                revision=known.revision if known else None,
                pooling=known.pooling if known else None,
                max_length=known.max_length if known else None,
                default=name == default,
            )
        )
    return EncoderList(encoders=listed, default=default)


@router.get("/", include_in_schema=False)
def page() -> FileResponse:
    """Return the page."""
    return FileResponse(
        dashboard_folder() / "index.html",
        media_type="text/html",
        headers={"Content-Security-Policy": PAGE_POLICY},
    )


@router.get("/assets/vega.js", include_in_schema=False)
async def vega() -> Response:
    """Return the script that draws charts; it sets `window.vegaEmbed`."""
    script = await run_in_threadpool(vega_bundle)
    return Response(script, media_type="text/javascript", headers={"Cache-Control": "public, max-age=86400"})


@router.get("/openapi.json", include_in_schema=False)
def openapi(request: Request) -> JSONResponse:
    """Return the API's description."""
    app: FastAPI = request.app
    return JSONResponse(app.openapi())


@router.get("/docs", include_in_schema=False, response_class=HTMLResponse)
def documentation(request: Request) -> HTMLResponse:
    """Return the API's description as a page without scripts, which needs no other network."""
    app: FastAPI = request.app
    return HTMLResponse(_documentation(app.openapi()), headers={"Content-Security-Policy": PAGE_POLICY})


@functools.cache
def dashboard_folder() -> Path:
    """Return the folder of the page's files: beside this module if installed, else in the checkout."""
    here = Path(__file__).resolve()
    installed = here.parent / "dashboard"
    return installed if installed.is_dir() else here.parents[2] / "clients" / "dashboard"


@functools.cache
def service_version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("probe-service")
    except importlib.metadata.PackageNotFoundError:
        return "0 (not installed)"


def _documentation(description: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>probe-service API</title>",
        "<meta name=viewport content='width=device-width'>",
        "<style>:root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}code{font-size:.95em}h2{margin-top:2rem}dt{font-weight:600}</style>",
        f"<h1>{html.escape(description['info']['title'])} {html.escape(description['info']['version'])}</h1>",
        f"<p>{html.escape(description['info'].get('description', ''))}</p>",
        "<p>The same for machines: <a href='/openapi.json'>openapi.json</a>.</p>",
    ]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', operation.get('summary', '')))}</p>")
            if operation.get("parameters"):
                parts.append("<dl>")
                for parameter in operation["parameters"]:
                    kind = parameter["schema"].get("type") or parameter["schema"].get("anyOf", [{}])[0].get(
                        "type", ""
                    )
                    parts.append(
                        f"<dt><code>{html.escape(parameter['name'])}</code></dt>"
                        f"<dd>{html.escape(parameter['in'])}, {html.escape(str(kind))}."
                        f" {html.escape(parameter.get('description', ''))}</dd>"
                    )
                parts.append("</dl>")
            bodies = operation.get("requestBody", {}).get("content", {})
            if bodies:
                parts.append(f"<p>Body: {html.escape(', '.join(bodies))}</p>")
            parts.append(f"<p>Answers: {html.escape(', '.join(operation['responses']))}</p>")
    return "\n".join(parts) + "\n"
