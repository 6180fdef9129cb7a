"""The audit from end to end at the command line: draw, label, apply; and all that can go wrong with labels."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from probe_service.audit import Audit, ItemKind, apply_audit
from probe_service.cli import _run
from probe_service.errors import InputError
from probe_service.judges import Answer, LabelStore, Sheet
from probe_service.schemas import AuditReport

ROWS, GROUPS = 240, 40
SIZES = "2,8,32,64"


def write_corpus(file, rows, group, vectors, *, groups_known=None):
    """Rows with texts, vectors made elsewhere and, for some, their group."""
    with file.open("w") as lines:
        for row in rows:
            fields = {"text": f"row {row} of meaning {group[row]}", "embedding": vectors[row].tolist()}
            if groups_known is not None:
                fields["group"] = str(group[row]) if groups_known[row] else None
            lines.write(json.dumps(fields) + "\n")


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(4)
    group = rng.integers(0, GROUPS, ROWS)
    centres = rng.standard_normal((GROUPS, 12))
    vectors = centres[group] + 0.7 * rng.standard_normal((ROWS, 12))
    return group, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).round(5)


@pytest.fixture(scope="module")
def true_shares(world):
    """S(N) from its definition, on random batches."""
    group, vectors = world
    rng = np.random.default_rng(1)
    shares = {}
    for size in (8, 32, 64):
        total = 0.0
        for _ in range(2000):
            rows = rng.choice(ROWS, size, replace=False)
            weights = np.exp(vectors[rows] @ vectors[rows].T / 0.05)
            np.fill_diagonal(weights, 0.0)
            same = group[rows][:, None] == group[rows][None, :]
            total += ((weights * same).sum(axis=1) / weights.sum(axis=1)).mean()
        shares[size] = total / 2000
    return shares


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def meaning(text):
    """The group that a text names, checks in other case and punctuation included."""
    return text.rstrip(".").lower().rsplit(" ", 1)[1]


def label_truly(file, judge="person"):
    sheet = Sheet.read(file)
    for question in sheet.open_questions:
        same = meaning(question.anchor) == meaning(question.candidate)
        sheet.record(question.id, Answer.YES if same else Answer.NO, judge)
    return sheet


@pytest.fixture(scope="module")
def drawn_once(world, tmp_path_factory):
    """One drawn and truly labelled audit; tests copy it."""
    folder = tmp_path_factory.mktemp("audit")
    group, vectors = world
    write_corpus(folder / "corpus.jsonl", range(ROWS), group, vectors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROBE_HOME", str(folder / "home"))
        arguments = ["--labels", "300", "--checks", "10", "--batch-sizes", SIZES]
        out = ["--out", str(folder / "pairs.jsonl")]
        assert _run(["audit", "draw", str(folder / "corpus.jsonl"), *arguments, *out]) == 0
    shutil.copy(folder / "pairs.jsonl", folder / "blind.jsonl")
    label_truly(folder / "pairs.jsonl")
    return folder


@pytest.fixture
def drawn(drawn_once, tmp_path, home):
    for name in ("corpus.jsonl", "pairs.jsonl", "pairs.audit.json"):
        shutil.copy(drawn_once / name, tmp_path / name)
    return tmp_path


def applied(folder, capsys, *more):
    capsys.readouterr()
    code = _run(
        ["audit", "apply", str(folder / "corpus.jsonl"), str(folder / "pairs.jsonl"), "--json", "-", *more]
    )
    printed = capsys.readouterr()
    return code, (AuditReport.model_validate_json(printed.out) if code == 0 else printed.err)


def test_true_labels_give_the_true_shares(drawn, capsys, true_shares):
    code, report = applied(drawn, capsys)
    assert code == 0
    found = {share.batch_size: share.estimate for share in report.shares}
    for size, truth in true_shares.items():
        assert found[size].low <= truth <= found[size].high
        assert found[size].high - found[size].low < 0.2
    assert report.judges == ["person"]
    assert report.labels.pairs_drawn == 300
    assert (report.labels.duplicates_accepted, report.labels.others_accepted) == (10, 0)
    assert report.labels.contradictions == report.warnings == []


def test_the_verdicts_and_n_max_follow_from_the_limits(drawn, capsys):
    _, report = applied(drawn, capsys, "--budget", "0.3")
    for share, verdict in zip(report.shares, report.verdicts, strict=True):
        assert (verdict.verdict == "fail") == (share.estimate.low > 0.3)
        assert (verdict.verdict == "pass") == (share.estimate.high <= 0.3)
    assert report.n_max.value is not None
    passing = max(share.batch_size for share in report.shares if share.estimate.high <= 0.3)
    assert passing <= report.n_max.value < 64


def test_the_same_labels_give_the_same_report(drawn, capsys):
    assert applied(drawn, capsys)[1] == applied(drawn, capsys)[1]


def test_the_sheet_is_blind(drawn_once):
    lines = (drawn_once / "blind.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {tuple(row) for row in rows} == {
        ("id", "question", "a", "known_positive_of_a", "b", "label", "judge")
    }
    assert {row["label"] for row in rows} == {None}
    audit = Audit.read(drawn_once / "pairs.audit.json")
    kinds = [item.kind for item in audit.items]
    assert [item.id for item in audit.items] == [row["id"] for row in rows]
    # Shuffled: no kind stands together at an end.
    assert len(set(kinds[:25])) > 1
    assert len(set(kinds[-25:])) > 1
    pairs = kinds.count(ItemKind.PAIR)
    assert kinds.count(ItemKind.REPEAT) == round(0.2 * pairs)
    assert kinds.count(ItemKind.DUPLICATE) == kinds.count(ItemKind.OTHER) == 10
    assert sum(len(item.draws) for item in audit.items) == 300


def test_repeats_show_the_same_texts_the_other_way_round(drawn_once):
    audit = Audit.read(drawn_once / "pairs.audit.json")
    questions = {question.id: question for question in Sheet.read(drawn_once / "blind.jsonl").questions}
    for item in audit.items:
        if item.kind is ItemKind.REPEAT:
            again, first = questions[item.id], questions[item.repeats]
            assert (again.anchor, again.candidate) == (first.candidate, first.anchor)


def test_an_audit_survives_json(drawn_once):
    audit = Audit.read(drawn_once / "pairs.audit.json")
    assert Audit.from_json(audit.to_json()) == audit
    for broken in ("", "{}", "[]", json.dumps({"version": 2}), audit.to_json()[:-200]):
        with pytest.raises(InputError) as caught:
            Audit.from_json(broken)
        assert caught.value.code == "audit_unreadable"


# ------------------------------------------------------------------------------------------------------------ bad labels


def rewritten(folder, change):
    """Rewrite each row of the sheet by `change`; None drops it."""
    file = folder / "pairs.jsonl"
    rows = [change(n, json.loads(line)) for n, line in enumerate(file.read_text().splitlines())]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))


def test_labels_for_other_pairs_are_refused(drawn, capsys):
    rewritten(drawn, lambda n, row: {**row, "id": f"other-{n}"} if n == 4 else row)
    code, said = applied(drawn, capsys)
    assert code == 2
    assert "[audit_labels_foreign]" in said
    assert "row 5" in said


def test_changed_texts_are_refused(drawn, capsys):
    rewritten(drawn, lambda n, row: {**row, "b": "another text"} if n in (2, 9) else row)
    code, said = applied(drawn, capsys)
    assert (code, "[audit_labels_foreign]" in said, "2 rows in all" in said) == (2, True, True)


@pytest.mark.parametrize(
    "change",
    [
        lambda n, row: None if n in (3, 8) else row,
        lambda n, row: {**row, "label": None} if n in (3, 8) else row,
    ],
    ids=["rows left out", "labels left out"],
)
def test_missing_labels_are_refused(drawn, capsys, change):
    rewritten(drawn, change)
    code, said = applied(drawn, capsys)
    assert code == 2
    assert "[audit_labels_incomplete]" in said
    assert "2 " in said


def test_another_corpus_is_refused(drawn, capsys):
    lines = (drawn / "corpus.jsonl").read_text().splitlines()
    (drawn / "corpus.jsonl").write_text("\n".join(lines[1:]) + "\n")
    code, said = applied(drawn, capsys)
    assert (code, "[audit_corpus_changed]" in said) == (2, True)


def test_a_sheet_without_its_private_half_is_refused(drawn, capsys):
    (drawn / "pairs.audit.json").unlink()
    code, said = applied(drawn, capsys)
    assert (code, "[audit_unreadable]" in said) == (2, True)


def test_labels_against_certain_evidence_are_counted_and_correct_the_estimate(drawn, capsys):
    _, before = applied(drawn, capsys)
    audit = Audit.read(drawn / "pairs.audit.json")
    others = [item.id for item in audit.items if item.kind is ItemKind.OTHER][:2]
    rewritten(drawn, lambda n, row: {**row, "label": "yes"} if row["id"] in others else row)
    code, report = applied(drawn, capsys)
    assert code == 0
    assert sorted(report.labels.contradictions) == sorted(others)
    assert [warning.code for warning in report.warnings] == ["audit_labels_contradict_evidence"]
    at = [share.batch_size for share in report.shares].index(32)
    value = before.shares[at].estimate.value
    # Two of ten certain others accepted: (S − .2)/(1 − .2).
    assert report.shares[at].estimate.value == pytest.approx((value - 0.2) / 0.8)
    assert report.shares[at].estimate.low < before.shares[at].estimate.low


def test_all_unsure_says_nothing_and_says_so(drawn, capsys):
    rewritten(drawn, lambda n, row: {**row, "label": "unsure"})
    code, report = applied(drawn, capsys)
    assert code == 0
    assert "audit_all_unsure" in [warning.code for warning in report.warnings]
    for share in report.shares:
        assert share.estimate is None or (share.estimate.low, share.estimate.high) == (0.0, 1.0)


def test_inconsistent_answers_are_counted(drawn, capsys):
    audit = Audit.read(drawn / "pairs.audit.json")
    repeat = next(item.id for item in audit.items if item.kind is ItemKind.REPEAT)
    rewritten(
        drawn,
        lambda n, row: (
            {**row, "label": "no" if row["label"] == "yes" else "yes"} if row["id"] == repeat else row
        ),
    )
    _, report = applied(drawn, capsys)
    assert report.labels.repeats_answered_differently == 1


def test_a_sheet_with_labels_is_not_overwritten(drawn, capsys):
    before = (drawn / "pairs.jsonl").read_bytes()
    code = _run(
        ["audit", "draw", str(drawn / "corpus.jsonl"), "--labels", "10", "--out", str(drawn / "pairs.jsonl")]
    )
    assert (code, "[audit_sheet_exists]" in capsys.readouterr().err) == (2, True)
    assert (drawn / "pairs.jsonl").read_bytes() == before


# ---------------------------------------------------------------------------------------------------- judged by a model


class TrueJudge(BaseHTTPRequestHandler):
    """A chat endpoint that knows the meanings; 401 while `down` is set."""

    down = False

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = json.loads(body["messages"][1]["content"])
        word = "yes" if meaning(shown["a"]) == meaning(shown["b"]) else "no"
        content = json.dumps({"choices": [{"message": {"content": word}}]}).encode()
        self.send_response(401 if TrueJudge.down else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def judge_url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), TrueJudge)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_chat_model_labels_the_sheet(drawn, drawn_once, capsys, judge_url, monkeypatch):
    shutil.copy(drawn_once / "blind.jsonl", drawn / "pairs.jsonl")
    command = ["audit", "judge", str(drawn / "pairs.jsonl"), "--judge", f"chat:m@{judge_url}"]
    monkeypatch.setattr(TrueJudge, "down", True)
    assert _run([*command, "--price-per-million", "2.5"]) == 4
    said = capsys.readouterr().err
    questions = len(Sheet.read(drawn / "pairs.jsonl").questions)
    assert f"{questions} calls, about " in said
    assert "[judge_refused]" in said
    monkeypatch.setattr(TrueJudge, "down", False)
    assert _run(command) == 0
    code, report = applied(drawn, capsys)
    assert code == 0
    assert report.judges == [f"chat:m@{judge_url}"]
    assert report.labels.contradictions == []


# --------------------------------------------------------------------------------------------------- evidence and growth


def test_labels_are_used_again_when_the_corpus_grows(world, tmp_path, home, capsys):
    group, vectors = world
    write_corpus(tmp_path / "old.jsonl", range(60), group, vectors)
    write_corpus(tmp_path / "new.jsonl", range(80), group, vectors)
    draw = ["--labels", "300", "--checks", "5", "--batch-sizes", "8,32"]
    assert (
        _run(["audit", "draw", str(tmp_path / "old.jsonl"), *draw, "--out", str(tmp_path / "old.csv")]) == 0
    )
    label_truly(tmp_path / "old.csv")
    assert _run(["audit", "apply", str(tmp_path / "old.jsonl"), str(tmp_path / "old.csv")]) == 0
    capsys.readouterr()
    assert (
        _run(["audit", "draw", str(tmp_path / "new.jsonl"), *draw, "--out", str(tmp_path / "new.csv")]) == 0
    )
    sheet = Sheet.read(tmp_path / "new.csv")
    audit = Audit.read(tmp_path / "new.audit.json")
    pairs = {item.id for item in audit.items if item.kind is ItemKind.PAIR}
    assert 0.2 < len(sheet.answers) / len(pairs) < 1.0
    assert set(sheet.answers) <= pairs
    for question in sheet.questions:
        if question.id in sheet.answers:
            same = meaning(question.anchor) == meaning(question.candidate)
            assert sheet.answers[question.id] is (Answer.YES if same else Answer.NO)


def test_groups_answer_what_they_can_and_the_labels_the_rest(world, tmp_path, home, capsys, true_shares):
    group, vectors = world
    known = np.random.default_rng(2).random(ROWS) < 0.6
    write_corpus(tmp_path / "corpus.jsonl", range(ROWS), group, vectors, groups_known=known)
    draw = ["--labels", "300", "--checks", "10", "--batch-sizes", "8,32,64"]
    out = ["--out", str(tmp_path / "pairs.jsonl")]
    assert _run(["audit", "draw", str(tmp_path / "corpus.jsonl"), *draw, *out]) == 0
    audit = Audit.read(tmp_path / "pairs.audit.json")
    for pair in audit.design.pairs:
        assert not (known[pair.anchor] and known[pair.candidate])
    assert {item.source for item in audit.items if item.kind is ItemKind.OTHER} == {"their groups differ"}
    label_truly(tmp_path / "pairs.jsonl")
    code, report = applied(tmp_path, capsys)
    assert code == 0
    for share in report.shares:
        truth = true_shares[share.batch_size]
        assert share.estimate.low <= truth <= share.estimate.high
        # Both of a pair have a group with probability .36.
        assert share.unjudged_share == pytest.approx(0.64, abs=0.1)
        assert 0 < share.known_share < truth


def test_with_all_groups_there_is_nothing_to_ask(world, tmp_path, home, capsys):
    group, vectors = world
    write_corpus(tmp_path / "corpus.jsonl", range(ROWS), group, vectors, groups_known=np.ones(ROWS, bool))
    code = _run(["audit", "draw", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "pairs.jsonl")])
    assert (code, "[audit_nothing_to_ask]" in capsys.readouterr().err) == (2, True)


def test_a_label_store_keeps_the_corpus(drawn, capsys, home):
    applied(drawn, capsys)
    audit = Audit.read(drawn / "pairs.audit.json")
    store = LabelStore(home / "labels.sqlite")
    pairs = [item for item in audit.items if item.kind is ItemKind.PAIR]
    assert len(store.find([item.digest for item in pairs], "person")) == len(pairs)


def test_estimates_are_refused_where_labels_are_worth_too_little(drawn_once):
    audit = Audit.read(drawn_once / "pairs.audit.json")
    few = dataclasses.replace(audit.design, pairs=audit.design.pairs[:40])
    items = tuple(
        dataclasses.replace(item, draws=tuple(d for d in item.draws if d < 40)) for item in audit.items
    )
    report = apply_audit(
        dataclasses.replace(audit, design=few, items=items), Sheet.read(drawn_once / "pairs.jsonl")
    )
    assert all(share.estimate is None and "below 50" in share.reason for share in report.shares)
    assert {verdict.verdict for verdict in report.verdicts} == {"inconclusive"}
    assert report.n_max.value is None
