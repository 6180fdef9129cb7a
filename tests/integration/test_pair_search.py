"""Every pair above a similarity, through the command line: from all pairs, and through an index with its recall."""

from __future__ import annotations

import json

import numpy as np
import pytest

from probe_service.cli import _run
from tests.oracles import unit_rows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One cache of vectors for all of them."""
    return tmp_path_factory.mktemp("pairs")


def listed(home, monkeypatch, capsys, corpus, *arguments, exact_up_to):
    """The report and the listed pairs of one run."""
    monkeypatch.setenv("PROBE_HOME", str(home / "home"))
    monkeypatch.setenv("PROBE_EXACT_PAIRS_UP_TO", str(exact_up_to))
    file = home / "pairs.jsonl"
    assert (
        _run(["run", str(corpus), "--batch-sizes", "4", "--pairs", str(file), "--json", "-", *arguments]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert report["pair_search"]["pairs"] == len(lines)
    assert report["pairs"] == lines[:20]
    assert [line["rank"] for line in lines] == list(range(1, len(lines) + 1))
    return report, lines


def by_rows(lines):
    return {(line["row"], line["other_row"]): line for line in lines}


def test_the_index_lists_the_pairs_of_a_labelled_corpus_within_its_recall(
    labelled_corpora, home, monkeypatch, capsys
):
    corpus = labelled_corpora / "labels" / "banking77.jsonl.gz"
    asked = ["--encoder", "minilm", "--label-is-meaning", "--max-rows", "600", "--pairs-above", "0.75"]
    exact, truth = listed(home, monkeypatch, capsys, corpus, *asked, exact_up_to=600)
    near, found = listed(home, monkeypatch, capsys, corpus, *asked, exact_up_to=599)
    assert exact["pair_search"]["recall"] is None
    assert near["pair_search"]["index"] == "ivf"
    assert near["pair_search"]["at_least"] == exact["pair_search"]["at_least"] == 0.75
    assert len(truth) > 50
    assert all(line["similarity"] >= 0.75 for line in truth)
    truth, found = by_rows(truth), by_rows(found)
    assert set(found) <= set(truth)
    for rows, line in found.items():
        assert line["similarity"] == pytest.approx(truth[rows]["similarity"], abs=1e-12)
        assert line | {"rank": 0, "similarity": 0} == truth[rows] | {"rank": 0, "similarity": 0}
    assert {line["known_false_negative"] for line in found.values()} == {True, False}
    recall = near["pair_search"]["recall"]
    assert recall["listed"]["low"] <= len(found) / len(truth) <= recall["listed"]["high"]
    assert 50 < recall["rows_with_pairs"] < recall["rows"] <= 600
    # Without the block that says how, the two reports are the same.
    for report in (exact, near):
        del report["pair_search"], report["run"], report["timings"]
    assert exact | {"pairs": []} == near | {"pairs": []}


def test_what_an_index_misses_shows_in_its_recall(home, monkeypatch, capsys):
    # Nothing about these rows is clustered: the worst case for an index of cells.
    rows = unit_rows(np.random.default_rng(6), 3_000, 48)
    np.save(home / "rows.npy", rows)
    similarity = np.triu(rows.astype(np.float64) @ rows.astype(np.float64).T, 1)
    at_least = float(np.sort(similarity, axis=None)[-4_000]) - 1e-9
    truth = {(int(i) + 1, int(j) + 1) for i, j in zip(*np.nonzero(similarity >= at_least), strict=True)}
    report, found = listed(
        home, monkeypatch, capsys, home / "rows.npy", "--pairs-above", repr(at_least), exact_up_to=0
    )
    found = by_rows(found)
    assert set(found) < truth
    missed = np.zeros(3_001)
    for row, other in truth - set(found):
        missed[[row, other]] += 1
    pairs = np.bincount(np.array(sorted(truth)).ravel(), minlength=3_001)
    having = pairs > 0
    recall = report["pair_search"]["recall"]
    by_row = 1 - float((missed[having] / pairs[having]).mean())
    assert recall["listed"]["low"] <= by_row <= recall["listed"]["high"] < 1
    assert 0.5 < recall["nearest"]["value"] < 1
    assert (
        f"{recall['pairs_listed']:,} of {recall['pairs']:,} in all." in report["pair_search"]["description"]
    )


def test_the_summary_says_how_pairs_were_found(home, monkeypatch, capsys):
    np.save(home / "rows.npy", unit_rows(np.random.default_rng(6), 100, 8))
    monkeypatch.setenv("PROBE_HOME", str(home / "home"))
    assert _run(["run", str(home / "rows.npy"), "--batch-sizes", "4", "--pairs-above", "0.9"]) == 0
    said = capsys.readouterr().out
    assert "Each of the 100 encoded rows was compared with every other one." in said
    assert _run(["run", str(home / "rows.npy"), "--batch-sizes", "4", "--pairs-above", "1.5"]) == 2
    assert "pairs_above" in capsys.readouterr().err
