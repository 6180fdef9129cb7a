"""The search for the most similar pairs: exact, through an index, cut off; and how its recall is estimated."""

from __future__ import annotations

import numpy as np
import pytest

from probe_service.measure import pair_search
from probe_service.measure.pair_search import _recall, search_pairs
from tests.oracles import negative_pairs, unit_rows


def search(rows, at_least=None, *, exact_up_to=10**9):
    return search_pairs(
        rows, None, at_least=at_least, exact_up_to=exact_up_to, seed=0, checkpoint=lambda: None
    )


@pytest.fixture(scope="module")
def rows():
    """Sixty rows, of which each of the first twenty has a twin; 0.6 and 0.8 are cosines to the last bit."""
    spread = unit_rows(np.random.default_rng(0), 40, 4)
    return np.concatenate([spread, spread[:20]])


@pytest.mark.parametrize("exact_up_to", [60, 59])
@pytest.mark.parametrize("at_least", [None, -1.0, 0.5, 0.999, 1.0])
def test_what_is_listed_is_what_brute_force_finds(rows, at_least, exact_up_to):
    pairs, how = search(rows, at_least, exact_up_to=exact_up_to)
    truth = sorted(negative_pairs(rows), key=lambda pair: (-round(pair[0], 12), pair[1], pair[2]))
    truth = truth[:1000] if at_least is None else [pair for pair in truth if pair[0] >= at_least]
    np.testing.assert_allclose(pairs.similarity, [s for s, _, _ in truth], atol=1e-12)
    assert set(zip(pairs.anchor.tolist(), pairs.candidate.tolist(), strict=True)) == {
        (i, j) for _, i, j in truth
    }
    assert (how.rows, how.at_least, how.pairs, how.truncated) == (60, at_least, len(truth), False)
    if exact_up_to == 60:
        assert (how.index, how.recall) == (None, None)
        assert "compared with every other one" in how.description
    else:
        # 40 different vectors are searched in all their cells.
        assert (how.index, how.recall.rows, how.recall.nearest.value) == ("ivf", 40, 1.0)
        assert how.recall.pairs_listed == how.recall.pairs
        assert "FAISS index (IVF, on the CPU)" in how.description


@pytest.mark.parametrize("exact_up_to", [60, 59])
def test_a_list_that_is_cut_off_says_so(rows, exact_up_to, monkeypatch):
    monkeypatch.setattr(pair_search, "MOST_PAIRS", 30)
    pairs, how = search(rows, 0.0, exact_up_to=exact_up_to)
    truth = sorted((pair[0] for pair in negative_pairs(rows)), reverse=True)
    np.testing.assert_allclose(pairs.similarity, truth[:30], atol=1e-12)
    assert (how.pairs, how.truncated) == (30, True)
    assert how.description.startswith(
        "More than 30 pairs have a similarity of 0 or more: only the 30 most similar"
    )
    _, whole = search(rows, truth[30] + 1e-9, exact_up_to=exact_up_to)
    assert (whole.pairs, whole.truncated) == (30, False)


def test_recall_by_hand():
    found = _recall(
        np.array([True, True, True, False]), pairs=np.array([4, 0, 2, 1]), found=np.array([4, 0, 1, 1])
    )
    assert (found.rows, found.rows_with_pairs, found.pairs, found.pairs_listed) == (4, 3, 7, 6)
    # Clopper–Pearson for 3 of 4, from tables.
    assert (found.nearest.value, found.nearest.low, found.nearest.high) == (
        0.75,
        pytest.approx(0.1941, abs=1e-4),
        pytest.approx(0.9937, abs=1e-4),
    )
    assert found.listed.value == pytest.approx((1 + 0.5 + 1) / 3)
    assert found.listed.low < found.listed.value < found.listed.high <= 1
    assert found.listed.method.endswith("of 3 rows above 0, times t")


@pytest.mark.parametrize("with_pairs", [0, 1])
def test_too_few_rows_with_pairs_give_no_interval(with_pairs):
    pairs = np.arange(50) < with_pairs
    found = _recall(np.ones(50, dtype=bool), pairs * 3, pairs * 2)
    if with_pairs:
        assert (found.listed.value, found.listed.low) == (pytest.approx(2 / 3), None)
    else:
        assert found.listed is None


@pytest.mark.parametrize("missing", [0.0, 0.002, 0.03, 0.3])
def test_the_interval_of_recall_covers(missing):
    """Rows drawn again and again from a corpus whose pairs lie in crowds, each of which is missed as a whole or in part."""
    rng = np.random.default_rng(4)
    rows = 20_000
    pairs = np.where(rng.random(rows) < 0.1, rng.geometric(0.2, rows), 0)
    share_found = np.where(rng.random(rows) < missing, rng.choice([0.0, 0.5], rows), 1.0)
    found = np.floor(pairs * share_found).astype(np.int64)
    having = pairs > 0
    truth = (found[having] / pairs[having]).mean()
    covered = 0
    for _ in range(200):
        drawn = rng.choice(rows, 1_000, replace=False)
        listed = _recall(np.ones(1_000, dtype=bool), pairs[drawn], found[drawn]).listed
        covered += listed.low <= truth <= listed.high
    assert covered >= 186  # of 200; a coverage of .95 gives fewer in one of a hundred runs
