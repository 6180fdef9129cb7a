from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from probe_service.estimate.closed_form import anchors_with_false_negative, false_negatives_per_anchor
from probe_service.estimate.intervals import (
    clopper_pearson,
    grouped_quantile,
    jackknife_ratio,
    mean_interval,
    pooled_interval,
    share_mean_interval,
    share_mean_intervals,
)


def test_t_interval_by_hand():
    # mean 2, sd 1, n 3: half width 4.30265 (t, .975, 2 degrees of freedom) / √3.
    found = mean_interval(np.array([1.0, 2.0, 3.0]), 0.95)
    assert found.value == 2.0
    assert found.high == pytest.approx(2.0 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.low == pytest.approx(2.0 - 4.302653 / math.sqrt(3), abs=1e-5)


def test_clopper_pearson_solves_its_defining_equations():
    found = clopper_pearson(3, 20, 0.95)

    def at_most(k, p):
        return sum(math.comb(20, i) * p**i * (1 - p) ** (20 - i) for i in range(k + 1))

    assert at_most(3, found.high) == pytest.approx(0.025, abs=1e-9)
    assert 1 - at_most(2, found.low) == pytest.approx(0.025, abs=1e-9)
    assert clopper_pearson(0, 20, 0.95).low == 0.0
    assert clopper_pearson(20, 20, 0.95).high == 1.0


def test_zeros_do_not_claim_certainty():
    found = share_mean_interval(np.zeros(100), 0.95)
    # No hit in 100 at 97.5%: 1 − .0125^(1/100).
    assert (found.value, found.low) == (0.0, 0.0)
    assert found.high == pytest.approx(1 - 0.0125 ** (1 / 100), abs=1e-6)


def test_columns_are_as_single_means():
    rng = np.random.default_rng(0)
    values = rng.random((60, 5)) * (rng.random((60, 5)) < [0.0, 0.05, 0.2, 0.9, 1.0])
    many = share_mean_intervals(values, 0.95)
    for c in range(5):
        one = share_mean_interval(values[:, c], 0.95)
        assert (one.value, one.low, one.high) == pytest.approx(
            (many.value[c], many.low[c], many.high[c]), abs=1e-12
        )


@pytest.mark.parametrize("rate", [0.005, 0.05, 0.3])
def test_share_intervals_cover_where_most_values_are_zero(rate):
    rng = np.random.default_rng(int(rate * 1000))
    truth = rate * 0.4  # hits are uniform on [.2, .6]
    covered = 0
    for _ in range(1000):
        values = (rng.random(100) < rate) * rng.uniform(0.2, 0.6, 100)
        found = share_mean_interval(values, 0.95)
        covered += found.low <= truth <= found.high
    assert covered / 1000 >= 0.93


def test_ratio_interval_covers_a_ratio_of_means():
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(1000):
        below = rng.gamma(4.0, 1.0, 100)
        above = below * rng.uniform(0.1, 0.5, 100)
        found = jackknife_ratio(above, below, 0.95)
        covered += found.low <= 0.3 <= found.high
    assert covered / 1000 >= 0.93


def test_quantile_interval_covers_with_batches_that_share_a_shift():
    rng = np.random.default_rng(6)
    # Anchors of a batch share half of their variance; the marginal is a standard normal.
    covered = 0
    for _ in range(600):
        values = math.sqrt(0.5) * (rng.standard_normal((100, 1)) + rng.standard_normal((100, 32)))
        found = grouped_quantile(values, 0.9, 0.95)
        covered += found.low <= 1.2815516 <= found.high
    assert covered / 600 >= 0.93


def test_sub_pools_cover_the_corpus_where_rows_are_sampled():
    """S-like figure of a finite corpus: the mean over pairs of a sample of rows is a U-statistic."""
    rng = np.random.default_rng(7)
    corpus = rng.integers(0, 40, 20_000)  # label of each row
    sizes = np.bincount(corpus)
    truth = (sizes * (sizes - 1)).sum() / (len(corpus) * (len(corpus) - 1))

    def share(labels):
        counts = np.bincount(labels)
        return (counts * (counts - 1)).sum() / (len(labels) * (len(labels) - 1))

    covered = 0
    for _ in range(500):
        rows = corpus[rng.choice(len(corpus), 1000, replace=False)]
        value = share(rows)
        pools = np.array([share(pool) for pool in rng.permutation(rows).reshape(20, 50)])
        whole = mean_interval(np.array([value, value]), 0.95)
        found = pooled_interval(whole, pools, 0.95)
        covered += found.low <= truth <= found.high
    assert covered / 500 >= 0.93


def test_closed_form_equals_counting_all_batches():
    # Rows 0 1 2 mean the same, 3 and 4 mean the same, 5 stands alone.
    group = [0, 0, 0, 1, 1, 2]
    partners = np.array([2, 2, 2, 1, 1, 0])
    for size in range(2, 7):
        hits = total = count = 0
        for batch in itertools.combinations(range(6), size):
            for anchor in batch:
                same = sum(group[j] == group[anchor] for j in batch if j != anchor)
                hits += same > 0
                count += same
                total += 1
        assert anchors_with_false_negative(partners, size) == pytest.approx(hits / total, abs=1e-12)
        assert false_negatives_per_anchor(partners, size) == pytest.approx(count / total, abs=1e-12)
