"""The client: one method per thing that a person does with the service."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from probe_client._errors import (
    AnswerNotUnderstood,
    ApiError,
    ConnectionFailed,
    JobCancelled,
    JobFailed,
    ProbeClientError,
    WaitTimeout,
)
from probe_client._events import read_events
from probe_service.schemas import (
    AuditAnswer,
    AuditCounts,
    AuditJob,
    AuditQuestion,
    AuditQuestionPage,
    AuditReport,
    EncoderList,
    Job,
    JobList,
    JobState,
    PairPage,
    ProbeReport,
    ProbeRequest,
    ProblemDetail,
    SimilarPair,
)

_DEFAULT_URL = "http://127.0.0.1:8000"
_SUBMIT_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.25
_LONGEST_PAUSE_SECONDS = 5.0
_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 60.0
"""A stream that says nothing for this long, not even a keep-alive comment, is taken for dead."""
_OVERRUN_SECONDS = 1.0
"""A stream's limit of silence is fixed when it is opened; near a wait's end it is reopened this often."""
_AWAY_STATUSES = frozenset({502, 503, 504})
"""Answers of a proxy whose service is down, or of a service that is starting."""
_PAGE_LENGTH = 100
_AUDIT_REPORT_SECONDS = 120.0
"""Limit of silence while n_max is sought: each size takes milliseconds where the judge made mistakes."""

_log = logging.getLogger("probe_client")
_Noun = TypeVar("_Noun", bound=BaseModel)
_Ended = TypeVar("_Ended", Job, AuditJob)


class ProbeClient:
    """A connection to one service; use it as a context manager, or call `close`.

    Args:
        base_url: Root of the service; None: the environment's ``PROBE_URL``, else ``http://127.0.0.1:8000``.
        api_key: Bearer key; None: the environment's ``PROBE_API_KEY``, else no key is sent.
        timeout_seconds: Limit for connecting, and for each silence while reading or writing.
        outage_seconds: How long `wait` keeps reconnecting to a service that does not answer.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_seconds: float = 30.0,
        outage_seconds: float = 120.0,
    ) -> None:
        self.base_url = (base_url or os.environ.get("PROBE_URL") or _DEFAULT_URL).rstrip("/")
        api_key = api_key or os.environ.get("PROBE_API_KEY")
        self._timeout_seconds = timeout_seconds
        self._outage_seconds = outage_seconds
        try:
            self._http = httpx.Client(
                base_url=self.base_url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=timeout_seconds,
                follow_redirects=True,
            )
        except httpx.InvalidURL as error:
            raise ConnectionFailed(f"{self.base_url!r} is not a URL: {error}") from error

    def __enter__(self) -> ProbeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; jobs go on."""
        self._http.close()

    # ------------------------------------------------------------------------------------------- jobs

    def submit(
        self,
        *,
        path: Path | None = None,
        rows: Sequence[Mapping[str, Any] | str] | None = None,
        corpus_id: str | None = None,
        hf: str | None = None,
        request: ProbeRequest | Mapping[str, Any] | None = None,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Send one corpus and what to measure on it; return the queued job.

        A lost connection is retried under the same idempotency key, so that it never makes a second job.

        Args:
            path: A file, streamed from disk: memory does not grow with it.
            rows: Objects with columns, or plain texts.
            corpus_id: SHA-256 of a corpus that the service already has.
            hf: ``hf:NAME[:config[:split]][@revision]``.
            request: What to measure; a mapping is judged by the service. None: its defaults.
            name: What to call the corpus; None: the file's name, or what the service picks.
            idempotency_key: Two submissions under one key make one job; None: a fresh key.

        Raises:
            TypeError: Not exactly one corpus was given.
            OSError: The file cannot be read.
            ApiError: The service refused it, e.g. ``corpus_bad_line`` with its row.
            ConnectionFailed: The service could not be reached.
        """
        if sum(given is not None for given in (path, rows, corpus_id, hf)) != 1:
            raise TypeError("give exactly one of path, rows, corpus_id and hf")
        wanted = request.model_dump(mode="json") if isinstance(request, ProbeRequest) else dict(request or {})
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        pause_seconds = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _SUBMIT_ATTEMPTS + 1):
            with ExitStack() as stack:
                if path is not None:
                    # The request goes first, so that a bad one is refused before the file has travelled.
                    parts = [
                        ("request", (None, json.dumps(wanted), "application/json")),
                        (
                            "file",
                            (
                                name or path.name,
                                stack.enter_context(path.open("rb")),
                                "application/octet-stream",
                            ),
                        ),
                    ]
                    body: dict[str, Any] = {"files": parts}
                else:
                    submission = {"rows": rows, "corpus_id": corpus_id, "hf": hf, "name": name}
                    submission = {field: value for field, value in submission.items() if value is not None}
                    body = {"json": {**submission, "request": wanted}}
                try:
                    return self._noun(Job, "POST", "/v1/probes", headers=headers, **body)
                except ConnectionFailed as error:
                    if attempt == _SUBMIT_ATTEMPTS:
                        raise
                    _log.info("submission got no answer, trying again under the same key: %s", error)
            time.sleep(pause_seconds)
            pause_seconds *= 2
        raise AssertionError("unreachable")

    def job(self, job_id: str) -> Job:
        """Return the job as it stands: state, phase, fraction, partial curve."""
        return self._noun(Job, "GET", f"/v1/probes/{job_id}")

    def jobs(self) -> Iterator[Job]:
        """Yield all jobs, newest first, page by page."""
        offset: int | None = 0
        while offset is not None:
            page = self._noun(JobList, "GET", "/v1/probes", params={"offset": offset, "limit": _PAGE_LENGTH})
            yield from page.jobs
            offset = page.next_offset

    def wait(
        self,
        job_id: str,
        *,
        on_progress: Callable[[Job], None] | None = None,
        timeout_seconds: float | None = None,
    ) -> Job:
        """Follow the job to its end; return it when it has succeeded.

        Changes arrive as server-sent events. When the connection is lost (the service restarts, say) the
        client reconnects, ever more slowly; each loss is logged. Where there is no event stream to be had, it
        polls, and a warning in the log ``probe_client`` says so.

        Args:
            job_id: The job.
            on_progress: Called with the job at each change, in this thread.
            timeout_seconds: Limit for the whole wait; None: as long as it takes.

        Raises:
            JobFailed: It ended with a problem.
            JobCancelled: It was stopped on request.
            WaitTimeout: The limit was reached; the job goes on.
            ConnectionFailed: The service was away for longer than `outage_seconds`.
            ApiError: The service refuses, e.g. ``job_not_found``.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        last: Job | None = None
        streaming = True
        away_since: float | None = None
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            updates = self._stream(job_id, deadline) if streaming else self._poll(job_id, deadline)
            try:
                for job in updates:
                    away_since, pause_seconds = None, _FIRST_PAUSE_SECONDS
                    if job != last and on_progress is not None:
                        on_progress(job)
                    last = job
                    if job.state.ended:
                        return _succeeded(job)
            except _NoEventStream as error:
                streaming = False
                _log.warning("no event stream for job %s, asking every second instead: %s", job_id, error)
                continue
            except (ConnectionFailed, ApiError) as error:
                if isinstance(error, ApiError) and error.status not in _AWAY_STATUSES:
                    raise
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if now - away_since >= self._outage_seconds:
                    raise ConnectionFailed(
                        f"{self.base_url} has not answered for {now - away_since:.0f} seconds;"
                        f" job {job_id} is kept there and goes on when it is back"
                    ) from error
                _log.info("lost job %s, reconnecting: %s", job_id, error)
            finally:
                updates.close()
            if deadline is not None:
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    assert timeout_seconds is not None
                    raise WaitTimeout(job_id, last, timeout_seconds)
                time.sleep(min(pause_seconds, left_seconds))
            else:
                time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def cancel(self, job_id: str) -> Job:
        """Ask the job to stop; a running step ends first (state ``cancelling`` until then)."""
        return self._noun(Job, "POST", f"/v1/probes/{job_id}/cancel")

    def delete(self, job_id: str) -> None:
        """Remove the job and what it stored."""
        self._answer("DELETE", f"/v1/probes/{job_id}")

    # ------------------------------------------------------------------------------------------- results

    def report(self, job_id: str) -> ProbeReport:
        """Return the report of a job that has succeeded.

        Raises:
            ApiError: ``job_not_ready`` before its end.
        """
        return self._noun(ProbeReport, "GET", f"/v1/probes/{job_id}/report")

    def report_html(self, job_id: str) -> str:
        """Return the self-contained HTML report, which works offline."""
        return self._answer("GET", f"/v1/probes/{job_id}/report.html").text

    def pairs(self, job_id: str) -> Iterator[SimilarPair]:
        """Yield the most similar negative pairs, most similar first, page by page.

        Raises:
            ApiError: ``job_not_ready`` before the job's end.
        """
        offset: int | None = 0
        while offset is not None:
            page = self._noun(
                PairPage,
                "GET",
                f"/v1/probes/{job_id}/pairs",
                params={"offset": offset, "limit": _PAGE_LENGTH},
            )
            yield from page.pairs
            offset = page.next_offset

    def save_pairs(self, job_id: str, path: Path) -> None:
        """Write all listed pairs as JSON lines to a file, as `SimilarPair` each, most similar first.

        Raises:
            ApiError: ``job_not_ready`` before the job's end.
            OSError: The file cannot be written.
        """
        with (
            _translated(self.base_url),
            self._http.stream("GET", f"/v1/probes/{job_id}/pairs", params={"format": "jsonl"}) as answer,
        ):
            if answer.is_error:
                answer.read()
                raise _problem(answer)
            with path.open("wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)

    # ------------------------------------------------------------------------------------------- audits

    def draw_audit(
        self,
        job_id: str,
        *,
        labels: int = 200,
        checks: int = 20,
        batch_size: int | None = None,
        judge: str = "person",
    ) -> AuditJob:
        """Have pairs of a finished probe drawn to be labelled; the same again changes nothing.

        Args:
            job_id: The probe, which has one audit at most.
            labels: Pairs to draw.
            checks: Hidden checks of each kind.
            batch_size: Draw at this size alone; None: at all sizes of the probe at once.
            judge: Whose earlier answers to pairs of the same texts are used again.

        Raises:
            ApiError: e.g. ``job_not_ready``, or ``audit_exists`` where there is another.
        """
        wanted = {"labels": labels, "checks": checks, "batch_size": batch_size, "judge": judge}
        return self._noun(AuditJob, "POST", f"/v1/probes/{job_id}/audit", json=wanted)

    def audit(self, job_id: str) -> AuditJob:
        """Return the audit of a probe: state of the drawing, and then how many questions are open.

        Raises:
            ApiError: ``audit_not_found``.
        """
        return self._noun(AuditJob, "GET", f"/v1/probes/{job_id}/audit")

    def wait_for_audit(self, job_id: str, *, timeout_seconds: float | None = None) -> AuditJob:
        """Wait until the pairs of an audit are drawn.

        Raises:
            JobFailed: The drawing ended with a problem.
            JobCancelled: It was stopped on request.
            WaitTimeout: The limit was reached; the drawing goes on.
            ApiError: ``audit_not_found``.
        """
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            audit = self.audit(job_id)
            if audit.state.ended:
                return _succeeded(audit)
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                assert timeout_seconds is not None
                raise WaitTimeout(job_id, audit, timeout_seconds)
            time.sleep(min(_POLL_SECONDS, left_seconds))

    def audit_questions(self, job_id: str, *, open_only: bool = False) -> Iterator[AuditQuestion]:
        """Yield the questions of an audit in the order of its sheet, page by page; answers may come in meanwhile."""
        offset: int | None = 0
        while offset is not None:
            page = self._noun(
                AuditQuestionPage,
                "GET",
                f"/v1/probes/{job_id}/audit/pairs",
                params={"offset": offset, "limit": _PAGE_LENGTH, "open_only": open_only},
            )
            yield from page.questions
            offset = page.next_offset

    def label(self, job_id: str, answers: Iterable[AuditAnswer]) -> AuditCounts:
        """Store answers at once, all or none; a later answer to a question replaces an earlier one.

        Raises:
            ApiError: ``audit_labels_foreign``, with the answer's place in the list, for a question of no such id.
        """
        given = [answer.model_dump(mode="json") for answer in answers]
        return self._noun(AuditCounts, "POST", f"/v1/probes/{job_id}/audit/labels", json=given)

    def audit_sheet(self, job_id: str, *, sheet_format: Literal["jsonl", "csv"] = "jsonl") -> bytes:
        """Return the sheet with the answers so far, to be filled elsewhere in the column ``label``."""
        return self._answer("GET", f"/v1/probes/{job_id}/audit/pairs.{sheet_format}").content

    def send_audit_sheet(self, job_id: str, path: Path) -> AuditCounts:
        """Store the labels of a filled sheet; rows without a label change nothing.

        Args:
            job_id: The probe.
            path: Ends in .jsonl or .csv.

        Raises:
            OSError: The file cannot be read.
            ApiError: e.g. ``audit_labels_foreign`` or ``audit_label_unknown``, with the row.
        """
        sheet = path.suffix.lower().removeprefix(".")
        return self._noun(
            AuditCounts, "POST", f"/v1/probes/{job_id}/audit/pairs.{sheet}", content=path.read_bytes()
        )

    def audit_report(self, job_id: str) -> AuditReport:
        """Return what the labels say: S with its interval and a verdict at each size, and n_max.

        Raises:
            ApiError: ``audit_labels_incomplete`` until every question is answered.
        """
        return self._noun(
            AuditReport, "GET", f"/v1/probes/{job_id}/audit/report", timeout=_AUDIT_REPORT_SECONDS
        )

    def cancel_audit(self, job_id: str) -> AuditJob:
        """Ask the drawing of an audit to stop; one that is drawn stays as it is."""
        return self._noun(AuditJob, "POST", f"/v1/probes/{job_id}/audit/cancel")

    def delete_audit(self, job_id: str) -> None:
        """Remove the audit of a probe; its labels are used again by later ones."""
        self._answer("DELETE", f"/v1/probes/{job_id}/audit")

    # ------------------------------------------------------------------------------------------- encoders

    def encoders(self) -> EncoderList:
        """Return the encoders that requests may name, and which is the default."""
        return self._noun(EncoderList, "GET", "/v1/encoders")

    # ------------------------------------------------------------------------------------------- transport

    def _stream(self, job_id: str, deadline: float | None) -> Generator[Job]:
        """Yield the job at each event; end with the stream, or where a silence could outlast the deadline."""
        silence_seconds, end = _SILENCE_SECONDS, math.inf
        if deadline is not None:
            silence_seconds = max(0.05, min(silence_seconds, deadline - time.monotonic()))
            end = deadline - silence_seconds + _OVERRUN_SECONDS
        timeout = httpx.Timeout(self._timeout_seconds, read=silence_seconds)
        with (
            _translated(self.base_url),
            self._http.stream(
                "GET", f"/v1/probes/{job_id}/events", headers={"Accept": "text/event-stream"}, timeout=timeout
            ) as response,
        ):
            if response.status_code in (404, 405, 406, 501):
                response.read()
                self.job(job_id)  # raises if it is the job that is missing
                raise _NoEventStream(f"the service answers {response.status_code} for it")
            if response.is_error:
                response.read()
                raise _problem(response)
            content_type = response.headers.get("content-type", "")
            if not content_type.startswith("text/event-stream"):
                raise _NoEventStream(f"the service answers {content_type or 'nothing readable'} for it")
            for event in read_events(_until(end, response.iter_bytes())):
                if event.name == "job":
                    yield _parsed(Job, event.text)

    def _poll(self, job_id: str, deadline: float | None) -> Generator[Job]:
        """Yield the job every second; end at the deadline."""
        while deadline is None or time.monotonic() < deadline:
            yield self.job(job_id)
            left_seconds = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            time.sleep(min(_POLL_SECONDS, left_seconds))

    def _noun(self, noun: type[_Noun], method: str, path: str, **options: Any) -> _Noun:
        return _parsed(noun, self._answer(method, path, **options).content)

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        with _translated(self.base_url):
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise _problem(response)
        return response


def _until(end: float, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pass chunks on, keep-alives as well as events; the first that comes after ``end`` is the last."""
    for chunk in chunks:
        yield chunk
        if time.monotonic() >= end:
            return


class _NoEventStream(ProbeClientError):  # noqa: N818
    """The events of a job cannot be had as a stream; never leaves this module."""


def _succeeded(job: _Ended) -> _Ended:
    """Return a job that has succeeded; raise what the others ended with."""
    if job.state is JobState.CANCELLED:
        raise JobCancelled(job)
    if job.state is JobState.FAILED:
        assert job.error is not None
        raise JobFailed(job, job.error)
    return job


def _parsed(noun: type[_Noun], text: str | bytes) -> _Noun:
    try:
        return noun.model_validate_json(text)
    except ValidationError as error:
        raise AnswerNotUnderstood(
            f"the answer is no {noun.__name__} of this version; client and service differ: {error}"
        ) from error


def _problem(response: httpx.Response) -> ApiError:
    """The problem document of an answer, made up from its status where it is none."""
    try:
        problem = ProblemDetail.model_validate_json(response.content)
    except ValidationError:
        problem = ProblemDetail(
            type="about:blank",
            title=response.reason_phrase or "Error",
            status=response.status_code,
            detail=f"{response.request.url} answered {response.status_code} {response.reason_phrase}",
            code=f"http_{response.status_code}",
        )
    try:
        retry_after_seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):  # absent, or a date
        retry_after_seconds = None
    return ApiError(problem, retry_after_seconds=retry_after_seconds)


@contextmanager
def _translated(base_url: str) -> Iterator[None]:
    """Turn what httpx raises into the client's errors."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        reason = str(error) or type(error).__name__
        raise ConnectionFailed(f"no answer from {base_url}: {reason}") from error
