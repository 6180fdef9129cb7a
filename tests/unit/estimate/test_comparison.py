"""Intervals for differences: by hand, by naive loops, and by how often they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from probe_service.estimate.comparison import (
    Reading,
    Side,
    compare_figures,
    independent_difference,
    paired_difference,
)
from probe_service.estimate.coupling import CommonBatches, match_rows
from probe_service.estimate.evidence import Evidence
from probe_service.estimate.exact import ExactFigures

NOMINAL, REQUIRED = 0.95, 0.93


def share(values, pools=None):
    values = np.asarray(values, dtype=float)
    return Reading(values.mean(), 0.0, 1.0, values[:, None], pools)


def cosine(values, pools=None):
    values = np.asarray(values, dtype=float)
    return Reading(values.mean(), -1.0, 1.0, values[:, None], pools)


def ratio(top, bottom, pools=None):
    return Reading(top.sum() / bottom.sum(), 0.0, 1.0, np.stack([top, bottom], axis=1), pools)


def settled(value):
    return Reading(value, 0.0, 1.0, None, None, "exact")


def covers(found, truth):
    return found.low <= truth <= found.high


# ------------------------------------------------------------------------------------------------------------- by hand


def test_paired_t_by_hand():
    # Differences .1, .2, .3: mean .2, sd .1; t(.975, 2) = 4.302653.
    found = paired_difference(cosine([0.1, 0.5, 0.3]), cosine([0.2, 0.7, 0.6]))
    assert found.value == pytest.approx(0.2)
    assert found.high - found.value == pytest.approx(4.302653 * 0.1 / math.sqrt(3), abs=1e-6)
    assert found.value - found.low == pytest.approx(found.high - found.value)
    assert found.method == "t over 3 common batches"


def test_paired_jackknife_leaves_one_batch_out_on_both_sides():
    rng = np.random.default_rng(0)
    tops, bottoms = rng.random((2, 40)), 1.0 + rng.random((2, 40))
    found = paired_difference(ratio(tops[0], bottoms[0]), ratio(tops[1], bottoms[1]))
    value = tops[1].sum() / bottoms[1].sum() - tops[0].sum() / bottoms[0].sum()
    left_out = []
    for batch in range(40):
        rest = [r for r in range(40) if r != batch]
        first, second = (sum(tops[s][r] for r in rest) / sum(bottoms[s][r] for r in rest) for s in (0, 1))
        left_out.append(second - first)
    mean = sum(left_out) / 40
    error = math.sqrt(39 / 40 * sum((each - mean) ** 2 for each in left_out))
    assert found.value == pytest.approx(value)
    assert found.high - value == pytest.approx(stats.t.ppf(0.975, 39) * error)


def test_limits_of_sides_measured_apart_are_combined_by_hand():
    # Two sides without sub-pools; b is exact, so that a's limits are all there is.
    a = cosine([0.1, 0.2, 0.3])
    half = 4.302653 * 0.1 / math.sqrt(3)
    found = independent_difference(a, settled(0.5))
    assert (found.value, found.high) == (pytest.approx(0.3), pytest.approx(0.3 + half, abs=1e-6))
    # Both with the same limits: √2 times as wide.
    found = independent_difference(a, a)
    assert (found.low, found.high) == (
        pytest.approx(-half * math.sqrt(2), abs=1e-6),
        pytest.approx(half * math.sqrt(2), abs=1e-6),
    )


def test_limits_that_are_not_symmetric_keep_their_sides():
    rare = share([0.0] * 97 + [0.2, 0.3, 0.4])
    own = rare.interval()
    assert own.high - own.value > 2 * (own.value - own.low)
    # What A may have more, B − A may have less.
    found = independent_difference(rare, settled(0.5))
    assert (found.low, found.high) == (pytest.approx(0.5 - own.high), pytest.approx(0.5 - own.low))
    found = independent_difference(settled(0.5), rare)
    assert (found.low, found.high) == (pytest.approx(own.low - 0.5), pytest.approx(own.high - 0.5))


def test_sides_measured_apart_agree_with_welch():
    rng = np.random.default_rng(1)
    a, b = rng.normal(0.3, 0.02, 60), rng.normal(0.35, 0.06, 200)
    found = independent_difference(cosine(a), cosine(b))
    welch = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert found.low == pytest.approx(welch.low, abs=5e-4)
    assert found.high == pytest.approx(welch.high, abs=5e-4)


def test_sub_pools_give_t_over_their_differences():
    rng = np.random.default_rng(2)
    pools = rng.random((2, 20))
    constant = np.full(50, 0.5)
    found = paired_difference(cosine(constant, pools[0]), cosine(constant + 0.1, pools[1]))
    apart = [pools[1][k] - pools[0][k] for k in range(20)]
    mean = sum(apart) / 20
    variance = sum((each - mean) ** 2 for each in apart) / 19
    assert found.value == pytest.approx(0.1)
    assert found.high - 0.1 == pytest.approx(stats.t.ppf(0.975, 19) * math.sqrt(variance / 20))


def test_exact_sides_have_an_exact_difference():
    found = paired_difference(settled(0.2), settled(0.25))
    assert found.low == found.value == found.high == pytest.approx(0.05)


# -------------------------------------------------------------------------------------------- where too little differs


@pytest.mark.parametrize("reading", [share, cosine, lambda top: ratio(top, 1.0 + np.arange(100) / 100)])
def test_few_differing_batches_count_as_measured_apart(reading):
    top = np.random.default_rng(3).random(100)
    few, more = top.copy(), top.copy()
    few[:29] *= 1.1
    more[:30] *= 1.1
    apart = independent_difference(reading(top), reading(few))
    assert paired_difference(reading(top), reading(few)) == apart
    assert apart.low < 0 < apart.high
    together = paired_difference(reading(top), reading(more))
    assert together.low > 0
    assert together.high - together.low < 0.2 * (apart.high - apart.low)


def test_equal_batches_do_not_claim_certainty():
    found = paired_difference(share(np.zeros(100)), share(np.zeros(100)))
    # Neither side's share of batches above 0 is known better than 1 − .0125^(1/100).
    assert (found.value, found.high, found.low) == (
        0.0,
        pytest.approx(1 - 0.0125 ** (1 / 100)),
        pytest.approx(0.0125 ** (1 / 100) - 1),
    )


def test_few_differing_sub_pools_count_as_measured_apart():
    values = np.random.default_rng(4).random(50)
    equal = 0.3 + 0.01 * np.arange(20)
    few, half = equal.copy(), equal.copy()
    few[:9] += 0.02
    half[:10] += 0.02
    a, b = share(values, equal), share(values / 2, few)
    assert paired_difference(a, b) == independent_difference(a, b)
    assert "common disjoint sub-pools" in paired_difference(a, share(values / 2, half)).method


def test_a_sample_too_small_has_no_interval():
    values = np.random.default_rng(4).random(50)
    for a, b in ((np.empty(0), np.empty(0)), (np.empty(0), None)):
        found = independent_difference(share(values, a), share(values / 2, b))
        assert (found.low, found.high) == (None, None)
        assert "too few rows" in found.method
    found = paired_difference(share(values, np.empty(0)), share(values / 2, np.empty(0)))
    assert found.low is None
    assert found.value == pytest.approx(-values.mean() / 2)


# ---------------------------------------------------------------------------------------------------------- coverage


def test_paired_intervals_cover_and_are_narrower():
    rng = np.random.default_rng(5)
    covered, widths = [], []
    for _ in range(600):
        both = rng.beta(2, 5, 100)
        a, b = share(0.8 * both), share(0.8 * both + 0.05 * rng.random(100))
        found, apart = paired_difference(a, b), independent_difference(a, b)
        covered.append(covers(found, 0.025))
        widths.append((found.high - found.low) / (apart.high - apart.low))
    assert np.mean(covered) >= REQUIRED
    assert np.mean(widths) < 0.2


def test_independent_intervals_cover():
    rng = np.random.default_rng(6)
    truth = 0.3 * 0.1 - 2 / 7 * 0.4
    covered = [
        covers(
            independent_difference(
                share(0.4 * rng.beta(2, 5, 150)), share(0.3 * (rng.random(400) < 0.1) * 2 * rng.random(400))
            ),
            truth,
        )
        for _ in range(600)
    ]
    assert np.mean(covered) >= REQUIRED


@pytest.mark.parametrize("rate", [0.003, 0.02, 0.1])
def test_intervals_cover_where_few_batches_differ(rate):
    rng = np.random.default_rng(int(rate * 1000))
    truth = rate * (0.7 * 0.3 - 0.3 * 0.1)
    covered = 0
    for _ in range(600):
        both = rng.random(300)
        differs = rng.random(300) < rate
        size = np.where(rng.random(300) < 0.7, 0.6 * rng.random(300), -0.2 * rng.random(300))
        covered += covers(paired_difference(cosine(both), cosine(both + differs * size)), truth)
    assert covered / 600 >= REQUIRED


def test_paired_ratios_cover():
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(600):
        bottom = rng.gamma(4.0, 1.0, 100)
        first, second = bottom * rng.uniform(0.1, 0.5, 100), 1.5 * bottom
        found = paired_difference(ratio(first, bottom), ratio(second * rng.uniform(0.2, 0.6, 100), second))
        covered += covers(found, 0.1)
    assert covered / 600 >= REQUIRED


def expected_largest(values, size):
    """E of the largest of `size` drawn without replacement: the r-th smallest is it with C(r − 1, N − 1)/C(n, N)."""
    ordered, n = sorted(values), len(values)
    ways = math.comb(n, size)
    return math.fsum(
        math.comb(r, size - 1) / ways * value for r, value in enumerate(ordered) if r >= size - 1
    )


@pytest.mark.parametrize("design", ["common", "apart"])
def test_sub_pools_cover_the_difference_of_corpora_that_are_sampled(design):
    """2,400 rows before; 200 dropped, 200 edited and 400 added: the largest of 8 rows, from 480 rows of either."""
    rng = np.random.default_rng(8)
    size, sample, pools = 8, 480, 20
    values = np.tanh(0.5 * rng.standard_normal(3200))
    rows_a, rows_b = np.arange(2400), np.concatenate([np.arange(200, 2200), np.arange(2400, 3000)])
    truth = expected_largest(values[rows_b], size) - expected_largest(values[rows_a], size)
    covered = 0
    for _ in range(250):
        if design == "common":
            rank = rng.random(3200)
            a, b = (np.sort(rows[np.argsort(rank[rows])[:sample]]) for rows in (rows_a, rows_b))
        else:
            a, b = (np.sort(rng.choice(rows, sample, replace=False)) for rows in (rows_a, rows_b))
        common = CommonBatches.pair_up(match_rows(a.tolist(), b.tolist()), sample, rng)

        def largest(pool, count, a=a, b=b, common=common):
            batches = pool[rng.random((count, len(pool))).argsort(axis=1)[:, :size]]
            drawn = common.draw(batches, pool, rng)
            return [values[rows[side]].max(axis=1) for rows, side in zip((a, b), drawn, strict=True)]

        whole = largest(np.arange(sample), 400)
        parts = rng.permutation(sample).reshape(pools, -1)
        means = np.array([[found.mean() for found in largest(part, 20)] for part in parts])
        found = paired_difference(cosine(whole[0], means[:, 0]), cosine(whole[1], means[:, 1]))
        covered += covers(found, truth)
    assert covered / 250 >= REQUIRED


# -------------------------------------------------------------------------------------------------- from columns to figures


def columns(rng, batches, size, *, with_positives=True, worst_above=0.0):
    false = rng.random(batches) * 0.2
    weight = 1.0 + rng.random(batches) if with_positives else np.full(batches, np.nan)
    return {
        "top_k": rng.random((batches, 3)),
        "hardest_negative": rng.random(batches),
        "false_share": false,
        "certain_share": false / 2,
        "worst_share": false + worst_above,
        "false_count": false * size,
        "false_any_share": false,
        "worst_count": (false + worst_above) * (size - 1),
        "worst_any_share": false + worst_above,
        "update_weight": weight,
        "false_update": weight * false,
        "worst_update": weight * (false + worst_above),
    }


def side(rng, groups, *, complete=True, exact=None, batches=80, **more):
    return Side(
        columns(rng, batches, 4, **more),
        None,
        [],
        Evidence.from_keys(None, None, groups),
        complete,
        True,
        exact,
    )


def test_every_figure_that_both_sides_have_is_compared():
    rng = np.random.default_rng(9)
    a = side(rng, ["g", "g", "h", "k", "l", "m"])
    b = side(rng, ["g", "g", "g", "k", "l", "m"])
    found = compare_figures(4, a, b, coupled=True)
    assert list(found) == [
        "false_negative_softmax_share",
        "false_negative_gradient_share",
        "false_negatives_per_anchor",
        "anchors_with_false_negative",
        "top_k_mean",
        "hardest_negative",
    ]
    top = found["top_k_mean"]
    assert top.difference.value == pytest.approx(b.whole["top_k"].mean() - a.whole["top_k"].mean())
    assert top.a.low < top.a.value < top.a.high
    # One pair in six rows against three: (N − 1) · mean(d)/(n − 1) = 3 · (2/6)/5 and 3 · (6/6)/5, without an error.
    counts = found["false_negatives_per_anchor"]
    assert (counts.a.value, counts.b.value) == (pytest.approx(0.2), pytest.approx(0.6))
    assert counts.difference.low == counts.difference.high == pytest.approx(0.4)
    assert counts.width_share is None
    # A of three: 1 − C(4, 3)/C(5, 3) = .6 for two of six rows; B 1 − C(3, 3)/C(5, 3) = .9 for three of six.
    anchors = found["anchors_with_false_negative"].difference
    assert anchors.value == pytest.approx(0.9 * 3 / 6 - 0.6 * 2 / 6)
    alone = compare_figures(4, side(rng, list("abcdef")), b, coupled=True)["false_negative_softmax_share"]
    assert (alone.a.high, alone.a.method) == (0.0, "no row of the corpus has a known false negative")
    without = compare_figures(4, side(rng, ["g"] * 6, with_positives=False), b, coupled=True)
    assert "false_negative_gradient_share" not in without


def test_the_gain_of_common_batches_is_the_share_of_the_width():
    rng = np.random.default_rng(10)
    a = side(rng, ["g", "g", "h", "k"])
    near = {name: values + 0.01 * rng.random(values.shape) for name, values in a.whole.items()}
    b = Side(near, None, [], a.evidence, True, True, None)
    together, apart = (compare_figures(4, a, b, coupled=coupled)["top_k_mean"] for coupled in (True, False))
    widths = [found.difference.high - found.difference.low for found in (together, apart)]
    assert together.width_share == pytest.approx(widths[0] / widths[1])
    assert together.width_share < 0.2
    assert apart.width_share is None


def test_exact_figures_are_used_where_both_sides_have_them():
    rng = np.random.default_rng(11)
    groups = ["g", "g", "h", "k"]
    exact = [ExactFigures(s, s, s / 2, s / 2, 0.5 + s) for s in (0.1, 0.15)]
    a, b = (side(rng, groups, exact=figures) for figures in exact)
    found = compare_figures(4, a, b, coupled=True)
    for name, truth in (
        ("false_negative_softmax_share", 0.05),
        ("false_negative_gradient_share", 0.025),
        ("hardest_negative", 0.05),
    ):
        assert found[name].difference.low == found[name].difference.high == pytest.approx(truth)
    one_sided = compare_figures(4, a, side(rng, groups), coupled=True)["false_negative_softmax_share"]
    assert one_sided.a.value == pytest.approx(a.whole["false_share"].mean())
    assert one_sided.width_share is not None


def test_of_a_sample_the_value_is_exact_and_the_spread_that_of_the_sub_pools():
    rng = np.random.default_rng(15)
    evidence = Evidence.from_keys(None, None, list("gghkgghk"))
    pools = [[columns(rng, 10, 4) for _ in range(20)] for _ in range(2)]
    rows = [np.arange(8)] * 20
    a, b = (
        Side(columns(rng, 80, 4), of_side, rows, evidence, True, True, ExactFigures(s, s, s, s, s))
        for of_side, s in zip(pools, (0.1, 0.15), strict=True)
    )
    found = compare_figures(4, a, b, coupled=True)["false_negative_softmax_share"].difference
    apart = [y["false_share"].mean() - x["false_share"].mean() for x, y in zip(*pools, strict=True)]
    half = stats.t.ppf(0.975, 19) * np.std(apart, ddof=1) / math.sqrt(20)
    assert (found.value, found.high) == (pytest.approx(0.05), pytest.approx(0.05 + half))


@pytest.mark.parametrize("coupled", [True, False])
def test_unjudged_pairs_leave_bounds_for_the_difference(coupled):
    rng = np.random.default_rng(12)
    groups = ["g", "g", None, None]
    a, b = (side(rng, groups, complete=False, worst_above=above) for above in (0.1, 0.3))
    found = compare_figures(4, a, b, coupled=coupled)
    known_a, known_b = (s.whole["false_share"].mean() for s in (a, b))
    share_ = found["false_negative_softmax_share"]
    assert share_.difference.value == pytest.approx(known_b - known_a)
    assert share_.difference.low < known_b - (known_a + 0.1)
    assert share_.difference.high > known_b + 0.3 - known_a
    assert share_.a.low < known_a
    assert share_.a.high > known_a + 0.1
    worst = found["worst_case"].difference
    assert worst.value == pytest.approx(known_b - known_a + 0.2)
    # No two texts are known to be equal here, so that tier is 0 on both sides.
    assert found["certain_share"].difference.low == found["certain_share"].difference.high == 0.0
    assert share_.width_share is None


def test_what_cannot_differ_does_not():
    rng = np.random.default_rng(14)
    a = side(rng, ["g", "g", "h", "k"])
    b = Side({**a.whole, "false_share": a.whole["false_share"] / 2}, None, [], a.evidence, True, True, None)
    unchanged = {"top_k_mean", "hardest_negative"}
    found = compare_figures(4, a, b, coupled=True, unchanged=unchanged)
    for name in unchanged:
        assert found[name].difference.low == found[name].difference.high == 0.0
    assert found["false_negative_softmax_share"].difference.high < 0
    assert compare_figures(4, a, b, coupled=True)["top_k_mean"].difference.high > 0


def test_other_candidates_have_no_closed_form():
    rng = np.random.default_rng(13)
    a, b = (
        Side(columns(rng, 50, 4), None, [], Evidence.from_keys(None, None, ["g"] * 4), True, False, None)
        for _ in range(2)
    )
    found = compare_figures(4, a, b, coupled=True)["false_negatives_per_anchor"]
    assert found.a.value == pytest.approx(a.whole["false_count"].mean())
    assert found.difference.low < found.difference.high
