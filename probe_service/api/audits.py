"""Routes of audits: have pairs drawn, label them, see what the labels say of S."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError

from probe_service import charts
from probe_service.api.probes import ThemeQuery, finished_folder
from probe_service.api.service import ServiceDependency
from probe_service.api.uploads import media_type, read_body
from probe_service.charts import Theme
from probe_service.errors import RequestError, ServiceError
from probe_service.judges import Sheet
from probe_service.problems import translate_validation_error
from probe_service.schemas import (
    AuditAnswer,
    AuditCounts,
    AuditJob,
    AuditQuestionPage,
    AuditReport,
    AuditRequest,
)

__all__ = ["router"]

router = APIRouter(prefix="/v1/probes/{job_id}/audit", tags=["audits"])

_ANSWERS = TypeAdapter(list[AuditAnswer])
_MEDIA_TYPES = {"jsonl": "application/x-ndjson", "csv": "text/csv"}


def _body(media: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": {media: {"schema": schema}}}}


_DRAW_BODY = _body("application/json", {"$ref": "#/components/schemas/AuditRequest"}, required=False)
_LABELS_BODY = _body(
    "application/json",
    {"type": "array", "items": {"$ref": "#/components/schemas/AuditAnswer"}},
    required=True,
)
_SHEET_BODY = _body("application/octet-stream", {"type": "string", "format": "binary"}, required=True)

SheetFormat = Literal["jsonl", "csv"]


@router.post("", status_code=202, response_model=AuditJob, openapi_extra=_DRAW_BODY)
async def draw_audit(
    job_id: str, request: Request, response: Response, service: ServiceDependency
) -> AuditJob:
    """Have pairs of a finished probe's corpus drawn, in proportion to the push that they receive.

    JSON (`AuditRequest`), or nothing for its defaults. The same again changes nothing; an audit that failed or was
    cancelled is replaced; of another size there may be none beside the first. Earlier answers of the same judge to
    pairs of the same texts are filled in.
    """
    body = await read_body(request, service.settings.max_inline_bytes)
    if body and media_type(request) != "application/json":
        raise ServiceError("media_type_unsupported", "Send application/json, or nothing.")

    def submit() -> AuditJob:
        wanted = AuditRequest.model_validate_json(body or b"{}")
        finished_folder(service, job_id)
        return service.audits.submit(job_id, wanted)

    job = await run_in_threadpool(submit)
    response.headers["Location"] = job.links["self"]
    return job


@router.get("", response_model=AuditJob)
def show_audit(job_id: str, service: ServiceDependency) -> AuditJob:
    """Show an audit: state of the drawing, and then how many questions are answered and open."""
    return service.audits.get(job_id)


@router.post("/cancel", status_code=202, response_model=AuditJob)
def cancel_audit(job_id: str, service: ServiceDependency) -> AuditJob:
    """Ask the drawing to stop; `cancelling` until its running step has ended. A drawn audit stays as it is."""
    return service.audits.cancel(job_id)


@router.delete("", status_code=204)
def delete_audit(job_id: str, service: ServiceDependency) -> None:
    """Delete an audit that is not being drawn. Its labels stay known by the texts that were shown."""
    service.audits.delete(job_id)


@router.get("/pairs", response_model=AuditQuestionPage)
def list_questions(
    job_id: str,
    service: ServiceDependency,
    offset: Annotated[int, Query(ge=0, description="Places of the sheet to skip.")] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    open_only: Annotated[bool, Query(description="Only questions without an answer.")] = False,
) -> AuditQuestionPage:
    """List the questions, blind and in random order, with the answers so far."""
    return service.audits.folder(job_id).questions(offset=offset, limit=limit, open_only=open_only)


@router.post("/labels", response_model=AuditCounts, openapi_extra=_LABELS_BODY)
async def label_pairs(job_id: str, request: Request, service: ServiceDependency) -> AuditCounts:
    """Store answers at once, all or none: a JSON list of `AuditAnswer`. A later answer replaces an earlier one."""
    if media_type(request) != "application/json":
        raise ServiceError("media_type_unsupported", "Send a list as application/json.")
    body = await read_body(request, service.settings.max_inline_bytes)
    return await run_in_threadpool(lambda: service.audits.folder(job_id).answer(_answers(body)))


@router.get("/pairs.{sheet_format}", response_class=Response)
def download_sheet(job_id: str, sheet_format: SheetFormat, service: ServiceDependency) -> Response:
    """Return the blind sheet, with the answers so far, as jsonl or csv: to be filled in the column `label`."""
    content = service.audits.folder(job_id).sheet().content(f".{sheet_format}")
    name = f'attachment; filename="audit-{job_id}.{sheet_format}"'
    return Response(content, media_type=_MEDIA_TYPES[sheet_format], headers={"Content-Disposition": name})


@router.post("/pairs.{sheet_format}", response_model=AuditCounts, openapi_extra=_SHEET_BODY)
async def upload_sheet(
    job_id: str, sheet_format: SheetFormat, request: Request, service: ServiceDependency
) -> AuditCounts:
    """Store the labels of a filled sheet, which is the body as it is; rows without a label change nothing."""
    body = await read_body(request, service.settings.max_inline_bytes)
    return await run_in_threadpool(
        lambda: service.audits.folder(job_id).answer_by_sheet(
            Sheet.parse(Path(f"pairs.{sheet_format}"), body)
        )
    )


@router.get("/report", response_model=AuditReport)
def show_audit_report(job_id: str, service: ServiceDependency) -> AuditReport:
    """Return S with its interval and a verdict at each size, and n_max; 409 until every question is answered."""
    return service.audits.folder(job_id).report()


@router.get("/chart.json")
def specify_audit_chart(
    job_id: str, service: ServiceDependency, theme: ThemeQuery = Theme.LIGHT
) -> JSONResponse:
    """Return S and its interval by batch size as a Vega-Lite specification."""
    folder = service.audits.folder(job_id)
    return JSONResponse(
        charts.audit_chart(folder.report(), budget=folder.audit().request.budget, theme=theme)
    )


def _answers(body: bytes) -> list[AuditAnswer]:
    try:
        return _ANSWERS.validate_json(body)
    except ValidationError as error:
        fault = translate_validation_error(error)
        place = error.errors()[0]["loc"][:1]
        if not place:
            raise fault from error
        raise RequestError(
            fault.code, fault.message, row=int(place[0]) + 1, column=fault.column, count=fault.count
        ) from error
