from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probe_service.estimate.coupling import NO_PARTNER, CommonBatches, match_rows

keys = st.lists(st.sampled_from("abcde"), max_size=12)


@given(a=keys, b=keys)
def test_rows_are_matched_one_to_one_by_key_and_occurrence(a, b):
    matched = match_rows(a, b).tolist()
    assert len(matched) == len(b)
    for row, partner in enumerate(matched):
        occurrence = b[:row].count(b[row])
        places = [place for place, key in enumerate(a) if key == b[row]]
        assert partner == (places[occurrence] if occurrence < len(places) else NO_PARTNER)


class Scripted:
    """Stands for a generator whose choice without replacement is the `number`-th of all that there are."""

    def __init__(self, number):
        self.number, self.ways = number, 1

    def choice(self, options, count, replace):
        assert not replace
        every = list(itertools.combinations(options.tolist(), count))
        self.ways = len(every)
        return np.array(every[self.number % self.ways], dtype=np.int64)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("abcd", "abcdef"),  # rows added
        ("abcdef", "bdf"),  # rows dropped
        ("abcd", "axcy"),  # rows edited
        ("aabcx", "aaabyz"),  # some of everything, with repeats
        ("abc", "xyzw"),  # nothing in common
    ],
)
@pytest.mark.parametrize("in_file_order", [True, False])
def test_both_batches_are_uniform_draws_by_enumeration(a, b, in_file_order):
    rng = None if in_file_order else np.random.default_rng(3)
    common = CommonBatches.pair_up(match_rows(a, b), len(a), rng)
    larger = max(len(a), len(b))
    for size in range(2, min(len(a), len(b)) + 1):
        probability = [Counter(), Counter()]
        batches = list(itertools.combinations(range(larger), size))
        for batch in batches:
            rows = np.array([batch], dtype=np.int64)
            first = Scripted(0)
            common.draw(rows, np.arange(larger), first)
            for number in range(first.ways):
                drawn = common.draw(rows, np.arange(larger), Scripted(number))
                for side, found in enumerate(drawn):
                    assert len(set(found[0].tolist())) == size
                    probability[side][frozenset(found[0].tolist())] += Fraction(1, len(batches) * first.ways)
        for side, corpus in enumerate((a, b)):
            every = [frozenset(rows) for rows in itertools.combinations(range(len(corpus)), size)]
            assert probability[side] == {rows: Fraction(1, len(every)) for rows in every}


def test_batches_share_all_common_rows_of_the_larger_corpus():
    rng = np.random.default_rng(0)
    a = [f"row {i}" for i in range(60)]
    b = [*a[:20], *a[25:], *(f"new {i}" for i in range(15))]
    rng.shuffle(b)
    common = CommonBatches.pair_up(match_rows(a, b), len(a))
    batches = np.stack([rng.choice(len(b), 8, replace=False) for _ in range(200)])
    rows_a, rows_b = common.draw(batches, np.arange(len(b)), rng)
    assert (rows_b == batches).all()
    for of_a, of_b in zip(rows_a, rows_b, strict=True):
        texts_a, texts_b = {a[row] for row in of_a}, {b[row] for row in of_b}
        assert texts_b & set(a) <= texts_a


def test_edited_rows_stand_in_for_what_they_were():
    a = ["one", "two", "three", "four"]
    b = ["one", "two, edited", "three", "four, edited"]
    common = CommonBatches.pair_up(match_rows(a, b), len(a))
    assert common.partner.tolist() == [0, 1, 2, 3]


def test_without_file_order_what_is_left_is_paired_at_random():
    matched = np.full(500, NO_PARTNER, dtype=np.int64)
    common = CommonBatches.pair_up(matched, 500, np.random.default_rng(1))
    assert sorted(common.partner.tolist()) == list(range(500))
    assert abs(np.corrcoef(common.partner, np.arange(500))[0, 1]) < 0.2


def test_batches_of_a_pool_keep_to_it():
    rng = np.random.default_rng(2)
    a, b = [f"row {i}" for i in range(40)], [f"row {i}" for i in range(10, 70)]
    common = CommonBatches.pair_up(match_rows(a, b), len(a), rng)
    pool = rng.choice(60, 30, replace=False).astype(np.int64)
    pool_a, pool_b = common.pools(pool)
    assert set(pool_b) == set(pool)
    assert len(pool_a) == (common.partner[pool] != NO_PARTNER).sum()
    batches = pool[np.stack([rng.choice(30, 5, replace=False) for _ in range(100)])]
    rows_a, rows_b = common.draw(batches, pool, rng)
    assert set(rows_a.ravel()) <= set(pool_a)
    assert set(rows_b.ravel()) <= set(pool_b)
