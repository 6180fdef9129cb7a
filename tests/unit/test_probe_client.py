"""The client against a scripted HTTP server on a real socket: only the service itself is played."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import probe_client
from probe_client import (
    AnswerNotUnderstood,
    ApiError,
    ConnectionFailed,
    JobCancelled,
    JobFailed,
    ProbeClient,
    ProbeClientError,
    WaitTimeout,
)
from probe_client._events import ServerEvent, read_events

JOB_ID = "3f1c"


def job_json(state: str = "running", fraction: float = 0.0, **changes: object) -> dict[str, object]:
    return {
        "id": JOB_ID,
        "state": state,
        "corpus_id": "ab" * 32,
        "corpus_name": "helpdesk.jsonl",
        "created_at": "2026-01-01T00:00:00Z",
        "updated_at": "2026-01-01T00:00:00Z",
        "request": {},
        "progress": {"phase": "encoding", "fraction": fraction, "done": 1, "total": 10, "unit": "rows"},
        "attempts": 1,
        "error": None,
        "links": {},
        **changes,
    }


def problem_json(code: str, status: int, **changes: object) -> dict[str, object]:
    return {
        "type": "about:blank",
        "title": "t",
        "status": status,
        "detail": "line 7 is no JSON",
        "code": code,
        **changes,
    }


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """Answers by "METHOD path", used up in order; the last one stays."""

    answers: dict[str, list[Callable[[BaseHTTPRequestHandler], None]]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""

    def on(self, route: str, *answers: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.answers[route] = list(answers)

    def requests(self, route: str) -> list[Seen]:
        return [one for one in self.seen if f"{one.method} {one.path.partition('?')[0]}" == route]


def says(body: object, status: int = 200, content_type: str = "application/json", **headers: str):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def streams(*parts: bytes | float):
    """Send parts of an event stream, sleeping where a number stands, and close."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        for part in parts:
            if isinstance(part, bytes):
                handler.wfile.write(part)
                handler.wfile.flush()
            else:
                time.sleep(part)

    return answer


def hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def event(job: dict[str, object]) -> bytes:
    return f"event: job\ndata: {json.dumps(job, ensure_ascii=False)}\n\n".encode()


@pytest.fixture
def script() -> Iterator[Script]:
    played = Script()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if self.headers.get("Transfer-Encoding") == "chunked":
                raise AssertionError("a file's length is known; it should be announced")
            body = self.rfile.read(length)
            played.seen.append(Seen(self.command, self.path, dict(self.headers), body))
            answers = played.answers[f"{self.command} {self.path.partition('?')[0]}"]
            with contextlib.suppress(OSError):  # the client goes away, as some tests want
                (answers.pop(0) if len(answers) > 1 else answers[0])(self)
            self.close_connection = True

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    played.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield played
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def client(script: Script) -> Iterator[ProbeClient]:
    with ProbeClient(script.url, timeout_seconds=5) as connected:
        yield connected


# ------------------------------------------------------------------------------------------------ the surface


def test_all_names_what_is_visible():
    visible = {name for name in vars(probe_client) if not name.startswith("_")}
    assert set(probe_client.__all__) == visible


def test_every_error_is_in_the_tree_and_drawn_in_it():
    drawing = probe_client._errors.__doc__
    for name in probe_client.__all__:
        thing = getattr(probe_client, name)
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert issubclass(thing, ProbeClientError)
            assert name in drawing


def test_address_and_key_come_from_the_environment(script, monkeypatch):
    monkeypatch.setenv("PROBE_URL", script.url + "/")
    monkeypatch.setenv("PROBE_API_KEY", "k1")
    script.on(f"GET /v1/probes/{JOB_ID}", says(job_json()))
    with ProbeClient() as client:
        client.job(JOB_ID)
    with ProbeClient(script.url, api_key="k2") as client:
        client.job(JOB_ID)
    assert [one.headers.get("Authorization") for one in script.seen] == ["Bearer k1", "Bearer k2"]


# ------------------------------------------------------------------------------------------------ submit


def test_rows_travel_as_json(client, script):
    script.on("POST /v1/probes", says(job_json("queued"), 202))
    job = client.submit(rows=["a", {"text": "b"}], request={"encoder": "minilm"}, name="mine")
    assert job.id == JOB_ID
    assert json.loads(script.seen[0].body) == {
        "rows": ["a", {"text": "b"}],
        "name": "mine",
        "request": {"encoder": "minilm"},
    }


def test_a_file_travels_as_multipart_with_the_request_first(client, script, tmp_path):
    corpus = tmp_path / "köln.jsonl.gz"
    corpus.write_bytes(b"\x1f\x8b" + bytes(range(256)) * 1000)
    script.on("POST /v1/probes", says(job_json("queued"), 202))
    client.submit(path=corpus, request={"batch_sizes": [2, 4]})
    body = script.seen[0].body
    assert corpus.read_bytes() in body
    assert body.index(b'name="request"') < body.index(b'name="file"')
    assert b'{"batch_sizes": [2, 4]}' in body
    assert "köln.jsonl.gz".encode() in body


def test_a_lost_connection_is_retried_under_one_key(client, script):
    script.on("POST /v1/probes", hangs_up, says(job_json("queued"), 202))
    client.submit(rows=["a", "b"])
    client.submit(rows=["a", "b"])
    keys = [one.headers["Idempotency-Key"] for one in script.seen]
    assert len(keys) == 3
    assert keys[0] == keys[1] != keys[2]


def test_a_given_key_is_used(client, script):
    script.on("POST /v1/probes", says(job_json("queued"), 202))
    client.submit(corpus_id="ab" * 32, idempotency_key="mine")
    assert script.seen[0].headers["Idempotency-Key"] == "mine"


@pytest.mark.parametrize("corpora", [{}, {"rows": ["a"], "hf": "hf:x"}])
def test_exactly_one_corpus(client, corpora):
    with pytest.raises(TypeError, match="exactly one"):
        client.submit(**corpora)


def test_a_problem_keeps_code_row_and_count(client, script):
    script.on("POST /v1/probes", says(problem_json("corpus_bad_line", 422, row=7, count=2), 422))
    with pytest.raises(ApiError) as caught:
        client.submit(rows=["a"])
    assert (caught.value.code, caught.value.row, caught.value.count, caught.value.status) == (
        "corpus_bad_line",
        7,
        2,
        422,
    )
    assert str(caught.value) == "line 7 is no JSON (row 7) [corpus_bad_line]"
    assert len(script.seen) == 1, "a refusal is not tried again"


def test_retry_after_is_kept(client, script):
    script.on("POST /v1/probes", says(problem_json("queue_full", 429), 429, Retry_After="12"))
    with pytest.raises(ApiError) as caught:
        client.submit(rows=["a"])
    assert caught.value.retry_after_seconds == 12.0


def test_a_page_of_a_proxy_becomes_a_problem(client, script):
    script.on(f"GET /v1/probes/{JOB_ID}", says("<h1>Bad gateway</h1>", 502, "text/html"))
    with pytest.raises(ApiError) as caught:
        client.job(JOB_ID)
    assert caught.value.code == "http_502"


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with ProbeClient(url) as client, pytest.raises(ConnectionFailed, match=url) as caught:
        client.job(JOB_ID)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("answer", [says("{"), says({"id": "x"}), says(job_json(state="dreaming"))])
def test_an_answer_of_another_version(client, script, answer):
    script.on(f"GET /v1/probes/{JOB_ID}", answer)
    with pytest.raises(AnswerNotUnderstood):
        client.job(JOB_ID)


def test_not_a_url():
    with pytest.raises(ConnectionFailed):
        ProbeClient("http://[::1")


def test_jobs_come_page_by_page(client, script):
    script.on(
        "GET /v1/probes",
        says({"jobs": [job_json(id="c"), job_json(id="b")], "next_offset": 2}),
        says({"jobs": [job_json(id="a")], "next_offset": None}),
    )
    assert [job.id for job in client.jobs()] == ["c", "b", "a"]
    assert "offset=2" in script.seen[1].path


def test_pairs_come_page_by_page(client, script):
    def pair(rank):
        texts = {
            "text": "a",
            "other_text": "b",
            "known_false_negative": None,
            "source": None,
            "other_source": None,
        }
        return {"rank": rank, "similarity": 0.9, "row": 1, "other_row": 2, **texts}

    script.on(
        f"GET /v1/probes/{JOB_ID}/pairs",
        says({"pairs": [pair(1), pair(2)], "total": 3, "next_offset": 2}),
        says({"pairs": [pair(3)], "total": 3, "next_offset": None}),
    )
    assert [each.rank for each in client.pairs(JOB_ID)] == [1, 2, 3]
    assert "offset=2" in script.seen[1].path


# ------------------------------------------------------------------------------------------------ wait

EVENTS = f"GET /v1/probes/{JOB_ID}/events"
JOB = f"GET /v1/probes/{JOB_ID}"


def test_wait_follows_events_to_the_end(client, script):
    steps = [job_json("queued"), job_json(fraction=0.5), job_json(fraction=0.5), job_json("succeeded", 1.0)]
    script.on(EVENTS, streams(b": hello\n\n", *map(event, steps)))
    fractions = []
    job = client.wait(
        JOB_ID, on_progress=lambda job: fractions.append((job.state.value, job.progress.fraction))
    )
    assert job.state.value == "succeeded"
    assert fractions == [("queued", 0.0), ("running", 0.5), ("succeeded", 1.0)], (
        "an unchanged job is not reported"
    )


def test_wait_reconnects_after_losses(client, script, caplog):
    caplog.set_level(logging.INFO, "probe_client")
    script.on(
        EVENTS,
        streams(event(job_json(fraction=0.1)), b"event: job\ndata: {unfin"),
        hangs_up,
        says("down", 503, "text/plain"),
        streams(event(job_json(fraction=0.1)), event(job_json("succeeded", 1.0))),
    )
    seen = []
    client.wait(JOB_ID, on_progress=lambda job: seen.append(job.progress.fraction))
    assert seen == [0.1, 1.0]
    assert len(script.requests(EVENTS)) == 4
    assert sum("reconnecting" in record.message for record in caplog.records) == 2


def test_wait_polls_where_there_are_no_events_and_says_so(client, script, caplog):
    script.on(EVENTS, says("no such route", 404, "text/plain"))
    script.on(
        JOB, says(job_json(fraction=0.1)), says(job_json(fraction=0.1)), says(job_json("succeeded", 1.0))
    )
    seen = []
    client.wait(JOB_ID, on_progress=lambda job: seen.append(job.progress.fraction))
    assert seen == [0.1, 1.0]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no event stream" in record.message


def test_wait_for_a_job_that_is_not_there(client, script):
    missing = problem_json("job_not_found", 404)
    script.on(EVENTS, says(missing, 404))
    script.on(JOB, says(missing, 404))
    with pytest.raises(ApiError) as caught:
        client.wait(JOB_ID)
    assert caught.value.code == "job_not_found"


def test_wait_raises_what_the_job_ended_with(client, script):
    problem = problem_json("corpus_bad_line", 422, row=1001)
    script.on(
        EVENTS, streams(event(job_json("failed", error=problem))), streams(event(job_json("cancelled")))
    )
    with pytest.raises(JobFailed) as failed:
        client.wait(JOB_ID)
    assert (failed.value.code, failed.value.row, failed.value.job.id) == ("corpus_bad_line", 1001, JOB_ID)
    with pytest.raises(JobCancelled) as cancelled:
        client.wait(JOB_ID)
    assert cancelled.value.job.id == JOB_ID


@pytest.mark.parametrize(
    "silence",
    [(3.0,), (0.3, b": ping\n\n", 3.0), (b": ping\n\n", 0.5) * 8],
    ids=["silent", "one ping", "pings"],
)
def test_wait_keeps_its_limit_whatever_the_stream_does(client, script, silence):
    script.on(EVENTS, streams(event(job_json(fraction=0.2)), *silence))
    began = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        client.wait(JOB_ID, timeout_seconds=1.2)
    assert 1.1 < time.monotonic() - began < 2.6
    assert caught.value.job.progress.fraction == 0.2


def test_wait_gives_a_lost_service_up_after_the_outage(script):
    script.on(EVENTS, hangs_up)
    with (
        ProbeClient(script.url, outage_seconds=0.4) as client,
        pytest.raises(ConnectionFailed, match="is kept"),
    ):
        client.wait(JOB_ID)


# ------------------------------------------------------------------------------------------------ events


@pytest.mark.parametrize("chunk_length", [1, 2, 3, 1000])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_events_whatever_the_line_ends_and_chunks(chunk_length, line_end):
    text = (
        ": comment\n\nevent: job\ndata: a\u2028b\ndata:  c\nid: 3\n\ndata:d\n\nevent: empty\n\ndata: unended"
    )
    stream = text.replace("\n", line_end).encode()
    chunks = [stream[start : start + chunk_length] for start in range(0, len(stream), chunk_length)]
    # By the standard: data lines join with a line feed, one leading space goes, an event without any is none.
    assert list(read_events(chunks)) == [ServerEvent("job", "a\u2028b\n c"), ServerEvent("message", "d")]
