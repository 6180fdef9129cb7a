"""The durable jobs: a probe, the drawing of an audit, or a trial, as a DBOS workflow, its short steps checkpointed.

A step that finished is not run again after a crash: DBOS returns its recorded result. Two rules follow.

* Everything that a step leaves behind is its (small, JSON) result or a file in the job's folder.
* Between steps nothing may depend on the clock. So progress is written from within steps only (there DBOS
  takes it as a side effect, not as a step of its own), and whether the job was cancelled is asked by another
  thread.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dbos import DBOS, PortableWorkflowError
from dbos import error as dbos_error
from pydantic import JsonValue

from probe_service.audit import AuditFolder
from probe_service.audit.running import run_draw
from probe_service.errors import JobError, ProbeError, ServiceError
from probe_service.jobs.audits import AuditSubmission
from probe_service.jobs.client import JobSubmission
from probe_service.jobs.queue import CURVE_EVENT, PROGRESS_EVENT, JobKind
from probe_service.jobs.trials import submission_of
from probe_service.probe import Executor, run_probe
from probe_service.problems import error_from_json, error_to_json
from probe_service.schemas import Phase, ProbeReport, Progress, TrialMode, TrialSubmission
from probe_service.settings import Settings
from probe_service.store import CorpusStore
from probe_service.trial import TrialFolder
from probe_service.trial.running import run_trial

__all__ = ["MAX_RECOVERY_ATTEMPTS", "Desk", "register_workflows"]

MAX_RECOVERY_ATTEMPTS = 2
"""A job is begun three times at most; then it has failed."""

_PROGRESS_EVERY_SECONDS = 1.0
_CURVE_FIELDS = {"curve", "curve_rows"}

_log = logging.getLogger(__name__)


class Desk:
    """What lies on a worker's desk: the one job it runs, and whether it should put it down.

    The workflow's thread takes and leaves jobs; the heartbeat's thread looks which one it is and reports that
    it was cancelled; the main thread reports that the worker is to stop.

    Args:
        is_cancelled: Asks the job database.
        announce: Called at once when a job was taken or left.
    """

    def __init__(self, is_cancelled: Callable[[str], bool], announce: Callable[[], None]) -> None:
        self._is_cancelled = is_cancelled
        self._announce = announce
        self._cancelled = threading.Event()
        self._stopping = threading.Event()
        self._between_steps = threading.Event()
        self._between_steps.set()
        self.job_id: str | None = None

    def take(self, job_id: str) -> None:
        """Begin a job, unless it was cancelled between the queue and the desk."""
        self._refuse_if_stopping()
        if self._is_cancelled(job_id):
            raise dbos_error.DBOSWorkflowCancelledError(f"job {job_id} was cancelled before it began")
        self._cancelled.clear()
        self.job_id = job_id
        self._announce()

    def leave(self) -> None:
        """End a job, however it ended."""
        self.job_id = None
        self._announce()

    def look_for_cancellation(self) -> None:
        """Ask the database whether the job on the desk was cancelled."""
        job_id = self.job_id
        if job_id is not None and self._is_cancelled(job_id) and self.job_id == job_id:
            self._cancelled.set()

    def checkpoint(self) -> None:
        """Raise if the job was cancelled; cheap enough for inner loops."""
        if self._cancelled.is_set():
            raise dbos_error.DBOSWorkflowCancelledError(f"job {self.job_id} was cancelled")

    def begin_step(self) -> None:
        """Called before each step; does not return once the worker is stopping."""
        self._refuse_if_stopping()
        self._between_steps.clear()

    def end_step(self) -> None:
        """Called after each step, recorded or not."""
        self._between_steps.set()

    def stop(self, timeout_seconds: float) -> None:
        """Begin no more steps, and give the one that runs a moment to finish and be recorded."""
        self._stopping.set()
        self._between_steps.wait(timeout_seconds)

    def _refuse_if_stopping(self) -> None:
        while self._stopping.is_set():
            time.sleep(1.0)  # the process ends within seconds and the job goes back to the queue


class _ProgressReport:
    """Writes a job's progress as workflow events: at most once a second but for a new phase, the curve when it grew."""

    def __init__(self) -> None:
        self._latest: Progress | None = None
        self._written_at = 0.0
        self._curve_written: tuple[int | None, int] = (None, 0)
        self._phase_written: Phase | None = None
        self._step_thread: int | None = None

    def note(self, progress: Progress) -> None:
        self._latest = progress
        if self._step_thread == threading.get_ident():
            self.write_if_due()

    def write_if_due(self) -> None:
        latest = self._latest
        if latest is None:
            return
        curve = latest.curve_rows, len(latest.curve)
        grown = curve != self._curve_written
        moved_on = grown or latest.phase is not self._phase_written
        if not moved_on and time.monotonic() - self._written_at < _PROGRESS_EVERY_SECONDS:
            return
        if grown:
            DBOS.set_event(CURVE_EVENT, latest.model_dump(mode="json", include=_CURVE_FIELDS))
        DBOS.set_event(
            PROGRESS_EVENT,
            {
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "progress": latest.model_dump(mode="json", exclude=_CURVE_FIELDS),
            },
        )
        self._latest = None
        self._curve_written = curve
        self._phase_written = latest.phase
        self._written_at = time.monotonic()

    def enter_step(self) -> None:
        self._step_thread = threading.get_ident()
        self.write_if_due()

    def leave_step(self) -> None:
        self.write_if_due()
        self._step_thread = None


def register_workflows(settings: Settings, store: CorpusStore, desk: Desk) -> None:
    """Make the jobs known to DBOS; call before `DBOS.launch`."""

    @DBOS.workflow(name=JobKind.PROBE, max_recovery_attempts=MAX_RECOVERY_ATTEMPTS)
    def probe(fields: dict[str, Any]) -> None:
        _work(desk, partial(_run_probe, JobSubmission.from_json(fields), settings, store, desk))

    @DBOS.workflow(name=JobKind.AUDIT, max_recovery_attempts=MAX_RECOVERY_ATTEMPTS)
    def audit(fields: dict[str, Any]) -> None:
        _work(desk, partial(_run_audit, AuditSubmission.from_json(fields), settings, store, desk))

    @DBOS.workflow(name=JobKind.TRIAL, max_recovery_attempts=MAX_RECOVERY_ATTEMPTS)
    def trial(fields: dict[str, Any]) -> None:
        _work(desk, partial(_run_trial, submission_of(fields), settings, store, desk))


def _work(desk: Desk, run: Callable[[str], None]) -> None:
    """Run the job of this workflow, given its id."""
    job_id = DBOS.workflow_id
    if job_id is None:
        raise RuntimeError("a workflow runs without an id")
    desk.take(job_id)
    _log.info("job %s begins", job_id)
    try:
        run(job_id)
        _log.info("job %s succeeded", job_id)
    except Exception as error:  # noqa: BLE001 - the edge: whatever it was, the job must say that it failed
        raise _portable(_translated(error, job_id)) from None
    finally:
        desk.leave()


def _run_probe(
    submission: JobSubmission, settings: Settings, store: CorpusStore, desk: Desk, job_id: str
) -> None:
    folder = store.job_folder(job_id)
    folder.mkdir(parents=True, exist_ok=True)
    report = _ProgressReport()
    run_probe(
        submission.request,
        _source(store, submission.corpus_id, submission.hf),
        folder,
        settings=settings,
        job_id=job_id,
        name=submission.corpus_name,
        execute=_executor(desk, report),
        on_progress=report.note,
        checkpoint=desk.checkpoint,
    )


def _run_audit(
    submission: AuditSubmission, settings: Settings, store: CorpusStore, desk: Desk, job_id: str
) -> None:
    # What the probe measured is what is audited: its corpus, read and encoded as it was then.
    probed = ProbeReport.model_validate_json(
        (store.job_folder(submission.probe_id) / "report.json").read_bytes()
    )
    request = probed.request
    if request.encoder is None and probed.encoder.backend != "none":
        request = request.model_copy(update={"encoder": probed.encoder.name})
    report = _ProgressReport()
    run_draw(
        request,
        _source(store, submission.corpus_id, submission.hf),
        AuditFolder(store.job_folder(job_id), settings.home),
        submission.wanted,
        settings=settings,
        name=submission.corpus_name,
        corpus_sha256=probed.corpus.sha256,
        execute=_executor(desk, report),
        on_progress=report.note,
        checkpoint=desk.checkpoint,
    )


def _run_trial(
    submission: TrialSubmission, settings: Settings, store: CorpusStore, desk: Desk, job_id: str
) -> None:
    images = submission.request.mode is TrialMode.IMAGES
    report = _ProgressReport()
    run_trial(
        submission.request,
        None if images else _source(store, submission.corpus_id, submission.hf),
        TrialFolder(store.job_folder(job_id)),
        settings=settings,
        name=submission.name or "digits",
        execute=_executor(desk, report),
        on_progress=report.note,
        checkpoint=desk.checkpoint,
    )


def _source(store: CorpusStore, corpus_id: str | None, hf: str | None) -> Path | str:
    source = store.content_path(corpus_id) if corpus_id is not None else hf
    if source is None:
        raise ServiceError("internal_error", "The job names no corpus.")
    return source


def _executor(desk: Desk, report: _ProgressReport) -> Executor:
    """Return what runs one step of a job under DBOS, which records its result."""

    def execute(step_name: str, function: Callable[..., JsonValue], *args: JsonValue) -> JsonValue:
        def step() -> JsonValue:
            desk.begin_step()
            try:
                report.enter_step()
                result = function(*args)
                report.leave_step()
            except ProbeError as error:
                raise _portable(error) from error
            return result

        try:
            return DBOS.run_step({"name": step_name}, step)
        except PortableWorkflowError as recorded:
            # Fresh or replayed, an error of ours comes back as what it was.
            if isinstance(recorded.data, dict):
                raise error_from_json(recorded.data) from recorded
            raise
        finally:
            desk.end_step()

    return execute


def _translated(error: Exception, job_id: str) -> ProbeError:
    if isinstance(error, ProbeError):
        _log.info("job %s failed: %s", job_id, error)
        return error
    _log.error("job %s failed", job_id, exc_info=error)
    # torch.cuda.OutOfMemoryError is told by its name: this module is imported where there is no torch, too.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return JobError(
            "worker_out_of_memory",
            "The worker ran out of memory; probe fewer rows (max_rows) or smaller batch sizes,"
            " or give it more memory.",
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ServiceError("storage_failed", "The worker's disk is full.")
    return ServiceError(
        "internal_error", f"The job failed for a reason that is ours; see the worker's log for {job_id}."
    )


def _portable(error: ProbeError) -> PortableWorkflowError:
    return PortableWorkflowError(
        message=error.message, name=type(error).__name__, code=error.code, data=error_to_json(error)
    )
