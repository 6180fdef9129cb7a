"""The audit over HTTP against the real service: pairs drawn by the worker, labelled, and what the labels say."""

from __future__ import annotations

import csv
import io
import json
import time

import numpy as np
import pytest

from probe_client import ApiError, JobFailed, ProbeClient
from probe_service.audit import Audit, ItemKind
from probe_service.jobs.audits import audit_job_id
from probe_service.schemas import DEFAULT_BUDGET, AuditAnswer, AuditQuestion
from tests.integration.service_process import vectors_file

ROWS, GROUPS = 240, 40
SIZES = [8, 32]
LABELS, CHECKS = 150, 6
QUICK = {"batch_sizes": SIZES, "num_repeats": 2}


@pytest.fixture(scope="module")
def world():
    """(meaning of each row, unit vectors): rows of one meaning lie close to each other."""
    rng = np.random.default_rng(4)
    group = rng.integers(0, GROUPS, ROWS)
    centres = rng.standard_normal((GROUPS, 12))
    vectors = centres[group] + 0.7 * rng.standard_normal((ROWS, 12))
    return group, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).round(5)


def corpus(world, rows) -> bytes:
    group, vectors = world
    lines = [
        {"text": f"row {row} of meaning {group[row]}", "embedding": vectors[row].tolist()} for row in rows
    ]
    return "\n".join(json.dumps(line) for line in lines).encode()


@pytest.fixture(scope="module")
def client(service):
    with ProbeClient(f"http://127.0.0.1:{service.port}") as connected:
        yield connected


def probed(service, world, rows) -> str:
    job_id = service.submit("corpus.jsonl", corpus(world, rows), **QUICK)
    assert service.until_ended(job_id)["state"] == "succeeded"
    return job_id


@pytest.fixture(scope="module")
def job(service, world) -> str:
    """Id of a finished probe without an audit."""
    return probed(service, world, range(ROWS))


@pytest.fixture(scope="module")
def audited(client, job) -> str:
    """The same, with an audit whose pairs are drawn; each test gives the answers that it needs."""
    client.draw_audit(job, labels=LABELS, checks=CHECKS)
    client.wait_for_audit(job, timeout_seconds=60)
    return job


def meaning(text: str) -> str:
    """The meaning that a text names, checks in other case and punctuation included."""
    return text.rstrip(".").lower().rsplit(" ", 1)[1]


def truth(question: AuditQuestion) -> str:
    return "yes" if meaning(question.anchor) == meaning(question.candidate) else "no"


def label_all(client, job, word=truth) -> None:
    questions = list(client.audit_questions(job))
    client.label(job, [AuditAnswer(id=each.id, answer=word(each)) for each in questions])


def private(service, job) -> Audit:
    return Audit.read(service.home / "jobs" / audit_job_id(job) / "audit.json")


def refusal(answer) -> tuple[int, str, int | None]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"], answer.json()["row"]


def true_share(world, size: int) -> float:
    """S(N) from its definition, on random batches."""
    group, vectors = world
    rng = np.random.default_rng(1)
    total = 0.0
    for _ in range(400):
        rows = rng.choice(ROWS, size, replace=False)
        weights = np.exp(vectors[rows] @ vectors[rows].T / 0.05)
        np.fill_diagonal(weights, 0.0)
        same = group[rows][:, None] == group[rows][None, :]
        total += ((weights * same).sum(axis=1) / weights.sum(axis=1)).mean()
    return total / 400


# ------------------------------------------------------------------------------------------------ from draw to report


def test_true_labels_give_the_true_shares(service, client, world, job):
    drawn = service.http.post(f"/v1/probes/{job}/audit", json={"labels": LABELS, "checks": CHECKS})
    assert drawn.status_code == 202
    assert drawn.headers["location"] == f"/v1/probes/{job}/audit" == drawn.json()["links"]["self"]
    audit = client.wait_for_audit(job, timeout_seconds=60)
    pairs = [item for item in private(service, job).items if item.kind is ItemKind.PAIR]
    assert audit.counts.questions == len(pairs) + round(0.2 * len(pairs)) + 2 * CHECKS
    assert (audit.counts.answered, audit.counts.open) == (0, audit.counts.questions)
    for early in ("report", "chart.json"):
        answer = service.http.get(f"/v1/probes/{job}/audit/{early}")
        assert refusal(answer)[:2] == (409, "audit_labels_incomplete")

    one_by_one = 20
    for at, question in enumerate(client.audit_questions(job, open_only=True)):
        assert question.number == at + 1
        if at < one_by_one:
            client.label(job, [AuditAnswer(id=question.id, answer=truth(question))])
    left = list(client.audit_questions(job, open_only=True))
    assert [question.number for question in left] == list(range(one_by_one + 1, audit.counts.questions + 1))
    assert client.audit(job).counts.open == len(left)
    counts = client.label(job, [AuditAnswer(id=each.id, answer=truth(each)) for each in left])
    assert counts.open == 0

    report = client.audit_report(job)
    assert client.audit_report(job) == report
    for share, verdict in zip(report.shares, report.verdicts, strict=True):
        assert share.estimate.low <= true_share(world, share.batch_size) <= share.estimate.high
        assert (verdict.verdict == "pass") == (share.estimate.high <= DEFAULT_BUDGET)
    assert [share.batch_size for share in report.shares] == SIZES
    assert (report.labels.pairs_drawn, report.labels.contradictions, report.warnings) == (LABELS, [], [])
    assert report.judges == ["person"]
    chart = service.http.get(f"/v1/probes/{job}/audit/chart.json", params={"theme": "dark"}).json()
    drawn_rows = [
        (row["batch_size"], row["value"], row["low"], row["high"]) for row in chart["datasets"]["share"]
    ]
    shown = [(share.batch_size, share.estimate) for share in report.shares]
    assert drawn_rows == [(size, found.value, found.low, found.high) for size, found in shown]


def test_the_questions_are_blind_and_in_random_order(service, audited):
    page = service.http.get(f"/v1/probes/{audited}/audit/pairs", params={"limit": 200}).json()
    fields = {"id", "number", "anchor", "positive", "candidate", "answer", "judge"}
    assert {frozenset(question) for question in page["questions"]} == {frozenset(fields)}
    items = private(service, audited).items
    assert [question["id"] for question in page["questions"]] == [item.id for item in items[:200]]
    kinds = [item.kind for item in items]
    assert len(set(kinds[:25])) > 1
    assert len(set(kinds[-25:])) > 1
    for kind in ItemKind:
        assert kind not in json.dumps(service.http.get(f"/v1/probes/{audited}/audit").json()["counts"])


def test_the_same_request_changes_nothing_and_another_is_refused(service, client, audited):
    before = client.audit(audited)
    assert client.draw_audit(audited, labels=LABELS, checks=CHECKS).created_at == before.created_at
    for other in ({"labels": LABELS + 1, "checks": CHECKS}, {}):
        answer = service.http.post(f"/v1/probes/{audited}/audit", json=other)
        assert refusal(answer)[:2] == (409, "audit_exists")


# ------------------------------------------------------------------------------------------------ answers


def test_a_later_answer_replaces_an_earlier_one(client, audited):
    first, second = list(client.audit_questions(audited))[:2]
    before = client.label(audited, [AuditAnswer(id=first.id, answer="no")])
    again = client.label(audited, [AuditAnswer(id=first.id, answer="no")])
    assert again == before
    client.label(
        audited,
        [
            AuditAnswer(id=first.id, answer="unsure"),
            AuditAnswer(id=first.id, answer="yes", judge="another"),
        ],
    )
    found = next(client.audit_questions(audited))
    assert (found.answer, found.judge) == ("yes", "another")
    assert second.answer == list(client.audit_questions(audited))[1].answer


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (
            [{"id": "KNOWN", "answer": "no"}, {"id": "nobody asked", "answer": "no"}],
            ("audit_labels_foreign", 2),
        ),
        ([{"id": "KNOWN", "answer": "no"}, {"id": "KNOWN", "answer": "maybe"}], ("request_invalid", 2)),
        ([{"id": "KNOWN", "answer": "no", "judge": ""}], ("request_invalid", 1)),
        ([{"id": "KNOWN", "answer": "no", "similarity": 1}], ("request_invalid", 1)),
        ({"id": "KNOWN", "answer": "no"}, ("request_invalid", None)),
        ("no json", ("request_invalid", None)),
    ],
)
def test_answers_that_cannot_be_taken_are_refused_with_their_place(service, client, audited, body, refused):
    question = next(client.audit_questions(audited))
    client.label(audited, [AuditAnswer(id=question.id, answer="yes")])
    text = body if isinstance(body, str) else json.dumps(body).replace("KNOWN", question.id)
    answer = service.http.post(
        f"/v1/probes/{audited}/audit/labels", content=text, headers={"Content-Type": "application/json"}
    )
    assert refusal(answer) == (422, *refused)
    assert next(client.audit_questions(audited)).answer == "yes", "all or none"


def test_a_body_too_large_or_of_another_type_is_refused(service, audited):
    path = f"/v1/probes/{audited}/audit/labels"
    assert refusal(service.http.post(path, json=["x" * 300_000]))[:2] == (413, "payload_too_large")
    assert refusal(service.http.post(path, content=b"[]"))[:2] == (415, "media_type_unsupported")


def test_labels_against_certain_evidence_are_named_and_correct_the_estimate(service, client, audited):
    label_all(client, audited)
    before = client.audit_report(audited)
    others = [item.id for item in private(service, audited).items if item.kind is ItemKind.OTHER][:2]
    client.label(audited, [AuditAnswer(id=id_, answer="yes") for id_ in others])
    report = client.audit_report(audited)
    assert sorted(report.labels.contradictions) == sorted(others)
    assert "audit_labels_contradict_evidence" in [warning.code for warning in report.warnings]
    value, corrected = (found.shares[-1].estimate.value for found in (before, report))
    # Two of six certain others accepted: (S − 1/3)/(1 − 1/3), at least 0.
    assert corrected == pytest.approx(max(0.0, (value - 1 / 3) / (2 / 3)))
    client.label(audited, [AuditAnswer(id=id_, answer="no") for id_ in others])
    assert client.audit_report(audited) == before


def test_all_unsure_says_nothing_and_says_so(client, audited):
    label_all(client, audited, lambda _: "unsure")
    report = client.audit_report(audited)
    assert "audit_all_unsure" in [warning.code for warning in report.warnings]
    for share in report.shares:
        assert share.estimate is None or (share.estimate.low, share.estimate.high) == (0.0, 1.0)
    assert {verdict.verdict for verdict in report.verdicts} == {"inconclusive"}
    assert report.n_max.value is None


# ------------------------------------------------------------------------------------------------ sheets


def filled(sheet: bytes, change=lambda at, row: row) -> bytes:
    rows = list(csv.DictReader(io.StringIO(sheet.decode("utf-8-sig"), newline="")))
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, rows[0])
    table.writeheader()
    for at, row in enumerate(rows, start=1):
        same = meaning(row["a"]) == meaning(row["b"])
        table.writerow(change(at, {**row, "label": "yes" if same else "no", "judge": "a colleague"}))
    return text.getvalue().encode()


def test_a_sheet_is_filled_elsewhere_and_sent_back(client, audited, tmp_path):
    label_all(client, audited)
    wanted = client.audit_report(audited)
    label_all(client, audited, lambda _: "unsure")
    (tmp_path / "pairs.csv").write_bytes(filled(client.audit_sheet(audited, sheet_format="csv")))
    assert client.send_audit_sheet(audited, tmp_path / "pairs.csv").open == 0
    report = client.audit_report(audited)
    assert (report.shares, report.judges) == (wanted.shares, ["a colleague"])
    lines = [json.loads(line) for line in client.audit_sheet(audited).splitlines()]
    lines[0]["label"] = "?"
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(line) for line in lines[:1]))
    client.send_audit_sheet(audited, tmp_path / "pairs.jsonl")
    assert next(client.audit_questions(audited)).answer == "unsure"


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda at, row: {**row, "b": "other words"} if at == 3 else row, ("audit_labels_foreign", 3)),
        (lambda at, row: {**row, "label": "perhaps so"} if at == 4 else row, ("audit_label_unknown", 4)),
        (lambda at, row: {**row, "judge": "j" * 300}, ("request_invalid", None)),
        (None, ("audit_sheet_unreadable", None)),
    ],
)
def test_a_sheet_that_cannot_be_taken_is_refused_with_its_row(service, client, audited, change, refused):
    sheet = (
        b"\xff\xfe\x00" if change is None else filled(client.audit_sheet(audited, sheet_format="csv"), change)
    )
    answer = service.http.post(f"/v1/probes/{audited}/audit/pairs.csv", content=sheet)
    assert refusal(answer) == (422, *refused)
    assert str(service.home) not in answer.text


# ------------------------------------------------------------------------------------------------ labels outlive the audit


def test_labels_are_used_again_after_deletion_and_for_a_grown_corpus(service, client, world):
    few = probed(service, world, range(60))
    client.draw_audit(few, labels=LABELS, checks=CHECKS, judge="ada")
    client.wait_for_audit(few, timeout_seconds=60)
    answers = [
        AuditAnswer(id=each.id, answer=truth(each), judge="ada") for each in client.audit_questions(few)
    ]
    client.label(few, answers)
    pairs = sum(item.kind is ItemKind.PAIR for item in private(service, few).items)

    grown = probed(service, world, range(80))
    for job, judge, least, most in (
        (few, "ada", pairs, pairs),
        (few, "eve", 0, 0),
        (grown, "ada", 15, LABELS),
    ):
        if job == few:
            client.delete_audit(job)
            with pytest.raises(ApiError) as gone:
                client.audit(job)
            assert (gone.value.status, gone.value.code) == (404, "audit_not_found")
        size = 8 if job == grown else None
        client.draw_audit(job, labels=LABELS, checks=CHECKS, batch_size=size, judge=judge)
        assert least <= client.wait_for_audit(job, timeout_seconds=60).counts.answered <= most
        audit = private(service, job)
        assert list(audit.design.drawn_sizes) == (SIZES if size is None else [size])
        asked_anew = audit.checks_and_repeats
        for question in client.audit_questions(job):
            assert question.answer is None or (
                question.id not in asked_anew and question.answer == truth(question)
            )

    folder = service.home / "jobs" / audit_job_id(few)
    assert folder.is_dir()
    client.delete(few)
    assert not folder.exists(), "a probe takes its audit along"


# ------------------------------------------------------------------------------------------------ what cannot be drawn


def test_a_corpus_without_texts_has_no_audit(service, client):
    job = service.submit("vectors.npy", vectors_file(60, 8), batch_sizes=[8], num_repeats=2)
    early = service.http.post(f"/v1/probes/{job}/audit")
    assert refusal(early)[:2] == (409, "job_not_ready")
    client.wait(job, timeout_seconds=60)
    missing = service.http.get(f"/v1/probes/{job}/audit/pairs")
    assert refusal(missing)[:2] == (404, "audit_not_found")
    client.draw_audit(job)
    with pytest.raises(JobFailed) as failed:
        client.wait_for_audit(job, timeout_seconds=60)
    assert failed.value.code == "audit_needs_texts"
    assert failed.value.problem.instance == f"/v1/probes/{job}/audit"
    missing = service.http.get(f"/v1/probes/{job}/audit/pairs")
    assert refusal(missing)[:2] == (409, "audit_without_pairs")
    # What failed leaves room for another.
    assert client.draw_audit(job, labels=50).state in ("queued", "running")
    deadline = time.monotonic() + 60
    while not client.audit(job).state.ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.delete(job)
    gone = service.http.get(f"/v1/probes/{job}/audit")
    assert refusal(gone)[:2] == (404, "job_not_found")


@pytest.mark.parametrize(
    "body", [{"labels": 1}, {"labels": 10**6}, {"checks": -1}, {"judge": ""}, {"pairs": 3}, [], "text"]
)
def test_requests_that_cannot_be_meant_are_refused(service, job, body):
    answer = service.http.post(f"/v1/probes/{job}/audit", json=body)
    assert refusal(answer)[:2] == (422, "request_invalid")
