"""What counts as equal, what is left out and listed, which column plays which part."""

from __future__ import annotations

import gzip
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.corpus import normalize_text
from probe_service.corpus.equality import DuplicateTally, RepeatCounter, fold_normalized, normalize_texts
from probe_service.schemas import CorpusKind
from tests.unit.corpus_files import jsonl, read, write

DIRTY = st.text(
    st.sampled_from("aAéE\u0301ßſK\u212a \t\n\u00a0\u2003\u3000\u0345\u1fb3|\x1f\u200b"), max_size=12
)


@pytest.mark.parametrize(
    ("text", "normal", "folded"),
    [
        ("plain text", "plain text", "plain text"),
        ("  Two\t\nLines ", "Two Lines", "two lines"),
        ("Cafe\u0301", "Caf\u00e9", "caf\u00e9"),
        ("no\u00a0break\u3000space", "no break space", "no break space"),
        ("Straße", "Straße", "strasse"),
        ("ΑΣ", "ΑΣ", "ας".replace("ς", "σ")),
        ("\u212a", "K", "k"),
        (" \u2003\n", "", ""),
        ("ﬁne", "ﬁne", "fine"),
        ("zero\u200bwidth", "zero\u200bwidth", "zero\u200bwidth"),
    ],
)
def test_normal_forms(text: str, normal: str, folded: str) -> None:
    assert normalize_text(text) == normal
    assert normalize_text(text, case_fold=True) == folded


@settings(deadline=None)
@given(DIRTY | st.text())
def test_normalising_is_what_its_docstring_says_and_happens_once(text: str) -> None:
    normal = normalize_text(text)
    assert normal == " ".join(unicodedata.normalize("NFC", text).split())
    assert normalize_text(normal) == normal
    folded = normalize_text(text, case_fold=True)
    assert normalize_text(folded, case_fold=True) == folded
    caseless = unicodedata.normalize("NFD", text).casefold()
    assert folded == " ".join(unicodedata.normalize("NFC", caseless).split())


@settings(deadline=None)
@given(st.lists(DIRTY, max_size=100) | st.lists(st.text(st.sampled_from("aB |"), max_size=4), max_size=100))
def test_normalising_many_texts_is_normalising_each(texts: list[str]) -> None:
    assert normalize_texts(texts) == [normalize_text(text) for text in texts]
    assert fold_normalized(normalize_texts(texts)) == [normalize_text(text, case_fold=True) for text in texts]


def test_duplicates_at_three_levels(tmp_path: Path) -> None:
    texts = ["Reset it", "reset it", "Reset  it", "Reset it", "other", " Reset it", "OTHER", "third"]
    duplicates = read(write(tmp_path, "a.jsonl", jsonl(*({"text": text} for text in texts)))).info.duplicates
    assert duplicates.exact == 1  # row 4
    assert duplicates.normalized == 3  # rows 3, 4, 6
    assert duplicates.case_folded == 5  # and rows 2, 7
    assert duplicates.rows == [3, 4, 6]


def test_a_pair_repeats_when_both_sides_do(tmp_path: Path) -> None:
    pairs = [("q", "a"), ("q", "b"), ("Q", "A"), ("q ", "a"), ("a", "q"), ("q", "a")]
    content = jsonl(*({"anchor": anchor, "positive": positive} for anchor, positive in pairs))
    duplicates = read(write(tmp_path, "a.jsonl", content)).info.duplicates
    assert (duplicates.exact, duplicates.normalized, duplicates.case_folded) == (1, 2, 3)
    assert duplicates.rows == [4, 6]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40), max_size=200), st.integers(1, 30), st.integers(1, 17))
def test_counting_in_files_agrees_with_a_set(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], buffered_rows: int, step: int
) -> None:
    counter = RepeatCounter(tmp_path_factory.mktemp("counter"), "keys", buffered_rows=buffered_rows)
    digests = np.array([key * 0x9E3779B97F4A7C15 % 2**64 for key in keys], np.uint64)
    for start in range(0, len(keys), step):
        numbers = np.arange(start + 1, min(start + step, len(keys)) + 1)
        counter.add(digests[start : start + step], numbers)
    seen: set[int] = set()
    expected = [number for number, key in enumerate(keys, 1) if key in seen or seen.add(key)]
    repeats = counter.finish()
    assert repeats.rows == expected
    assert repeats.repeats == len(expected)
    assert repeats.distinct == len(seen)


def test_a_thousand_repeats_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    content = b"same\n" * 2500 + b"other\n"
    info = read(write(tmp_path, "a.txt", content)).info
    assert info.duplicates.normalized == 2499
    assert info.duplicates.rows == list(range(2, 1002))


def test_the_tally_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tally = DuplicateTally(buffered_rows=2)
    tally.add("exact", ["a", "b", "a"], np.arange(3))
    assert [path.name for path in tmp_path.glob("*/*")]
    tally.close()
    assert not list(tmp_path.iterdir())


def test_rows_left_out_are_counted_and_listed(tmp_path: Path) -> None:
    content = jsonl(
        {"text": "a"}, {"text": " \t"}, {"text": None}, {}, {"text": 5}, {"text": ["b"]}, {"text": "c"}
    )
    corpus = read(write(tmp_path, "a.jsonl", content + b"\n" + b'{"text": "d"}\n'))
    assert corpus.anchors == ["a", "c", "d"]
    assert corpus.row_numbers.tolist() == [1, 7, 9]
    assert [(e.reason, e.count, e.rows) for e in corpus.info.excluded] == [
        ("blank", 2, [2, 8]),
        ("not_a_string", 2, [5, 6]),
        ("null", 2, [3, 4]),
    ]
    assert corpus.info.rows_read == 9


def test_blank_lines_of_txt_and_csv_are_rows_left_out(tmp_path: Path) -> None:
    for name, content in {"a.txt": b"one\n\ntwo\n  \n", "a.csv": b"text\none\n\ntwo\n  \n"}.items():
        corpus = read(write(tmp_path, name, content))
        assert corpus.row_numbers.tolist() == [1, 3], name
        assert [(e.reason, e.rows) for e in corpus.info.excluded] == [("blank", [2, 4])], name


def test_a_pair_is_left_out_for_its_first_bad_side(tmp_path: Path) -> None:
    content = jsonl(
        {"anchor": "a", "positive": "b"},
        {"anchor": "", "positive": None},
        {"anchor": "c", "positive": None},
        {"anchor": "d", "positive": {"no": "text"}},
        {"anchor": "e", "positive": "f"},
    )
    corpus = read(write(tmp_path, "a.jsonl", content))
    assert corpus.anchors == ["a", "e"]
    assert [(e.reason, e.rows) for e in corpus.info.excluded] == [
        ("blank", [2]),
        ("not_a_string", [4]),
        ("null", [3]),
    ]


def test_the_filter_counts_what_it_sets_aside(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "split": "train", "n": 1},
        {"text": "b", "split": "test", "n": 1},
        {"text": "", "split": "test", "n": 1},
        {"text": "c", "split": "train", "n": True},
        {"text": "d", "split": "train", "n": 1},
        {"text": "", "split": "train", "n": 1},
        {"text": "e", "n": 1},
    ]
    corpus = read(write(tmp_path, "a.jsonl", jsonl(*rows)), where={"split": "train", "n": "1"})
    assert corpus.anchors == ["a", "d"]
    info = corpus.info
    assert (info.rows_read, info.rows_filtered_out, info.rows_usable) == (7, 4, 2)
    assert [(e.reason, e.rows) for e in info.excluded] == [("blank", [6])]


def test_groups_sources_and_ids_of_any_scalar_type(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "group": 1, "source": "x", "id": 10},
        {"text": "b", "group": "1", "source": None, "id": None},
        {"text": "c", "group": None, "id": "z"},
        {"text": "d", "group": True, "source": "x", "id": 1.5},
        {"text": "e", "group": "", "source": "y", "id": "w"},
    ]
    corpus = read(write(tmp_path, "a.jsonl", jsonl(*rows)))
    assert corpus.groups == ["1", "1", None, "true", None]
    assert corpus.sources == ["x", "(none)", "(none)", "x", "y"]
    assert corpus.ids == ["10", "", "z", "1.5", "w"]
    assert (corpus.info.groups, corpus.info.rows_without_group) == (2, 2)
    assert corpus.info.sources == {"(none)": 2, "x": 2, "y": 1}


def test_sources_beyond_a_thousand_are_counted_together(tmp_path: Path) -> None:
    content = jsonl(*({"text": f"t{i}", "source": f"s{i}"} for i in range(1200)))
    sources = read(write(tmp_path, "a.jsonl", content)).info.sources
    assert sources is not None
    assert len(sources) == 1001
    assert sources["(other)"] == 200
    assert sum(sources.values()) == 1200


def test_a_label_is_a_group_only_if_the_user_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", jsonl({"text": "a", "label": "x"}, {"text": "b", "label": "x"}))
    corpus = read(path)
    assert corpus.groups is None
    assert corpus.info.columns.label == "label"
    assert read(path, label_is_meaning=True).groups == ["x", "x"]
    assert read(path, {"group": "label"}).groups == ["x", "x"]


@pytest.mark.parametrize(
    ("columns", "kind", "anchor", "positive"),
    [
        (("text",), CorpusKind.SENTENCES, "text", None),
        (("Text", "ID"), CorpusKind.SENTENCES, "Text", None),
        (("sentence", "label"), CorpusKind.SENTENCES, "sentence", None),
        (("utterance", "intent_id", "id"), None, None, None),
        (("utterance", "id", "label"), CorpusKind.SENTENCES, "utterance", None),
        (("question", "answer"), CorpusKind.PAIRS, "question", "answer"),
        (("query", "passage", "id"), CorpusKind.PAIRS, "query", "passage"),
        (("sentence1", "sentence2"), CorpusKind.PAIRS, "sentence1", "sentence2"),
        (("text", "positive"), CorpusKind.PAIRS, "text", "positive"),
        (("query", "positive", "answer"), CorpusKind.PAIRS, "query", "positive"),
        (("anchor", "positive", "negative"), CorpusKind.TUPLES, "anchor", "positive"),
        (("anchor", "query", "pos", "hard_negative_1"), CorpusKind.TUPLES, "anchor", "pos"),
        (("title", "text", "cluster", "source"), CorpusKind.SENTENCES, "text", None),
        (("answer",), CorpusKind.SENTENCES, "answer", None),
    ],
)
def test_roles_from_names(
    tmp_path: Path,
    columns: tuple[str, ...],
    kind: CorpusKind | None,
    anchor: str | None,
    positive: str | None,
) -> None:
    path = write(tmp_path, "a.jsonl", jsonl(*({name: f"{name} {i}" for name in columns} for i in range(3))))
    if kind is None:
        with pytest.raises(Exception, match="corpus_column_missing"):
            read(path)
        return
    info = read(path).info
    assert info.kind is kind
    assert info.columns_inferred
    assert (info.columns.anchor or info.columns.text) == anchor
    assert info.columns.positive == positive


@pytest.mark.parametrize(
    ("columns", "fields", "kind", "anchors"),
    [
        ({"text": "question"}, {}, CorpusKind.SENTENCES, ["q1", "q2"]),
        ({"text": "answer"}, {}, CorpusKind.SENTENCES, ["a1", "a2"]),
        ({"anchor": "answer", "positive": "question"}, {}, CorpusKind.PAIRS, ["a1", "a2"]),
        ({"negatives": ("wrong",)}, {}, CorpusKind.TUPLES, ["q1", "q2"]),
        ({}, {"kind": "sentences"}, CorpusKind.SENTENCES, ["q1", "q2"]),
        ({}, {"kind": "embeddings"}, CorpusKind.EMBEDDINGS, ["q1", "q2"]),
        ({"anchor": "question", "positive": "answer"}, {"kind": "pairs"}, CorpusKind.PAIRS, ["q1", "q2"]),
    ],
)
def test_overrides_win(
    tmp_path: Path, columns: dict[str, Any], fields: dict[str, Any], kind: CorpusKind, anchors: list[str]
) -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}", "wrong": f"w{i}"} for i in (1, 2)]
    if fields.get("kind") == "embeddings":
        rows = [{**row, "vector": [1.0, float(i)]} for i, row in enumerate(rows)]  # type: ignore[dict-item]
    corpus = read(write(tmp_path, "a.jsonl", jsonl(*rows)), columns, **fields)
    assert corpus.kind is kind
    assert corpus.anchors == anchors
    if len(columns) == 2 or columns.get("text"):
        assert not corpus.info.columns_inferred


def test_judged_pairs_are_read_once_the_user_says_which_rows_are_positives(tmp_path: Path) -> None:
    rows = [{"sentence1": f"a{i}", "sentence2": f"b{i}", "label": i % 2} for i in range(6)]
    path = write(tmp_path, "a.jsonl", jsonl(*rows))
    assert read(path, where={"label": "1"}).anchors == ["a1", "a3", "a5"]
    assert len(read(path, {"anchor": "sentence1", "positive": "sentence2"})) == 6


# ---------------------------------------------------------------------------------------------------- natural dirt


def independent_repeats(texts: list[str]) -> int:
    """As the corpora's own description counts: case folded, NFKC, white space collapsed."""
    keys = [" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts]
    return len(keys) - len(set(keys))


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("labels/banking77", 12),
        ("labels/snips", 271),
        ("corpora/abc_news", 54),
        ("clusters/flickr8k_captions", 285),
    ],
)
def test_natural_duplicates(labelled_corpora: Path, name: str, described: int) -> None:
    path = labelled_corpora / f"{name}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        texts = [json.loads(line)["text"] for line in file]
    info = read(path, sample_size=10).info
    assert info.rows_usable == len(texts)
    assert info.duplicates.case_folded == independent_repeats(texts) == described


def test_natural_blanks_and_topics(labelled_corpora: Path) -> None:
    documents = read(labelled_corpora / "retrieval/cranfield_docs.jsonl.gz", max_row_bytes=100_000).info
    assert [(e.reason, e.count) for e in documents.excluded] == [("blank", 2)]
    banking = read(
        labelled_corpora / "labels/banking77.jsonl.gz", where={"split": "train"}, label_is_meaning=True
    ).info
    assert (banking.rows_read, banking.rows_filtered_out, banking.rows_usable) == (13083, 3080, 10003)
    assert banking.groups == 77
