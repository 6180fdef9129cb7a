"""The sheet keeps every answer at once, in jsonl and csv, and refuses what it cannot read."""

from __future__ import annotations

import csv
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.errors import InputError
from probe_service.judges import Answer, LabelStore, Question, Sheet, question_digest

QUESTIONS = [
    Question("q1", "How old are you?", None, "What is your age?"),
    Question("q2", 'He said "no", twice;\nthen left', None, "=SUM(A1)"),
    Question("q3", "\ttabs and 雪", None, "plain"),
]


@pytest.fixture(params=["pairs.jsonl", "pairs.csv"])
def file(request, tmp_path):
    return tmp_path / request.param


def test_a_sheet_is_read_back_as_it_was_written(file):
    sheet = Sheet(file, QUESTIONS, {})
    sheet.write()
    sheet.record("q2", Answer.NO, "person")
    back = Sheet.read(file)
    assert list(back.questions) == QUESTIONS
    assert back.answers == {"q2": Answer.NO}
    assert [question.id for question in back.open_questions] == ["q1", "q3"]


def test_the_known_positive_is_shown_for_pairs(file):
    sheet = Sheet(file, [Question("q1", "who?", "Ada did", "Bob did")], {})
    sheet.write()
    assert Sheet.read(file).questions[0].positive == "Ada did"
    assert "Ada did" in file.read_text("utf-8-sig")


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: "\0" not in t)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(text, min_size=2, max_size=6), suffix=st.sampled_from([".jsonl", ".csv"]))
def test_any_texts_survive(tmp_path_factory, texts, suffix):
    file = tmp_path_factory.mktemp("sheet") / f"pairs{suffix}"
    questions = [Question(f"q{n}", a, None, b) for n, (a, b) in enumerate(itertools.pairwise(texts))]
    Sheet(file, questions, {}).write()
    assert list(Sheet.read(file).questions) == questions


@pytest.mark.parametrize(
    ("label", "answer"),
    [("yes", "yes"), ("Y", "yes"), (" NO ", "no"), ("0", "no"), ("?", "unsure"), ("Unsure", "unsure")],
)
def test_labels_are_read_as_people_write_them(tmp_path, label, answer):
    file = tmp_path / "pairs.csv"
    file.write_text(f"id,a,b,label\nq1,x,y,{label}\n", "utf-8")
    assert Sheet.read(file).answers == {"q1": Answer(answer)}


def test_json_values_are_read_as_labels(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [("q1", True), ("q2", 0), ("q3", None), ("q4", "")]
    file.write_text("".join(json.dumps({"id": i, "a": "x", "b": "y", "label": v}) + "\n" for i, v in rows))
    assert Sheet.read(file).answers == {"q1": Answer.YES, "q2": Answer.NO}


def test_a_spreadsheet_may_save_semicolons_a_mark_and_further_columns(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("﻿id;a;b;label;remark\nq1;x;y;yes;sure\n", "utf-8")
    assert Sheet.read(file).answers == {"q1": Answer.YES}


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("pairs.csv", b"id,a,b,label\nq1,x,y,perhaps not\n", "audit_label_unknown"),
        ("pairs.csv", b"id,a,label\nq1,x,yes\n", "audit_sheet_unreadable"),
        ("pairs.csv", b"id,a,b,label\n", "audit_sheet_unreadable"),
        ("pairs.csv", b"id,a,b,label\nq1,x,y,yes\nq1,x,y,no\n", "audit_labels_foreign"),
        ("pairs.csv", "id,a,b\nq1,caf\xe9,y\n".encode("latin-1"), "audit_sheet_unreadable"),
        ("pairs.jsonl", b'{"id": "q1", "a": "x"', "audit_sheet_unreadable"),
        ("pairs.jsonl", b"[1, 2]\n", "audit_sheet_unreadable"),
        ("pairs.jsonl", b"", "audit_sheet_unreadable"),
        ("pairs.xlsx", b"", "audit_sheet_unreadable"),
    ],
)
def test_what_is_no_sheet_is_refused(tmp_path, name, content, code):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        Sheet.read(tmp_path / name)
    assert caught.value.code == code


def test_an_unknown_label_is_located(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("id,a,b,label\nq1,x,y,yes\nq2,x,y,nope\n")
    with pytest.raises(InputError) as caught:
        Sheet.read(file)
    assert (caught.value.row, caught.value.column) == (2, "label")


def test_csv_is_what_a_csv_reader_reads(tmp_path):
    file = tmp_path / "pairs.csv"
    Sheet(file, QUESTIONS, {"q1": (Answer.YES, "person")}).write()
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows[0]["label"] == "yes"
    assert rows[1]["a"] == QUESTIONS[1].anchor


def test_no_spreadsheet_takes_a_text_for_a_formula(tmp_path):
    file = tmp_path / "pairs.csv"
    texts = ["=1+1", "'=1+1", "''@x", "-5 degrees", "'quoted'", "plain"]
    questions = [Question(f"q{n}", text, None, "b") for n, text in enumerate(texts)]
    Sheet(file, questions, {}).write()
    with file.open(encoding="utf-8-sig", newline="") as lines:
        cells = [row["a"] for row in csv.DictReader(lines)]
    assert not any(cell[0] in "=+-@\t\r" for cell in cells)
    assert [question.anchor for question in Sheet.read(file).questions] == texts


def test_nothing_but_the_sheet_is_left_behind(file):
    sheet = Sheet(file, QUESTIONS, {})
    sheet.record("q1", Answer.YES, "person")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with pytest.raises(KeyError):
        sheet.record("q9", Answer.YES, "person")


def test_digests_know_order_only_where_it_matters():
    def fold(text):
        return text.lower()

    a, b = Question("1", "One", None, "two"), Question("2", "TWO", None, "one")
    assert question_digest(a, fold) == question_digest(b, fold)
    assert question_digest(a, str) != question_digest(b, str)
    with_positive = Question("3", "one", "first", "two")
    assert question_digest(with_positive, fold) != question_digest(Question("4", "two", "first", "one"), fold)
    assert question_digest(with_positive, fold) != question_digest(
        Question("5", "one", "second", "two"), fold
    )


def test_labels_are_found_again_for_the_same_judge_only(tmp_path):
    store = LabelStore(tmp_path / "home" / "labels.sqlite")
    store.keep({"d1": (Answer.YES, "person"), "d2": (Answer.NO, "chat:m@u")}, "corpus-1")
    store.keep({"d1": (Answer.UNSURE, "person")}, "corpus-2")
    again = LabelStore(tmp_path / "home" / "labels.sqlite")
    assert again.find(["d1", "d2", "d3"], "person") == {"d1": Answer.UNSURE}
    assert again.find(["d1", "d2"], "chat:m@u") == {"d2": Answer.NO}
    assert again.find([f"d{n}" for n in range(2000)], "person") == {"d1": Answer.UNSURE}
