"""A saved corpus comes back exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from probe_service.corpus import Corpus, load_corpus, save_corpus
from probe_service.errors import CorpusError
from tests.unit.corpus_files import jsonl, read, write


def assert_equal(one: Corpus, other: Corpus) -> None:
    for name in ("kind", "anchors", "positives", "negatives", "ids", "groups", "sources", "info"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.row_numbers.dtype == other.row_numbers.dtype == np.int64
    np.testing.assert_array_equal(one.row_numbers, other.row_numbers)
    if one.vectors is None:
        assert other.vectors is None
    else:
        assert other.vectors is not None
        assert one.vectors.tobytes() == other.vectors.tobytes()
        assert one.vectors.shape == other.vectors.shape


def corpora(folder: Path) -> list[Corpus]:
    vectors = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.save(folder / "v.npy", vectors)
    sentences = [{"text": "a", "group": None, "id": 1}, {"text": ""}, {"text": "c", "group": "g"}]
    tuples = [{"query": f"q{i}", "pos": ["p"], "neg": ["n"] * i, "source": "s"} for i in range(3)]
    return [
        read(write(folder, "a.txt", "one\nzwei ü\n𝔘\n".encode())),
        read(write(folder, "b.jsonl", jsonl(*sentences))),
        read(write(folder, "c.jsonl", jsonl(*tuples))),
        read(folder / "v.npy"),
    ]


def test_round_trip(tmp_path: Path) -> None:
    for number, corpus in enumerate(corpora(tmp_path)):
        folder = tmp_path / "deep" / str(number)
        save_corpus(corpus, folder)
        assert_equal(load_corpus(folder), corpus)
        assert len(list(folder.iterdir())) == 1


def test_saving_again_replaces(tmp_path: Path) -> None:
    first, second, *_ = corpora(tmp_path)
    save_corpus(first, tmp_path / "saved")
    save_corpus(second, tmp_path / "saved")
    assert_equal(load_corpus(tmp_path / "saved"), second)


def test_texts_that_utf8_cannot_hold_survive(tmp_path: Path) -> None:
    corpus = replace(corpora(tmp_path)[0], anchors=["a\ud800", "\udfff\ud800", "\0"])
    save_corpus(corpus, tmp_path / "saved")
    assert load_corpus(tmp_path / "saved").anchors == corpus.anchors


def test_nothing_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="corpus_not_saved"):
        load_corpus(tmp_path)
    save_corpus(corpora(tmp_path)[0], tmp_path / "saved")
    file = next((tmp_path / "saved").iterdir())
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CorpusError, match="corpus_not_saved"):
        load_corpus(tmp_path / "saved")


def test_a_failed_save_leaves_the_former_corpus(tmp_path: Path) -> None:
    first, second, *_ = corpora(tmp_path)
    save_corpus(first, tmp_path / "saved")
    with pytest.raises(ValueError, match="expected length 2 but got length 1"):
        save_corpus(replace(second, ids=["only one"]), tmp_path / "saved")
    assert_equal(load_corpus(tmp_path / "saved"), first)
