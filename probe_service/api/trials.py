"""Routes of trials: train with several losses at several batch sizes, and see what each brings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from probe_service import charts
from probe_service.api.probes import ThemeQuery
from probe_service.api.service import ServiceDependency
from probe_service.api.uploads import clean_name, media_type, read_body
from probe_service.charts import Theme
from probe_service.errors import ServiceError
from probe_service.known_encoders import check_encoder_allowed
from probe_service.schemas import TrialJob, TrialJobList, TrialReport, TrialSubmission

__all__ = ["router"]

router = APIRouter(prefix="/v1/trials", tags=["trials"])

_SUBMIT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TrialSubmission"}}},
    }
}


@router.post("", status_code=202, response_model=TrialJob, openapi_extra=_SUBMIT_BODY)
async def submit_trial(
    request: Request,
    response: Response,
    service: ServiceDependency,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> TrialJob:
    """Queue a trial on a stored corpus (``POST /v1/corpora``), a Hugging Face data set, or images.

    JSON (`TrialSubmission`). An `Idempotency-Key` makes sending twice safe. Finished cells show at once in the trial's
    table and report; a trial whose worker died goes on with the next cell.
    """
    if media_type(request) != "application/json":
        raise ServiceError("media_type_unsupported", "Send application/json.")
    body = await read_body(request, service.settings.max_inline_bytes)

    def submit() -> TrialJob:
        submission = TrialSubmission.model_validate_json(body)
        if submission.request.encoder is not None:
            check_encoder_allowed(submission.request.encoder, service.settings)
        if submission.name is not None:
            submission = submission.model_copy(update={"name": clean_name(submission.name, "corpus")})
        return service.trials.submit(submission, idempotency_key=idempotency_key)

    job = await run_in_threadpool(submit)
    response.headers["Location"] = job.links["self"]
    return job


@router.get("", response_model=TrialJobList)
def list_trials(
    service: ServiceDependency,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> TrialJobList:
    """List trials, newest first, without their tables."""
    return service.trials.list(offset=offset, limit=limit)


@router.get("/{job_id}", response_model=TrialJob)
def show_trial(job_id: str, service: ServiceDependency) -> TrialJob:
    """Show a trial: state, how many runs have finished, time left, and the table so far; its error if it failed."""
    return service.trials.get(job_id)


@router.get("/{job_id}/report", response_model=TrialReport)
def show_trial_report(job_id: str, service: ServiceDependency) -> TrialReport:
    """Return what is known so far, from the first finished cell on; `complete` says whether that is all."""
    return service.trials.report(job_id)


@router.get("/{job_id}/charts/{chart}.json")
def specify_trial_chart(
    job_id: str,
    chart: Literal["scores", "masking"],
    service: ServiceDependency,
    theme: ThemeQuery = Theme.LIGHT,
    temperature: Annotated[float | None, Query(description="Of `scores`; the smallest if left out.")] = None,
) -> JSONResponse:
    """Return the metric by batch size and loss, or the gain of masking by predicted share, as Vega-Lite."""
    report = service.trials.report(job_id)
    if chart == "masking":
        return JSONResponse(charts.masking_chart(report, theme=theme))
    return JSONResponse(charts.trial_chart(report, theme=theme, temperature=temperature))


@router.post("/{job_id}/cancel", status_code=202, response_model=TrialJob)
def cancel_trial(job_id: str, service: ServiceDependency) -> TrialJob:
    """Ask a trial to stop; `cancelling` until its running step has ended. What has finished of it stays."""
    return service.trials.cancel(job_id)


@router.delete("/{job_id}", status_code=204)
def delete_trial(job_id: str, service: ServiceDependency) -> None:
    """Delete a trial that has ended or not begun, its report, and its corpus unless that is used elsewhere."""
    service.trials.delete(job_id)
