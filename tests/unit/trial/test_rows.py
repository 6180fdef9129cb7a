"""Rows of a trial: positives, known false negatives, and splits that keep together what means the same."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from probe_service.estimate import Evidence
from probe_service.trial.rows import TrialRows


def grouped(groups) -> TrialRows:
    return TrialRows(Evidence.from_keys(None, None, [str(group) for group in groups]), own_positives=False)


def paired(anchors, positives, groups=None) -> TrialRows:
    return TrialRows(Evidence.from_keys(anchors, positives, groups), own_positives=True)


def test_the_positive_of_a_row_is_another_of_its_group_all_alike():
    groups = np.array([0, 1, 0, 2, 1, 0, 2, 0])
    rows, rng = grouped(groups), np.random.default_rng(0)
    seen = Counter()
    for _ in range(3000):
        batch = rows.draw(5, rng)
        assert len(set(batch.anchors)) == 5
        seen.update(zip(batch.anchors.tolist(), batch.positives.tolist(), strict=True))
    pairs = {(i, j) for i in range(8) for j in range(8) if i != j and groups[i] == groups[j]}
    assert set(seen) == pairs
    # A row is in 5/8 of the 3000 batches, its partners alike: three sigma.
    for (i, _), count in seen.items():
        partners = (groups == groups[i]).sum() - 1
        expected = 3000 * 5 / 8 / partners
        assert abs(count - expected) < 3.5 * expected**0.5


def test_the_negatives_of_groups_and_of_pairs():
    groups = [0, 0, 1, 1, 2, 2]
    rows = grouped(groups)
    batch = rows.draw(6, np.random.default_rng(1))
    mask = rows.negatives(batch)
    for at, i in enumerate(batch.anchors):
        for to, j in enumerate(batch.anchors):
            if at != to:
                assert mask[at, to] == (groups[i] != groups[j])

    anchors = ["a", "a", "b", "c", "d"]
    positives = ["p", "q", "p", "c2", "d"]
    batch = paired(anchors, positives).draw(5, np.random.default_rng(2))
    assert (batch.anchors == batch.positives).all()
    mask = paired(anchors, positives).negatives(batch)
    accepted = {"a": {"a", "p", "q"}, "b": {"b", "p"}, "c": {"c", "c2"}, "d": {"d"}}
    for at, i in enumerate(batch.anchors):
        for to, j in enumerate(batch.anchors):
            if at != to:
                assert mask[at, to] == (positives[j] not in accepted[anchors[i]])


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5, 0.97])
def test_a_split_keeps_groups_and_equal_anchors_together(share):
    keys = [str(key) for key in np.random.default_rng(3).integers(0, 120, 400)]
    for rows in (grouped(keys), paired(keys, [f"p{row}" for row in range(400)])):
        rest, part = rows.split(share, np.random.default_rng(4), whole=True)
        assert rows.many_units(share)
        assert sorted([*rest, *part]) == list(range(400))
        assert {keys[row] for row in rest} & {keys[row] for row in part} == set()
        assert abs(len(part) - share * 400) <= max(Counter(keys).values())
    splits = [grouped(keys).split(share, np.random.default_rng(seed), whole=True)[1] for seed in (5, 6)]
    assert not np.array_equal(*splits)


def test_few_large_groups_are_divided_each():
    groups = np.random.default_rng(3).permutation(np.repeat(np.arange(6), [10, 20, 30, 40, 50, 60]))
    rows = grouped(groups)
    assert not rows.many_units(0.2)
    splits = [rows.split(0.2, np.random.default_rng(seed), whole=False) for seed in (1, 2)]
    for rest, part in splits:
        assert sorted([*rest, *part]) == list(range(len(groups)))
        assert np.bincount(groups[part]).tolist() == [2, 4, 6, 8, 10, 12]
    assert not np.array_equal(splits[0][1], splits[1][1])
    assert paired(["a", "b", "c"], ["p", "q", "r"]).many_units(0.2)


def test_what_is_known():
    assert grouped([0, 0, 1]).any_known
    assert not grouped([0, 1, 2]).any_known
    assert paired(["a", "b"], ["p", "p"]).any_known
    assert not paired(["a", "b"], ["p", "q"]).any_known
    assert len(paired(["a", "b"], ["p", "q"], ["g", None]).subset(np.array([1]))) == 1
