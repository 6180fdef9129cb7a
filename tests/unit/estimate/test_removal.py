"""The list of rows to drop, against plain loops; its effect, by a pass over what remains."""

from __future__ import annotations

import numpy as np
import pytest

from probe_service.estimate.exact import ExactShares, ShareAccumulator
from probe_service.estimate.removal import most_harmful_rows
from tests.unit.estimate.all_batches import CENTRES, histogram, others


def greedy(push, count):
    """The same list from the matrix of false push, by loops."""
    left, listed = push.copy(), []
    for _ in range(count):
        harm = [left[row].sum() + left[:, row].sum() for row in range(len(push))]
        row = int(np.argmax(harm))
        if harm[row] <= 1e-12:
            break
        listed.append((row, harm[row]))
        left[row], left[:, row] = 0.0, 0.0
    return listed


@pytest.mark.parametrize("seed", range(5))
def test_the_list_against_loops(seed):
    rng = np.random.default_rng(seed)
    push = rng.random((12, 12)) * (rng.random((12, 12)) < 0.2)
    np.fill_diagonal(push, 0.0)
    anchor, candidate = np.nonzero(push)
    found = most_harmful_rows(anchor, candidate, push[anchor, candidate], rows=12, count=12)
    expected = greedy(push, 12)
    # Of the two rows of a last pair either will do.
    assert [each.row for each in found[:5]] == [row for row, _ in expected[:5]]
    assert [each.false_push for each in found] == pytest.approx([harm for _, harm in expected])
    # Every pair has lost one of its rows, so all false push is accounted for.
    assert sum(each.false_push for each in found) == pytest.approx(push.sum())


def test_of_copies_all_but_one_are_listed():
    """Rows 1, 2 and 5 are copies of each other; each ordered pair receives the same."""
    pairs = [(i, j) for i in (1, 2, 5) for j in (1, 2, 5) if i != j]
    anchor, candidate = np.array(pairs).T
    found = most_harmful_rows(anchor, candidate, np.full(6, 0.01), rows=8, count=8)
    assert len(found) == 2
    assert {each.row for each in found} < {1, 2, 5}
    assert [each.false_push for each in found] == pytest.approx([0.04, 0.02])


def test_nothing_to_drop():
    nothing = np.zeros(0, dtype=np.int64)
    assert most_harmful_rows(nothing, nothing, np.zeros(0), rows=4, count=2) == []


def test_dropping_the_listed_rows_lowers_the_share_more_than_others():
    rng = np.random.default_rng(0)
    n, size, temperature, count = 240, 8, 0.05, 20
    labels = np.minimum(rng.geometric(0.05, n), 40)
    known = (labels[:, None] == labels[None, :]) & others(np.eye(n))
    s = np.where(known, 0.6, 0.25) + 0.15 * rng.standard_normal((n, n))
    s = np.rint(np.clip(s, -1, 1) * 1024) / 1024
    push = np.exp(s / temperature) * known
    anchor, candidate = np.nonzero(known)
    listed = most_harmful_rows(anchor, candidate, push[anchor, candidate] / push.sum(), rows=n, count=count)

    def share_without(dropped):
        keep = np.setdiff1d(np.arange(n), dropped)
        at = np.ix_(keep, keep)
        accumulator = ShareAccumulator(
            CENTRES, lowest=-1.0, rows=len(keep), largest=size, temperature=temperature
        )
        accumulator.add(histogram(s[at], others(s[at])), histogram(s[at], known[at]), None, None)
        return ExactShares.from_sums(accumulator.sums, rows=len(keep)).known[-1]

    at_random = [share_without(rng.choice(n, count, replace=False)) for _ in range(5)]
    assert share_without([each.row for each in listed]) < min(at_random) - 0.01
