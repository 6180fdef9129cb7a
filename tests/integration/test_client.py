"""The client against the real service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from probe_client import ApiError, JobFailed, ProbeClient
from probe_service.schemas import JobState
from tests.integration.service_process import ServiceProcess, vectors_file


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[ProbeClient]:
    with ProbeClient(f"http://127.0.0.1:{service.port}") as connected:
        yield connected


def test_from_a_file_to_a_report(client, tmp_path):
    path = tmp_path / "vectors.npy"
    path.write_bytes(vectors_file(60, 8))
    job = client.submit(path=path, request={"batch_sizes": [4, 8], "seed": 3})
    assert job.corpus_name == "vectors.npy"
    fractions = []
    ended = client.wait(
        job.id, on_progress=lambda now: fractions.append(now.progress and now.progress.fraction)
    )
    assert ended.state is JobState.SUCCEEDED
    assert len(fractions) > 1

    report = client.report(job.id)
    assert report.run.id == job.id
    assert [point.batch_size for point in report.curve] == [4, 8]
    assert report.advice.headline in client.report_html(job.id)
    pairs = list(client.pairs(job.id))
    assert pairs[: len(report.pairs)] == report.pairs
    assert [pair.rank for pair in pairs] == list(range(1, len(pairs) + 1))
    assert job.id in {each.id for each in client.jobs()}

    client.delete(job.id)
    with pytest.raises(ApiError) as gone:
        client.job(job.id)
    assert (gone.value.code, gone.value.status) == ("job_not_found", 404)


def test_one_key_makes_one_job_and_cancel_ends_it(client):
    rows = [f"row {number}" for number in range(30)]
    first = client.submit(rows=rows, idempotency_key="the same")
    assert client.submit(rows=rows, idempotency_key="the same").id == first.id
    with pytest.raises(ApiError) as conflict:
        client.submit(rows=rows[:20], idempotency_key="the same")
    assert conflict.value.code == "idempotency_conflict"
    assert client.cancel(first.id).state in (JobState.CANCELLING, JobState.CANCELLED)


def test_a_bad_row_is_named_whether_it_is_seen_at_once_or_later(client, tmp_path):
    near = tmp_path / "near.jsonl"
    near.write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(ApiError) as refused:
        client.submit(path=near)
    assert (refused.value.code, refused.value.row) == ("corpus_bad_line", 2)

    far = tmp_path / "far.jsonl"
    far.write_text('{"text": "a row"}\n' * 10_000 + '{"text": \n', encoding="utf-8")
    job = client.submit(path=far)
    with pytest.raises(JobFailed) as failed:
        client.wait(job.id)
    assert (failed.value.code, failed.value.row) == ("corpus_bad_line", 10_001)


def test_the_listed_encoders_name_the_default(client):
    listed = client.encoders()
    assert listed.default == "minilm"
    assert [encoder.name for encoder in listed.encoders if encoder.default] == ["minilm"]


def test_the_client_waits_through_a_restart_of_the_api(tmp_path: Path):
    service = ServiceProcess(tmp_path / "service", with_worker=False)
    try:
        service.start(wait_for="/health")
        with ProbeClient(f"http://127.0.0.1:{service.port}") as client:
            path = tmp_path / "vectors.npy"
            path.write_bytes(vectors_file(60, 8))
            job = client.submit(path=path, request={"batch_sizes": [4, 8]})
            heard = threading.Event()
            ended = []

            def follow() -> None:
                ended.append(client.wait(job.id, on_progress=lambda _: heard.set()))

            waiting = threading.Thread(target=follow)
            waiting.start()
            assert heard.wait(30)
            service.kill_api()
            service.start(wait_for="/health")
            service.start_worker()
            waiting.join(timeout=240)
        assert [job.state for job in ended] == [JobState.SUCCEEDED]
    finally:
        service.stop()
