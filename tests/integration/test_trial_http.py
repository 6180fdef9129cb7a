"""Trials over HTTP against the real service: durable, cancellable, with what is known so far."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from probe_service.schemas import TrialReport
from tests.integration.service_process import ENDED, vectors_file

ROWS, GROUPS = 200, 20
QUICK = {
    "losses": [{"kind": "infonce"}, {"kind": "oracle_masking"}],
    "batch_sizes": [4, 32],
    "num_seeds": 2,
    "steps": 10,
    "learning_rates": [0.01],
}


def stored(service, content, name="rows.jsonl") -> str:
    answer = service.http.post("/v1/corpora", files=[("file", (name, content))])
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


@pytest.fixture(scope="module")
def corpus(service) -> str:
    """Id of a stored corpus of vectors in groups."""
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((GROUPS, 10))
    lines = [
        {
            "embedding": (centres[row % GROUPS] + rng.standard_normal(10)).round(4).tolist(),
            "group": f"g{row % GROUPS}",
        }
        for row in range(ROWS)
    ]
    return stored(service, "\n".join(json.dumps(line) for line in lines).encode())


def submit(service, corpus_id, request=QUICK, **headers) -> dict:
    body = {"corpus_id": corpus_id, "request": request}
    answer = service.http.post("/v1/trials", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == answer.json()["links"]["self"]
    return answer.json()


def until(service, job_id, reached, within_seconds=120.0) -> dict:
    deadline = time.monotonic() + within_seconds
    while not reached(job := service.http.get(f"/v1/trials/{job_id}").json()):
        assert time.monotonic() < deadline, f"{job}\n{service.log()}"
        time.sleep(0.05)
    return job


def until_ended(service, job_id) -> dict:
    return until(service, job_id, lambda job: job["state"] in ENDED)


def refusal(answer) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"]


def test_a_trial_runs_to_its_report(service, corpus):
    job = submit(service, corpus)
    ended = until_ended(service, job["id"])
    assert ended["state"] == "succeeded", ended
    report = TrialReport.model_validate_json(service.http.get(ended["links"]["report"]).content)
    assert report.complete
    assert len(report.cells) == report.num_cells == 8
    assert ended["table"] == [figure.model_dump(mode="json") for figure in report.table]
    assert {gain.batch_size for gain in report.masking} == {4, 32}
    assert all(gain.predicted_share is not None for gain in report.masking)
    again = submit(service, corpus)
    assert until_ended(service, again["id"])["table"] == ended["table"]
    listed = service.http.get("/v1/trials").json()["trials"]
    assert [trial["id"] for trial in listed[:2]] == [again["id"], job["id"]]
    assert listed[0]["table"] == []
    for chart, dataset in (("chart", "scores"), ("masking_chart", "gains")):
        assert service.http.get(ended["links"][chart], params={"theme": "dark"}).json()["datasets"][dataset]
    assert service.http.get(f"/v1/probes/{job['id']}").status_code == 404, "a trial is no probe"


def test_images_over_http(service):
    request = {"mode": "images", "batch_sizes": [8], "num_seeds": 1, "steps": 2, "learning_rates": [0.01]}
    answer = service.http.post("/v1/trials", json={"request": request})
    assert answer.status_code == 202, answer.text
    ended = until_ended(service, answer.json()["id"])
    assert (ended["state"], ended["corpus_name"], len(ended["table"])) == ("succeeded", "digits", 2)


@pytest.mark.slow
def test_a_killed_worker_loses_one_cell_at_most(service, corpus):
    job = submit(service, corpus, {**QUICK, "steps": 120, "num_seeds": 4})
    cells = service.home / "jobs" / job["id"] / "cells"
    seen = until(service, job["id"], lambda job: len(job["table"]) >= 2)
    assert seen["state"] == "running"
    partial = TrialReport.model_validate_json(service.http.get(seen["links"]["report"]).content)
    assert not partial.complete
    assert partial.num_cells == 16
    service.kill_worker()
    finished = {file: file.stat().st_mtime_ns for file in cells.glob("*.json")}
    assert 2 <= len(finished) < 16
    ended = until_ended(service, job["id"])
    assert (ended["state"], ended["attempts"]) == ("succeeded", 2)
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    report = TrialReport.model_validate_json(service.http.get(ended["links"]["report"]).content)
    assert len(report.cells) == 16
    assert report.cells[: len(partial.cells)] == partial.cells


def test_a_cancelled_trial_keeps_what_has_finished(service, corpus):
    job = submit(service, corpus, {**QUICK, "steps": 2000, "batch_sizes": [4, 64]})
    until(service, job["id"], lambda job: job["progress"] and job["progress"]["phase"] == "training")
    assert refusal(service.http.delete(f"/v1/trials/{job['id']}")) == (409, "job_not_ended")
    began_at = time.monotonic()
    assert service.http.post(f"/v1/trials/{job['id']}/cancel").status_code == 202
    assert until_ended(service, job["id"])["state"] == "cancelled"
    assert time.monotonic() - began_at < 10
    assert service.http.delete(f"/v1/trials/{job['id']}").status_code == 204
    assert refusal(service.http.get(f"/v1/trials/{job['id']}")) == (404, "job_not_found")
    assert not (service.home / "jobs" / job["id"]).exists()
    assert service.http.get(f"/v1/corpora/{corpus}").status_code == 200


def test_what_cannot_be_tried_fails_with_its_reason(service, corpus):
    unlabelled = stored(service, vectors_file(60, 8), "vectors.npy")
    job = submit(service, unlabelled)
    ended = until_ended(service, job["id"])
    assert (ended["state"], ended["error"]["code"]) == ("failed", "trial_needs_positives")
    assert ended["error"]["instance"] == f"/v1/trials/{job['id']}"
    assert refusal(service.http.get(f"/v1/trials/{job['id']}/report")) == (409, "job_without_report")
    assert service.http.delete(f"/v1/trials/{job['id']}").status_code == 204


def test_sending_twice_and_bad_bodies(service, corpus):
    request = {**QUICK, "num_seeds": 1}
    first = submit(service, corpus, request, **{"Idempotency-Key": "k-1"})
    assert submit(service, corpus, request, **{"Idempotency-Key": "k-1"})["id"] == first["id"]
    other = service.http.post(
        "/v1/trials", json={"corpus_id": corpus, "request": QUICK}, headers={"Idempotency-Key": "k-1"}
    )
    assert refusal(other) == (409, "idempotency_conflict")
    for body, expected in (
        ({"request": QUICK}, (422, "request_invalid")),
        ({"corpus_id": corpus, "request": {"mode": "images"}}, (422, "request_invalid")),
        ({"corpus_id": corpus, "request": {"losses": [{"kind": "hinge"}]}}, (422, "request_invalid")),
        ({"corpus_id": "0" * 64}, (404, "corpus_not_found")),
        ({"corpus_id": corpus, "request": {"encoder": "some/unknown-model"}}, (422, "encoder_not_allowed")),
    ):
        assert refusal(service.http.post("/v1/trials", json=body)) == expected
    text = service.http.post("/v1/trials", content=b"{}", headers={"content-type": "text/plain"})
    assert refusal(text) == (415, "media_type_unsupported")
    until_ended(service, first["id"])
