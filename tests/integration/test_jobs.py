"""Jobs that outlive their processes: killed workers, a killed API, cancellation, order, and giving up."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from probe_service.jobs.heartbeat import live_heartbeats
from probe_service.schemas import ProbeReport
from tests.integration.service_process import ENDED, ServiceProcess, texts_file, vectors_file

QUICK = {"batch_sizes": [128], "num_repeats": 2}


@pytest.fixture
def split(tmp_path):
    """API and worker as two processes that do not know each other."""
    running = ServiceProcess(tmp_path, with_worker=False)
    running.start(wait_for="/health")
    running.start_worker()
    try:
        yield running
    finally:
        running.stop()


def encoded_parts(service, job_id) -> dict[str, int]:
    return {name: at for name, at in service.recorded_steps(job_id).items() if name.startswith("encode part")}


@pytest.mark.slow
def test_a_worker_killed_while_encoding_and_while_measuring_repeats_nothing(service):
    before = service.cached_vectors().keys()
    job_id = service.submit("texts.txt", texts_file(1000), batch_sizes=[128, 256], num_repeats=2)
    service.until(job_id, lambda job: len(encoded_parts(service, job_id)) >= 1, 240)

    service.kill_worker()
    steps, vectors = service.recorded_steps(job_id), service.cached_vectors()
    assert 0 < len(vectors.keys() - before) < 1000
    assert service.job(job_id)["state"] == "running"

    job = service.until(
        job_id, lambda job: job["progress"]["phase"] == "measuring" and job["attempts"] == 2, 240
    )
    everything = service.cached_vectors()
    assert len(everything.keys() - before) >= 1000
    # A vector that is encoded again is replaced, under another row id.
    assert everything.items() >= vectors.items()
    assert service.recorded_steps(job_id).items() >= steps.items()

    service.until(job_id, lambda job: len(job["progress"]["curve"]) >= 1, 240)
    steps = service.recorded_steps(job_id)
    service.kill_worker()
    job = service.until_ended(job_id, 240)
    assert (job["state"], job["attempts"]) == ("succeeded", 3)
    assert service.recorded_steps(job_id).items() >= steps.items()
    assert service.cached_vectors().items() >= everything.items()
    report = ProbeReport.model_validate_json(service.http.get(f"/v1/probes/{job_id}/report").content)
    assert report.corpus.rows_usable == 1000
    assert [point.batch_size for point in report.curve] == [128, 256]


def test_cancelling_while_encoding_ends_within_five_seconds(service):
    job_id = service.submit("texts.txt", texts_file(3000), batch_sizes=[256])
    service.until(job_id, lambda job: job["progress"] and job["progress"]["phase"] == "encoding", 240)
    refused = service.http.delete(f"/v1/probes/{job_id}")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_not_ended")
    corpus = service.job(job_id)["corpus_id"]
    refused = service.http.delete(f"/v1/corpora/{corpus}")
    assert (refused.status_code, refused.json()["code"]) == (409, "corpus_in_use")
    began_at = time.monotonic()
    answer = service.http.post(f"/v1/probes/{job_id}/cancel")
    assert answer.status_code == 202
    assert answer.json()["state"] in ("cancelling", "cancelled")
    seen = []
    while not seen or seen[-1] not in ENDED:
        seen.append(service.job(job_id)["state"])
        assert time.monotonic() - began_at < 5, seen
    assert seen == sorted(seen, key=["cancelling", "cancelled"].index)
    encoded = len(service.cached_vectors())
    time.sleep(1.5)
    assert len(service.cached_vectors()) == encoded
    assert service.http.post(f"/v1/probes/{job_id}/cancel").json()["state"] == "cancelled"


def test_queued_jobs_run_one_at_a_time_in_the_order_they_came(service):
    jobs = [service.submit(f"v{seed}.npy", vectors_file(seed=seed), **QUICK) for seed in range(3)]
    ended = [service.until_ended(job_id, 240) for job_id in jobs]
    assert {job["state"] for job in ended} == {"succeeded"}
    spans = [service.recorded_steps(job_id).values() for job_id in jobs]
    for earlier, later in itertools.pairwise(spans):
        assert max(earlier) <= min(later)


def test_the_worker_goes_on_without_the_api_and_a_new_api_shows_the_same_job(split):
    job_id = split.submit("v.npy", vectors_file(), batch_sizes=[16, 32, 64, 128, 200], num_repeats=2)
    split.until(job_id, lambda job: job["state"] == "running", 120)
    before = split.job(job_id)
    split.kill_api()
    with pytest.raises(httpx.TransportError):
        split.http.get("/health")
    report = split.home / "jobs" / job_id / "report.json"
    deadline = time.monotonic() + 120
    while not report.exists():
        assert time.monotonic() < deadline, split.log()
        time.sleep(0.1)
    split.start()
    job = split.until_ended(job_id)
    assert (job["state"], job["attempts"]) == ("succeeded", 1)
    for field in ("created_at", "corpus_id", "corpus_name", "request"):
        assert job[field] == before[field]

    # The orderly way: a worker that is told to stop hands its job back, and the next one takes it up.
    job_id = split.submit("v.npy", vectors_file(seed=1), batch_sizes=[16, 32, 64, 128, 200], num_repeats=2)
    split.until(job_id, lambda job: len(split.recorded_steps(job_id)) >= 4)
    assert split.worker is not None
    began_at = time.monotonic()
    split.worker.send_signal(signal.SIGTERM)
    assert split.worker.wait(10) == 0
    assert time.monotonic() - began_at < 6
    steps = split.recorded_steps(job_id)
    job = split.job(job_id)
    assert job["state"] == "running"
    assert split.http.get("/ready").json()["code"] == "worker_unavailable"
    split.start_worker()
    assert split.until_ended(job_id)["state"] == "succeeded"
    assert split.recorded_steps(job_id).items() >= steps.items()


def test_a_job_that_kills_every_worker_fails_with_the_cause(split):
    """Unsupervised: each new worker finds out itself that the one before it died."""
    job_id = split.submit("v.npy", vectors_file(rows=3000, dimension=64), num_repeats=2000)
    follower = split.submit("after.npy", vectors_file(), **QUICK)
    for attempt in (1, 2, 3):
        split.until(job_id, lambda job, attempt=attempt: job["attempts"] == attempt)
        while all(beat.job_id != job_id for beat in live_heartbeats(split.home)):
            time.sleep(0.05)
        assert split.worker is not None
        os.kill(split.worker.pid, signal.SIGKILL)
        split.worker.wait()
        assert split.job(job_id)["state"] == "running"
        split.start_worker()
    job = split.until_ended(job_id)
    assert (job["state"], job["attempts"]) == ("failed", 3)
    assert job["error"]["code"] == "worker_killed"
    assert job["error"]["instance"] == f"/v1/probes/{job_id}"
    assert split.until_ended(follower)["state"] == "succeeded"


def test_the_worker_ends_when_its_api_is_killed(tmp_path):
    running = ServiceProcess(tmp_path).start()
    try:
        pid = running.worker_pid()
        running.kill_api()
        deadline = time.monotonic() + 10
        while alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        running.stop()


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
