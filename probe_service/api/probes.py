"""Routes of probes: submit, watch, cancel, delete, and everything that a finished one shows."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from probe_service import charts
from probe_service.api.service import Service, ServiceDependency
from probe_service.api.uploads import clean_name, media_type, read_body, receive_upload, write_rows
from probe_service.charts import ReportChart, Theme
from probe_service.corpus import sniff_corpus
from probe_service.errors import JobError, ProbeError, ServiceError
from probe_service.jobs.client import JobSubmission
from probe_service.known_encoders import check_encoder_allowed
from probe_service.problems import http_status
from probe_service.report_html import render_report_html
from probe_service.schemas import (
    CorpusOptions,
    Job,
    JobList,
    JobState,
    PairPage,
    ProbeReport,
    ProbeRequest,
    ProbeSubmission,
    SimilarPair,
)
from probe_service.store import HEAD_BYTES

__all__ = ["ThemeQuery", "finished_folder", "router"]

router = APIRouter(prefix="/v1/probes", tags=["probes"])

_LONGEST_WAIT_SECONDS = 60
_POLL_SECONDS = 0.4
_HEARTBEAT_SECONDS = 10
_WAIT_PREFERENCE = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})\"?(?=$|[,;\s])")

_REPORT_POLICY = (
    "sandbox allow-scripts allow-popups; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The report holds text from the corpus: it gets no origin, and brings the hash of its own script along."""

_drawing = threading.Lock()  # the renderer is one JavaScript engine

_SUBMIT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/ProbeSubmission"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "request": {"$ref": "#/components/schemas/ProbeRequest"},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            },
        },
    }
}

ThemeQuery = Annotated[Theme, Query(description="light or dark")]


@router.post("", status_code=202, response_model=Job, openapi_extra=_SUBMIT_BODY)
async def submit_probe(
    request: Request,
    service: ServiceDependency,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    prefer: Annotated[str | None, Header()] = None,
) -> Response:
    """Queue a probe of inline rows, a stored corpus, a Hugging Face data set, or an uploaded file.

    JSON (`ProbeSubmission`), or multipart with the parts `request` and then `file`: in that order a fault in
    the first 64 KiB is answered before the rest has been sent. `Prefer: wait=SECONDS` answers 200 with the
    report if it is ready by then. An `Idempotency-Key` makes sending twice safe.
    """
    kind = media_type(request)
    if kind == "application/json":
        job_id = await _submit_json(request, service, idempotency_key)
    elif kind == "multipart/form-data":
        job_id = await _submit_upload(request, service, idempotency_key)
    else:
        raise ServiceError("media_type_unsupported", "Send application/json or multipart/form-data.")
    return await _accepted(request, service, job_id, _seconds_to_wait(prefer))


@router.get("", response_model=JobList)
def list_probes(
    service: ServiceDependency,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> JobList:
    """List jobs, newest first."""
    return service.jobs.list(offset=offset, limit=limit)


@router.get("/{job_id}", response_model=Job)
def show_probe(job_id: str, service: ServiceDependency) -> Job:
    """Show a job: state, phase, fraction, time left, partial curve; its error if it failed."""
    return service.jobs.get(job_id)


@router.get("/{job_id}/events", response_class=EventSourceResponse)
async def follow_probe(job_id: str, request: Request, service: ServiceDependency) -> EventSourceResponse:
    """Follow a job as server-sent events: `job` with the whole job at each change, until it has ended.

    A client that reconnects is told the present state first, whatever Last-Event-ID it sends.
    """
    job = await run_in_threadpool(service.jobs.get, job_id)
    return EventSourceResponse(_events(job, request, service), ping=_HEARTBEAT_SECONDS)


@router.post("/{job_id}/cancel", status_code=202, response_model=Job)
def cancel_probe(job_id: str, service: ServiceDependency) -> Job:
    """Ask a job to stop; `cancelling` until its running step has ended. An ended job stays as it is."""
    return service.jobs.cancel(job_id)


@router.delete("/{job_id}", status_code=204)
def delete_probe(job_id: str, service: ServiceDependency) -> None:
    """Delete a job that has ended or not begun, its report, and its corpus unless that is used elsewhere."""
    service.jobs.delete(job_id)


@router.get("/{job_id}/report", response_model=ProbeReport)
def show_report(job_id: str, service: ServiceDependency) -> FileResponse:
    """Return the report, byte for byte as the worker wrote it."""
    return FileResponse(finished_folder(service, job_id) / "report.json", media_type="application/json")


@router.get("/{job_id}/report.html", response_class=HTMLResponse)
def show_report_html(job_id: str, service: ServiceDependency) -> HTMLResponse:
    """Return the report as one self-contained page."""
    report = _report(service, job_id)
    with _drawing:
        page = render_report_html(report)
    return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})


@router.get("/{job_id}/chart.svg", response_class=Response)
def draw_svg(job_id: str, service: ServiceDependency, theme: ThemeQuery = Theme.LIGHT) -> Response:
    """Draw the report's two charts as one SVG picture."""
    report = _report(service, job_id)
    with _drawing:
        picture = charts.render_svg(charts.figure(report, theme=theme))
    return Response(picture, media_type="image/svg+xml")


@router.get("/{job_id}/chart.png", response_class=Response)
def draw_png(job_id: str, service: ServiceDependency, theme: ThemeQuery = Theme.LIGHT) -> Response:
    """Draw the report's two charts as one PNG picture."""
    report = _report(service, job_id)
    with _drawing:
        picture = charts.render_png(charts.figure(report, theme=theme))
    return Response(picture, media_type="image/png")


@router.get("/{job_id}/charts/{chart}.json")
def specify_chart(
    job_id: str,
    chart: ReportChart,
    service: ServiceDependency,
    theme: ThemeQuery = Theme.LIGHT,
) -> JSONResponse:
    """Return one chart as a Vega-Lite specification; of a running job, similarity and share as far as they are known.

    404 where the report has nothing to show in it: sources where there is one, other temperatures where S is sampled.
    """
    job = service.jobs.get(job_id)
    if job.state is not JobState.SUCCEEDED:
        curve = job.progress.curve if job.progress is not None else []
        if chart is ReportChart.SIMILARITY:
            return JSONResponse(charts.similarity_chart(curve, theme=theme))
        if chart is ReportChart.SHARE:
            return JSONResponse(charts.share_chart(curve, budget=job.request.budget, theme=theme))
    spec = charts.report_chart(chart, _report(service, job_id), theme=theme)
    if spec is None:
        raise JobError("chart_not_found", f"this report has nothing to show as {chart}")
    return JSONResponse(spec)


@router.get("/{job_id}/pairs", response_model=PairPage)
def list_pairs(
    job_id: str,
    request: Request,
    service: ServiceDependency,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    format: Annotated[Literal["json", "jsonl", "csv"] | None, Query()] = None,  # noqa: A002 - the query's name
) -> Response:
    """List the most similar negative pairs: paged JSON, or all of them as jsonl or csv (also by Accept)."""
    path = finished_folder(service, job_id) / "pairs.jsonl"
    wanted = format or _format_by_accept(request.headers.get("accept", ""))
    if wanted == "jsonl":
        return FileResponse(path, media_type="application/x-ndjson", filename=f"pairs-{job_id}.jsonl")
    if wanted == "csv":
        disposition = f'attachment; filename="pairs-{job_id}.csv"'
        return StreamingResponse(
            _csv_rows(path), media_type="text/csv", headers={"Content-Disposition": disposition}
        )
    with path.open(encoding="utf-8") as lines:
        page = [SimilarPair.model_validate_json(line) for line in islice(lines, offset, offset + limit)]
        rest = sum(1 for _ in lines)
    # Beyond the end there is nothing to count from: start again.
    total = offset + len(page) + rest if page else _count_lines(path)
    following = PairPage(pairs=page, total=total, next_offset=offset + len(page) if rest else None)
    return Response(following.model_dump_json(), media_type="application/json")


async def _submit_json(request: Request, service: Service, key: str | None) -> str:
    body = await read_body(request, service.settings.max_inline_bytes)

    def submit() -> str:
        submission = ProbeSubmission.model_validate_json(body)
        _check_request(submission.request, service)
        if submission.corpus_id is not None:
            stored = service.store.get(submission.corpus_id)
            name = clean_name(submission.name, stored.name)
            return service.jobs.submit(
                JobSubmission(submission.request, stored.id, None, name), idempotency_key=key
            )
        if submission.hf is not None:
            name = clean_name(submission.name, submission.hf)
            return service.jobs.submit(
                JobSubmission(submission.request, None, submission.hf, name), idempotency_key=key
            )
        name = clean_name(submission.name, "rows")
        with service.store.writer() as writer:
            write_rows(writer, submission.rows or [])
            corpus_format = sniff_corpus(
                writer.head,
                "rows.jsonl",
                submission.request.corpus,
                complete=writer.size_bytes <= HEAD_BYTES,
                max_row_bytes=service.settings.max_row_bytes,
            )
            return service.jobs.submit_upload(
                writer, corpus_format, submission.request, name, idempotency_key=key
            )

    return await run_in_threadpool(submit)


async def _submit_upload(request: Request, service: Service, key: str | None) -> str:
    def checked_options(form: bytes) -> CorpusOptions:
        wanted = ProbeRequest.model_validate_json(form)
        _check_request(wanted, service)
        return wanted.corpus

    with service.store.writer() as writer:
        upload = await receive_upload(
            request, writer, service.settings, form_name="request", options_of=checked_options
        )
        wanted = ProbeRequest.model_validate_json(upload.form or b"{}")
        return await run_in_threadpool(
            lambda: service.jobs.submit_upload(
                writer, upload.format, wanted, upload.name, idempotency_key=key
            )
        )


def _check_request(wanted: ProbeRequest, service: Service) -> None:
    if wanted.encoder is not None:
        check_encoder_allowed(wanted.encoder, service.settings)


async def _accepted(request: Request, service: Service, job_id: str, wait_seconds: int | None) -> Response:
    location = f"/v1/probes/{job_id}"
    headers = {"Location": location}
    job = await run_in_threadpool(service.jobs.get, job_id)
    if wait_seconds is not None:
        headers["Preference-Applied"] = f"wait={wait_seconds}"
        deadline = time.monotonic() + wait_seconds
        while not job.state.ended and time.monotonic() < deadline and not await request.is_disconnected():
            await asyncio.sleep(min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            job = await run_in_threadpool(service.jobs.get, job_id)
        if job.state is JobState.SUCCEEDED:
            path = service.jobs.folder(job_id) / "report.json"
            return FileResponse(path, media_type="application/json", headers=headers)
        if job.error is not None:
            return Response(
                job.error.model_dump_json(),
                status_code=job.error.status,
                media_type="application/problem+json",
                headers=headers,
            )
    return Response(job.model_dump_json(), status_code=202, media_type="application/json", headers=headers)


def _seconds_to_wait(prefer: str | None) -> int | None:
    found = _WAIT_PREFERENCE.search(prefer.lower()) if prefer else None
    return None if found is None else min(int(found.group(1)), _LONGEST_WAIT_SECONDS)


async def _events(job: Job, request: Request, service: Service) -> AsyncIterator[ServerSentEvent]:
    number = 0
    last: Job | None = None
    while True:
        if job != last:
            number += 1
            last = job
            yield ServerSentEvent(job.model_dump_json(), event="job", id=str(number))
        if job.state.ended or await request.is_disconnected():
            return
        await asyncio.sleep(_POLL_SECONDS)
        try:
            job = await run_in_threadpool(service.jobs.get, job.id)
        except ProbeError as error:
            if http_status(error) != 503:
                return  # deleted
            # The database is away for a moment: the next round may find it again.


def finished_folder(service: Service, job_id: str) -> Path:
    """Return the folder of a probe that has succeeded.

    Raises:
        JobError: `job_not_found`, `job_not_ready`, `job_without_report`.
    """
    job = service.jobs.get(job_id)
    if job.state is JobState.SUCCEEDED:
        return service.jobs.folder(job.id)
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        raise JobError("job_without_report", f"Job {job.id} has {job.state}; there is no report.")
    raise JobError(
        "job_not_ready", f"Job {job.id} is {job.state}; its report is there once it has succeeded."
    )


def _report(service: Service, job_id: str) -> ProbeReport:
    return ProbeReport.model_validate_json((finished_folder(service, job_id) / "report.json").read_bytes())


def _format_by_accept(accept: str) -> str:
    if "application/x-ndjson" in accept or "application/jsonl" in accept:
        return "jsonl"
    return "csv" if "text/csv" in accept else "json"


def _csv_rows(path: Path) -> Iterator[str]:
    columns = list(SimilarPair.model_fields)
    buffer = io.StringIO()
    table = csv.DictWriter(buffer, columns)
    table.writeheader()
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            pair = SimilarPair.model_validate_json(line).model_dump(mode="json")
            table.writerow({name: _inert(value) for name, value in pair.items()})
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _inert(value: object) -> object:
    """Keep a spreadsheet from taking a text of the corpus for a formula: a quote before =, +, −, @, tab or return."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def _count_lines(path: Path) -> int:
    with path.open(encoding="utf-8") as lines:
        return sum(1 for _ in lines)
