"""The HTTP service from outside: what it takes, what it refuses and how, what a finished probe shows."""

from __future__ import annotations

import asyncio
import csv
import http.client
import io
import itertools
import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from probe_service.api import create_app
from probe_service.schemas import ProbeReport
from probe_service.settings import Settings
from tests.integration.service_process import as_json, texts_file, vectors_file

SIZES = [32, 128]
FAST = {"batch_sizes": SIZES, "num_repeats": 4, "seed": 3}


@pytest.fixture(scope="module")
def finished(service):
    """Id of a probe of 200 vectors that has succeeded."""
    job_id = service.submit("vectors.npy", vectors_file(), **FAST)
    assert service.until_ended(job_id)["state"] == "succeeded", service.job(job_id)
    return job_id


def problem(answer: httpx.Response) -> dict:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["type"] == f"urn:probe-service:error:{document['code']}"
    assert "Traceback" not in answer.text
    return document


def form(content: bytes, name: str = "c.txt", **request) -> dict:
    return {"files": [("request", (None, as_json(request), "application/json")), ("file", (name, content))]}


def ask(settings: Settings, *requests: tuple) -> list[httpx.Response]:
    """Answers of an app in this process, without a worker."""

    async def answers():
        app = create_app(settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://probe.test") as client:
            found = [await client.request(method, path, **options) for method, path, options in requests]
        app.state.service.queue.close()
        return found

    return asyncio.run(answers())


# ------------------------------------------------------------------------------------------------ the main road


def test_a_submission_is_accepted_where_it_can_be_found(service):
    answer = service.http.post("/v1/probes", **form(vectors_file(seed=1), "../../v\u202e.npy", **FAST))
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == job["links"]["self"] == f"/v1/probes/{job['id']}"
    assert job["state"] == "queued"
    assert job["corpus_name"] == "v.npy"
    assert job["request"]["batch_sizes"] == SIZES
    assert service.http.post(f"{answer.headers['location']}/cancel").status_code == 202


def test_the_report_speaks_of_the_corpus_and_the_request(service, finished):
    report = ProbeReport.model_validate_json(service.http.get(f"/v1/probes/{finished}/report").content)
    assert report.run.id == finished
    assert report.corpus.rows_usable == 200
    assert report.corpus.name == "vectors.npy"
    assert [point.batch_size for point in report.curve] == SIZES
    assert report.encoder.dimension == 16


def test_the_same_again_gives_the_same_report_and_can_be_deleted(service, finished):
    answer = service.http.post(
        "/v1/probes",
        **form(vectors_file(), "vectors.npy", **FAST),
        headers={"Prefer": "respond-async, wait=60"},
        timeout=90,
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["preference-applied"] == "wait=60"
    job = service.job(answer.json()["run"]["id"])
    assert answer.headers["location"] == job["links"]["self"]
    reports = [answer.json(), service.http.get(f"/v1/probes/{finished}/report").json()]
    for report in reports:
        del report["run"], report["timings"]
    assert reports[0] == reports[1]
    folder = service.home / "jobs" / job["id"]
    assert folder.is_dir()
    assert service.http.delete(job["links"]["self"]).status_code == 204
    assert not folder.exists()
    assert (service.home / "corpora" / job["corpus_id"]).is_dir()  # the first job still refers to it
    assert problem(service.http.get(job["links"]["self"]))["code"] == "job_not_found"
    assert service.http.delete(job["links"]["self"]).status_code == 404


def test_rows_inline_are_encoded(service):
    rows = ["the printer is out of ink", "printer has no ink", {"text": "reset my password"}, "new laptop"]
    answer = service.http.post(
        "/v1/probes",
        json={"rows": rows, "request": {"encoder": "minilm", "num_repeats": 2}, "name": "four rows"},
    )
    assert answer.status_code == 202
    job = service.until_ended(answer.json()["id"], within_seconds=240)
    assert job["state"] == "succeeded", job
    report = service.http.get(f"{job['links']['self']}/report").json()
    assert report["corpus"]["rows_usable"] == 4
    assert report["corpus"]["name"] == job["corpus_name"] == "four rows"
    assert report["encoder"]["name"] == "minilm"


def test_prefer_wait_zero_does_not_wait(service):
    answer = service.http.post(
        "/v1/probes", **form(vectors_file(seed=2), "v.npy"), headers={"Prefer": "wait=0"}
    )
    assert answer.status_code == 202
    assert answer.headers["preference-applied"] == "wait=0"
    service.http.post(f"{answer.headers['location']}/cancel")


def test_a_fault_found_late_is_the_same_problem_as_one_found_at_once(service):
    answer = service.http.post(
        "/v1/probes",
        **form(vectors_file(), "v.npy", batch_sizes=[16, 512], num_repeats=5),
        headers={"Prefer": "wait=60"},
        timeout=90,
    )
    assert answer.status_code == 422
    document = problem(answer)
    assert document["code"] == "batch_size_too_large"
    job = service.job(answer.headers["location"].rsplit("/", 1)[1])
    assert job["state"] == "failed"
    assert job["error"] == document
    assert problem(service.http.get(f"/v1/probes/{job['id']}/report"))["code"] == "job_without_report"


def test_events_tell_every_state_in_order_and_end(service):
    job_id = service.submit("v.npy", vectors_file(seed=9), batch_sizes=[16, 64, 200], num_repeats=4)
    jobs, ids = [], []
    with service.http.stream(
        "GET", f"/v1/probes/{job_id}/events", headers={"Last-Event-ID": "17"}, timeout=90
    ) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data:"):
                jobs.append(json.loads(line.removeprefix("data:")))
            elif line.startswith("id:"):
                ids.append(int(line.removeprefix("id:")))
            elif line.startswith("event:"):
                assert line == "event: job"
    order = ["queued", "running", "succeeded"]
    states = [order.index(job["state"]) for job in jobs]
    assert states == sorted(states)
    assert states[-1] == 2
    assert ids == list(range(1, len(jobs) + 1))
    assert jobs[-1] == service.job(job_id)
    assert all(before != after for before, after in itertools.pairwise(jobs))
    fractions = [job["progress"]["fraction"] for job in jobs if job["progress"]]
    assert fractions == sorted(fractions)
    moments = [job["updated_at"] for job in jobs]
    assert moments == sorted(moments)


# ------------------------------------------------------------------------------------------------ what it shows


def test_pictures_and_page_of_a_report(service, finished):
    svg = service.http.get(f"/v1/probes/{finished}/chart.svg?theme=dark")
    assert svg.headers["content-type"] == "image/svg+xml"
    assert svg.text.lstrip().startswith("<svg")
    png = service.http.get(f"/v1/probes/{finished}/chart.png")
    assert png.content.startswith(b"\x89PNG\r\n\x1a\n")
    page = service.http.get(f"/v1/probes/{finished}/report.html")
    assert page.headers["content-type"].startswith("text/html")
    assert "sandbox" in page.headers["content-security-policy"]
    assert "allow-same-origin" not in page.headers["content-security-policy"]


@pytest.mark.parametrize("chart", ["similarity", "share", "histogram"])
def test_charts_are_vega_lite_in_both_themes(service, finished, chart):
    specs = [
        service.http.get(f"/v1/probes/{finished}/charts/{chart}.json?theme={theme}").json()
        for theme in ("light", "dark")
    ]
    assert all(spec["$schema"].startswith("https://vega.github.io/schema/vega-lite/") for spec in specs)
    assert specs[0]["config"]["background"] != specs[1]["config"]["background"]


def test_pairs_in_pages_are_all_pairs_once_most_similar_first(service, finished):
    path = f"/v1/probes/{finished}/pairs"
    pages, offset = [], 0
    while offset is not None:
        page = service.http.get(path, params={"offset": offset, "limit": 300}).json()
        pages += page["pairs"]
        offset = page["next_offset"]
    assert len(pages) == page["total"]
    as_lines = service.http.get(path, headers={"Accept": "application/x-ndjson"})
    assert [json.loads(line) for line in as_lines.text.splitlines()] == pages
    as_table = list(csv.DictReader(io.StringIO(service.http.get(path, params={"format": "csv"}).text)))
    assert [int(row["row"]) for row in as_table] == [pair["row"] for pair in pages]
    similarities = [pair["similarity"] for pair in pages]
    assert similarities == sorted(similarities, reverse=True)
    assert [pair["rank"] for pair in pages] == list(range(1, len(pages) + 1))
    beyond = service.http.get(path, params={"offset": 10**6}).json()
    assert (beyond["pairs"], beyond["next_offset"], beyond["total"]) == ([], None, len(pages))


def test_jobs_are_listed_newest_first_page_by_page(service, finished):
    listed, offset = [], 0
    while offset is not None:
        page = service.http.get("/v1/probes", params={"offset": offset, "limit": 2}).json()
        listed += page["jobs"]
        offset = page["next_offset"]
    assert len({job["id"] for job in listed}) == len(listed)
    assert finished in {job["id"] for job in listed}
    moments = [job["created_at"][:19] for job in listed]
    assert moments == sorted(moments, reverse=True)


def test_the_page_its_assets_and_the_documentation_need_no_other_network(service):
    page = service.http.get("/")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    for asset in ("app.js", "style.css"):
        assert service.http.get(f"/assets/{asset}").status_code == 200
    script = service.http.get("/assets/vega.js", timeout=120)
    assert script.headers["content-type"].startswith("text/javascript")
    assert "window.vegaEmbed=" in script.text
    documentation = service.http.get("/docs").text
    assert "<script" not in documentation
    assert "POST /v1/probes" in documentation
    described = service.http.get("/openapi.json").json()
    assert {"ProbeSubmission", "ProbeRequest", "ProblemDetail"} <= described["components"]["schemas"].keys()


def test_what_the_service_says_about_itself(service):
    assert service.http.get("/health").json() == {"status": "ok"}
    assert service.http.get("/ready").json() == {"status": "ready"}
    info = service.http.get("/info").json()
    assert info["default_encoder"] == "minilm"
    assert info["max_upload_bytes"] == 40 * 1024 * 1024
    assert [worker["device"] for worker in info["workers"]] == ["cpu"]
    encoders = service.http.get("/v1/encoders").json()
    assert encoders["default"] == "minilm"
    assert [encoder["name"] for encoder in encoders["encoders"] if encoder["default"]] == ["minilm"]
    metrics = service.http.get("/metrics").text
    assert 'probe_http_requests_total{method="GET",route="/health",status="200"}' in metrics
    assert "probe_workers_alive 1.0" in metrics


# ------------------------------------------------------------------------------------------------ twice, and gone


def test_one_idempotency_key_makes_one_job(service):
    key = {"Idempotency-Key": str(uuid.uuid4())}
    body = form(vectors_file(seed=4), "v.npy", **FAST)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: service.http.post("/v1/probes", headers=key, **body), range(4)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    other = service.http.post("/v1/probes", headers=key, **form(vectors_file(seed=4), "v.npy", seed=9))
    assert problem(other)["code"] == "idempotency_conflict"
    assert other.status_code == 409
    another = service.http.post("/v1/probes", headers=key, **form(vectors_file(seed=5), "v.npy", **FAST))
    assert another.status_code == 409
    service.http.post(f"/v1/probes/{answers[0].json()['id']}/cancel")


def cancelled(service, job_id: str) -> dict:
    service.http.post(f"/v1/probes/{job_id}/cancel")
    return service.until_ended(job_id)


def test_a_corpus_two_jobs_read_goes_with_the_second(service):
    one, two = (service.submit("both.npy", vectors_file(seed=7), top_k=k) for k in (1, 2))
    corpus = service.home / "corpora" / cancelled(service, one)["corpus_id"]
    cancelled(service, two)
    assert service.http.delete(f"/v1/probes/{one}").status_code == 204
    assert corpus.is_dir()
    assert service.http.delete(f"/v1/probes/{two}").status_code == 204
    assert not corpus.exists()


def test_a_stored_corpus_serves_several_probes_and_stays(service):
    answer = service.http.post("/v1/corpora", files={"file": ("kept.npy", vectors_file(seed=8))})
    assert answer.status_code == 201
    stored = answer.json()
    assert (stored["name"], stored["format"]) == ("kept.npy", "npy")
    assert answer.headers["location"] == f"/v1/corpora/{stored['id']}"
    assert service.http.get(answer.headers["location"]).json() == stored
    assert stored in service.http.get("/v1/corpora").json()["corpora"]
    job_id = service.http.post("/v1/probes", json={"corpus_id": stored["id"], "request": FAST}).json()["id"]
    cancelled(service, job_id)
    assert service.http.delete(f"/v1/probes/{job_id}").status_code == 204
    assert service.http.get(f"/v1/corpora/{stored['id']}").status_code == 200
    assert service.http.delete(f"/v1/corpora/{stored['id']}").status_code == 204
    assert problem(service.http.get(f"/v1/corpora/{stored['id']}"))["code"] == "corpus_not_found"
    refused = service.http.post("/v1/probes", json={"corpus_id": stored["id"]})
    assert problem(refused)["code"] == "corpus_not_found"


# ------------------------------------------------------------------------------------------------ refusals

BOUNDARY = {"Content-Type": "multipart/form-data; boundary=x"}
BAD_REQUESTS = {
    "not JSON": ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 422, "request_invalid"),
    "deep JSON": (
        {
            "content": b'{"rows":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
            "headers": {"Content-Type": "application/json"},
        },
        422,
        "request_invalid",
    ),
    "no corpus": ({"json": {"request": {}}}, 422, "request_invalid"),
    "two corpora": ({"json": {"rows": ["a", "b"], "hf": "hf:x"}}, 422, "request_invalid"),
    "unknown field": ({"json": {"rows": ["a", "b"], "request": {"batchsize": 4}}}, 422, "request_invalid"),
    "temperature 0": (
        {"json": {"rows": ["a", "b"], "request": {"temperature": 0}}},
        422,
        "temperature_not_positive",
    ),
    "batch of 1": (
        {"json": {"rows": ["a", "b"], "request": {"batch_sizes": [1]}}},
        422,
        "batch_size_too_small",
    ),
    "encoder that is a path": (
        {"json": {"rows": ["a", "b"], "request": {"encoder": "/etc/passwd"}}},
        422,
        "encoder_not_allowed",
    ),
    "encoder that is not listed": (
        {"json": {"rows": ["a", "b"], "request": {"encoder": "someone/some-model"}}},
        422,
        "encoder_not_allowed",
    ),
    "unknown corpus": ({"json": {"corpus_id": "0" * 64}}, 404, "corpus_not_found"),
    "corpus id with a path": ({"json": {"corpus_id": "../../../etc/passwd"}}, 404, "corpus_not_found"),
    "plain text": (
        {"content": b"a\nb", "headers": {"Content-Type": "text/plain"}},
        415,
        "media_type_unsupported",
    ),
    "no type": ({"content": b"a\nb"}, 415, "media_type_unsupported"),
    "form without file": ({"files": {"request": (None, b"{}")}}, 422, "request_invalid"),
    "form with a stray part": ({"files": {"fiel": ("c.txt", b"a\nb")}}, 422, "request_invalid"),
    "form with two files": (
        {"files": [("file", ("a.txt", b"a\nb")), ("file", ("b.txt", b"a\nb"))]},
        422,
        "request_invalid",
    ),
    "form with a bad request": (
        {"files": [("request", (None, b'{"temperature": -1}')), ("file", ("a.txt", b"a\nb"))]},
        422,
        "temperature_not_positive",
    ),
    "form without boundary": (
        {"content": b"--x", "headers": {"Content-Type": "multipart/form-data"}},
        400,
        "bad_request",
    ),
    "form that is not one": ({"content": b"junk", "headers": BOUNDARY}, 400, "bad_request"),
    "form that breaks off": (
        {
            "content": b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\na\nb',
            "headers": BOUNDARY,
        },
        400,
        "bad_request",
    ),
    "empty file": (form(b""), 422, "corpus_empty"),
    "empty key": (
        {"json": {"rows": ["a", "b"]}, "headers": {"Idempotency-Key": ""}},
        422,
        "request_invalid",
    ),
    "from another page": (
        {"json": {"rows": ["a", "b"]}, "headers": {"Origin": "http://evil.example"}},
        403,
        "cross_origin_refused",
    ),
    "from another site": (
        {"json": {"rows": ["a", "b"]}, "headers": {"Sec-Fetch-Site": "cross-site"}},
        403,
        "cross_origin_refused",
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_submissions_are_refused_at_once(service, case):
    options, status, code = BAD_REQUESTS[case]
    before = service.http.get("/v1/probes?limit=200").json()["jobs"]
    answer = service.http.post("/v1/probes", **options)
    document = problem(answer)
    assert (answer.status_code, document["code"]) == (status, code)
    assert service.http.get("/v1/probes?limit=200").json()["jobs"] == before
    assert list((service.home / "corpora").glob(".incoming-*")) == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/probes/nonsense", 404, "job_not_found"),
        ("GET", f"/v1/probes/{uuid.UUID(int=1)}", 404, "job_not_found"),
        ("GET", f"/v1/probes/{uuid.UUID(int=1)}/events", 404, "job_not_found"),
        ("POST", f"/v1/probes/{uuid.UUID(int=1)}/cancel", 404, "job_not_found"),
        ("DELETE", "/v1/probes/..%2F..", 404, "route_not_found"),
        ("GET", "/v1/probes?limit=0", 422, "request_invalid"),
        ("GET", "/v1/probes?offset=x", 422, "request_invalid"),
        ("GET", "/v1/corpora/x", 404, "corpus_not_found"),
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/assets/../../pyproject.toml", 404, "route_not_found"),
        ("GET", "/assets/%2e%2e/%2e%2e/pyproject.toml", 404, "route_not_found"),
        ("PUT", "/v1/probes", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/probes", 405, "method_not_allowed"),
    ],
)
def test_other_refusals(service, method, path, status, code):
    answer = service.http.request(method, path)
    assert (answer.status_code, problem(answer)["code"]) == (status, code)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers


def test_a_chart_of_a_report_that_is_not_there(service, finished):
    assert service.http.get(f"/v1/probes/{finished}/charts/pie.json").status_code == 422
    missing = service.http.get(f"/v1/probes/{finished}/charts/sources.json")
    assert (missing.status_code, problem(missing)["code"]) == (404, "chart_not_found")
    assert service.http.get(f"/v1/probes/{finished}/chart.svg?theme=neon").status_code == 422


def test_inline_rows_above_the_limit_are_refused_announced_or_not(service):
    body = json.dumps({"rows": ["x" * 1000] * 300}).encode()

    def dribble():
        yield from (body[start : start + 10_000] for start in range(0, len(body), 10_000))

    for content in (body, dribble()):
        answer = service.http.post(
            "/v1/probes", content=content, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, problem(answer)["code"]) == (413, "payload_too_large")


def test_an_upload_that_announces_too_much_is_refused_unread(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    connection.putrequest("POST", "/v1/probes")
    connection.putheader("Content-Type", BOUNDARY["Content-Type"])
    connection.putheader("Content-Length", str(10**10))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["code"] == "payload_too_large"
    connection.close()


class SlowUpload:
    """A multipart body sent in pieces, which tells how far it came."""

    def __init__(self, content: bytes, pieces: int, name: str, pause_seconds: float = 0.0) -> None:
        head = (
            b'--x\r\nContent-Disposition: form-data; name="request"\r\n\r\n{}\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\n'
        )
        self.parts = [head, *[content] * pieces, b"\r\n--x--\r\n"]
        self.sent = 0
        self.pause_seconds = pause_seconds

    def __iter__(self):
        for part in self.parts:
            yield part
            self.sent += 1
            time.sleep(self.pause_seconds)


def test_what_the_first_64_kib_show_is_answered_before_the_rest_was_sent(service):
    upload = SlowUpload(b"\x00\x01\x02\xff" * 8192, pieces=200, name="junk.jsonl", pause_seconds=0.05)
    answer = service.http.post("/v1/probes", content=iter(upload), headers=BOUNDARY)
    assert answer.status_code == 422
    assert problem(answer)["code"].startswith("corpus_")
    assert upload.sent < 100


def test_an_upload_that_grows_above_the_limit_is_refused_and_leaves_nothing(service):
    upload = SlowUpload(b"a line of text that is fine\n" * 40_000, pieces=40, name="big.txt")
    answer = service.http.post("/v1/probes", content=iter(upload), headers=BOUNDARY)
    assert (answer.status_code, problem(answer)["code"]) == (413, "payload_too_large")
    assert list((service.home / "corpora").glob(".incoming-*")) == []


def test_a_client_that_goes_away_leaves_nothing(service):
    stop = threading.Event()

    class Gone(Exception):
        pass

    def half():
        yield from SlowUpload(b"some text\n" * 5000, pieces=3, name="half.txt").parts[:3]
        stop.wait(0.3)
        raise Gone

    with pytest.raises(Gone), httpx.Client(base_url=service.http.base_url, trust_env=False) as client:
        client.post("/v1/probes", content=half(), headers=BOUNDARY)
    deadline = time.monotonic() + 5
    while list((service.home / "corpora").glob(".incoming-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Traceback" not in service.log()


def test_the_request_may_follow_the_file(service):
    parts = [
        ("file", ("table.jsonl", b'{"q": "one"}\n{"q": "two"}\n')),
        ("request", (None, as_json({"corpus": {"columns": {"text": "q"}}, "batch_sizes": [2]}))),
    ]
    answer = service.http.post("/v1/probes", files=parts)
    assert answer.status_code == 202, answer.text
    service.http.post(f"/v1/probes/{answer.json()['id']}/cancel")


# ------------------------------------------------------------------------------------------------ other settings


def test_with_keys_only_those_who_have_one_get_in(tmp_path):
    settings = Settings(home=tmp_path, api_keys=("first-key", "second-key"))
    probe = f"/v1/probes/{uuid.UUID(int=1)}"
    paths = ("/v1/probes", "/v1/corpora", "/v1/encoders", f"{probe}/report", f"{probe}/audit/pairs")
    wrong = [{}, {"Authorization": "Bearer first-ke"}, {"Authorization": "Basic first-key"}]
    refused = ask(settings, *(("GET", path, {"headers": headers}) for path in paths for headers in wrong))
    for answer in refused:
        assert (answer.status_code, problem(answer)["code"]) == (401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in settings.api_keys:
        (answer,) = ask(settings, ("GET", "/v1/probes", {"headers": {"Authorization": f"Bearer {key}"}}))
        assert answer.json() == {"jobs": [], "next_offset": None}
    (health,) = ask(settings, ("GET", "/health", {}))
    assert health.status_code == 200


def test_a_full_queue_answers_429_and_keeps_nothing(tmp_path):
    settings = Settings(home=tmp_path, max_queued_jobs=2)
    posts = [("POST", "/v1/probes", form(vectors_file(seed=seed), "v.npy")) for seed in range(3)]
    first, second, third = ask(settings, *posts)
    assert (first.status_code, second.status_code) == (202, 202)
    assert (third.status_code, problem(third)["code"]) == (429, "queue_full")
    assert int(third.headers["retry-after"]) >= 1
    assert len(list((tmp_path / "corpora").iterdir())) == 2


def test_a_repeated_submission_is_found_even_when_the_queue_is_full(tmp_path):
    settings = Settings(home=tmp_path, max_queued_jobs=1)
    post = ("POST", "/v1/probes", {**form(vectors_file(), "v.npy"), "headers": {"Idempotency-Key": "k"}})
    first, again = ask(settings, post, post)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]


def test_without_a_worker_jobs_wait_and_the_service_is_not_ready(tmp_path):
    settings = Settings(home=tmp_path)
    ready, posted = ask(settings, ("GET", "/ready", {}), ("POST", "/v1/probes", form(texts_file(5))))
    assert (ready.status_code, problem(ready)["code"]) == (503, "worker_unavailable")
    job_id = posted.json()["id"]
    cancelled, report, deleted, gone = ask(
        settings,
        ("POST", f"/v1/probes/{job_id}/cancel", {}),
        ("GET", f"/v1/probes/{job_id}/report", {}),
        ("DELETE", f"/v1/probes/{job_id}", {}),
        ("GET", f"/v1/probes/{job_id}", {}),
    )
    assert cancelled.json()["state"] == "cancelled"
    assert (report.status_code, problem(report)["code"]) == (409, "job_without_report")
    assert deleted.status_code == 204
    assert gone.status_code == 404


def test_a_queued_job_is_cancelled_by_its_deletion(tmp_path):
    settings = Settings(home=tmp_path)
    (posted,) = ask(settings, ("POST", "/v1/probes", form(vectors_file(), "v.npy")))
    job_id = posted.json()["id"]
    report, deleted, listed = ask(
        settings,
        ("GET", f"/v1/probes/{job_id}/report", {}),
        ("DELETE", f"/v1/probes/{job_id}", {}),
        ("GET", "/v1/probes", {}),
    )
    assert (report.status_code, problem(report)["code"]) == (409, "job_not_ready")
    assert deleted.status_code == 204
    assert listed.json()["jobs"] == []
    assert list((tmp_path / "corpora").iterdir()) == []


def test_without_its_database_the_service_lives_and_says_503(tmp_path):
    settings = Settings(home=tmp_path, database_url="postgresql://nobody@127.0.0.1:1/none")
    health, ready, listed, posted, metrics = ask(
        settings,
        ("GET", "/health", {}),
        ("GET", "/ready", {}),
        ("GET", "/v1/probes", {}),
        ("POST", "/v1/probes", form(vectors_file(), "v.npy")),
        ("GET", "/metrics", {}),
    )
    assert health.status_code == 200
    for answer in (ready, listed, posted):
        assert (answer.status_code, problem(answer)["code"]) == (503, "database_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert "127.0.0.1" not in answer.text
    assert "probe_database_up 0.0" in metrics.text


def test_encoders_follow_the_allow_list(tmp_path):
    settings = Settings(home=tmp_path, allowed_encoders=("minilm", "team/house-model"), encoder="minilm")
    listed, allowed, refused = ask(
        settings,
        ("GET", "/v1/encoders", {}),
        ("POST", "/v1/probes", {"json": {"rows": ["a", "b"], "request": {"encoder": "team/house-model"}}}),
        ("POST", "/v1/probes", {"json": {"rows": ["a", "b"], "request": {"encoder": "simcse-bert-base"}}}),
    )
    assert [encoder["name"] for encoder in listed.json()["encoders"]] == ["minilm", "team/house-model"]
    assert allowed.status_code == 202
    assert problem(refused)["code"] == "encoder_not_allowed"
