"""The audit's estimate: unbiased, its intervals cover, and it says so where it cannot speak."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from probe_service.estimate.audit import (
    AuditDesign,
    CheckCounts,
    DrawnPair,
    JudgedShares,
    audited_limit,
    audited_share,
    draw_pairs,
    weighted_share_interval,
)

NO_CHECKS = CheckCounts(0, 0, 0, 0, 0, 0)
SIZES = (4, 12, 40)
TEMPERATURE = 0.1
LABELS = 120


def share_by_batches(vectors, false, size, rng, batches=4000):
    """S(N) straight from its definition, on random batches; and the share on pairs marked as unjudged."""
    total = 0.0
    for _ in range(batches):
        rows = rng.choice(len(vectors), size, replace=False)
        weights = np.exp(vectors[rows].astype(float) @ vectors[rows].T.astype(float) / TEMPERATURE)
        np.fill_diagonal(weights, 0.0)
        total += (weights * false[np.ix_(rows, rows)]).sum(axis=1).dot(1 / weights.sum(axis=1)) / size
    return total / batches


@dataclasses.dataclass(frozen=True)
class World:
    """A small corpus with groups, the true S of each size, and one large audit to cut into many."""

    vectors: np.ndarray
    group: np.ndarray
    truth: dict[int, float]
    design: AuditDesign

    def audits(self):
        """(design, true answers) of many independent audits."""
        for start in range(0, len(self.design.pairs) - LABELS + 1, LABELS):
            pairs = self.design.pairs[start : start + LABELS]
            answers = np.array([float(self.group[p.anchor] == self.group[p.candidate]) for p in pairs])
            yield dataclasses.replace(self.design, pairs=pairs), answers


def nothing_judged(anchors, candidates):
    return np.zeros(len(anchors), dtype=bool)


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(11)
    n = 80
    group = rng.integers(0, 16, n)
    centres = rng.standard_normal((16, 8))
    vectors = centres[group] + 0.8 * rng.standard_normal((n, 8))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    same = (group[:, None] == group[None, :]) & ~np.eye(n, dtype=bool)
    truth = {size: share_by_batches(vectors, same, size, rng) for size in SIZES}
    design = draw_pairs(
        vectors,
        None,
        drawn_sizes=SIZES,
        sizes=(2, 3, 5, 6, 8, 17, 24, 29),
        temperature=TEMPERATURE,
        is_judged=nothing_judged,
        count=200 * LABELS,
        rng=rng,
    )
    return World(vectors, group, truth, design)


def share(design, size, answers, judged=None, checks=NO_CHECKS, seed=0):
    judged = judged or JudgedShares.nothing_known()
    return audited_share(design, size, answers, judged, checks, level=0.95, rng=np.random.default_rng(seed))


def test_the_estimate_is_unbiased_and_its_interval_covers(world):
    for size, truth in world.truth.items():
        found = [share(design, size, answers).estimate for design, answers in world.audits()]
        values = np.array([estimate.value for estimate in found])
        # Four standard errors of the mean of 200 audits, and the Monte Carlo error of the truth.
        assert abs(values.mean() - truth) < 4 * values.std() / 200**0.5 + 0.003, (size, values.mean(), truth)
        covered = sum(estimate.low <= truth <= estimate.high for estimate in found)
        assert covered >= 180, (size, covered)  # 190 of 200 expected; P(< 180) = 0.002 at exactly .95


def test_sizes_between_those_computed_are_interpolated(world):
    rng = np.random.default_rng(3)
    same = (world.group[:, None] == world.group[None, :]) & ~np.eye(len(world.group), dtype=bool)
    truth = share_by_batches(world.vectors, same, 20, rng)
    found = [share(design, 20, answers).estimate.value for design, answers in world.audits()]
    assert np.mean(found) == pytest.approx(truth, abs=0.012)


def test_weights_are_bounded_by_the_number_of_mixed_sizes(world):
    for size in SIZES:
        assert world.design.weights(size).max() <= len(SIZES) * (1 + 1e-9)
    with pytest.raises(ValueError, match="from 2 to 40"):
        world.design.weights(41)


def test_judged_pairs_are_never_drawn_and_their_share_is_added(world):
    known = world.group % 2 == 0

    def judged(anchors, candidates):
        return known[anchors] & known[candidates]

    rng = np.random.default_rng(8)
    design = draw_pairs(
        world.vectors,
        None,
        drawn_sizes=(12,),
        sizes=(12,),
        temperature=TEMPERATURE,
        is_judged=judged,
        count=4000,
        rng=rng,
    )
    assert not any(judged(p.anchor, p.candidate) for p in design.pairs)
    same = (world.group[:, None] == world.group[None, :]) & ~np.eye(len(world.group), dtype=bool)
    both = known[:, None] & known[None, :]
    answers = np.array([float(world.group[p.anchor] == world.group[p.candidate]) for p in design.pairs])
    parts = JudgedShares(
        share_by_batches(world.vectors, same & both, 12, rng),
        share_by_batches(world.vectors, ~both, 12, rng),
        0.0,
        0.0,
        0.0,
    )
    found = share(design, 12, answers, parts)
    assert found.estimate.value == pytest.approx(world.truth[12], abs=0.025)
    assert found.known_share == parts.known


def test_where_everything_is_judged_nothing_is_drawn(world):
    design = draw_pairs(
        world.vectors,
        None,
        drawn_sizes=(4,),
        sizes=(4,),
        temperature=TEMPERATURE,
        is_judged=lambda i, j: np.ones(len(i), dtype=bool),
        count=5,
        rng=np.random.default_rng(0),
    )
    assert design is None


def test_a_noisy_judge_is_corrected_and_still_covered(world):
    rng = np.random.default_rng(21)
    raw, corrected, covered = [], [], 0
    for design, answers in world.audits():
        chance = rng.random(len(answers))
        said = np.where(answers > 0, chance >= 0.10, chance < 0.05).astype(float)
        checks = CheckCounts(60, int(rng.binomial(60, 0.90)), 0, 60, int(rng.binomial(60, 0.05)), 0)
        raw.append(share(design, 4, said).estimate.value)
        estimate = share(design, 4, said, checks=checks).estimate
        corrected.append(estimate.value)
        covered += estimate.low <= world.truth[4] <= estimate.high
    # 0.9·S + 0.05·(1 − S) is what an uncorrected judge sees.
    assert np.mean(raw) == pytest.approx(0.9 * world.truth[4] + 0.05 * (1 - world.truth[4]), abs=0.01)
    assert np.mean(corrected) == pytest.approx(world.truth[4], abs=0.015)
    assert covered >= 180


def constant(count, weights=None, sizes=(8,)):
    """A design of `count` pairs that all have the same push, or the given weights at the first size."""
    weights = np.ones(count) if weights is None else weights
    return AuditDesign(
        sizes,
        sizes,
        0.05,
        1000,
        False,
        tuple(DrawnPair(0, 1, (float(w),) * len(sizes), 1.0) for w in weights),
    )


def test_equal_weights_give_clopper_pearson():
    answers = np.array([1.0] * 5 + [0.0] * 95)
    estimate = share(constant(100), 8, answers).estimate
    # By definition the limits are where 5 or more, and 5 or fewer, yes of 100 have probability .025.
    assert 1 - binomial_tail(4, 100, estimate.low) == pytest.approx(0.025)
    assert binomial_tail(5, 100, estimate.high) == pytest.approx(0.025)
    assert estimate.value == pytest.approx(0.05)
    assert "Clopper–Pearson" in estimate.method


def binomial_tail(most, trials, probability):
    """P(X ≤ most)."""
    return math.fsum(
        math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(most + 1)
    )


def test_korn_graubard_by_hand():
    values = np.array([1.0, 0.0, 0.0, 1.0] * 10)
    weights = np.array([1.0, 2.0, 1.0, 1.0] * 10)
    # p = 2/5; v = 40/39 · 10 · (1·.36 + 4·.16 + 1·.16 + 1·.36) / 50² = .00623590; n* = .24/v = 38.486842
    found = weighted_share_interval(values, weights, 0.95)
    assert found.value == pytest.approx(0.4)
    assert found.method == "Korn–Graubard with 38 effective labels"
    # qbeta(.025, .4·n*, .6·n* + 1) and qbeta(.975, .4·n* + 1, .6·n*), by the beta integral
    yes, no = 0.4 * 38.486842, 0.6 * 38.486842
    assert beta_integral(found.low, yes, no + 1) == pytest.approx(0.025, abs=1e-4)
    assert beta_integral(found.high, yes + 1, no) == pytest.approx(0.975, abs=1e-4)


def test_few_answers_imagine_one_more_of_the_largest_weight():
    values, weights = np.zeros(100), np.ones(100)
    weights[:10] = 4.0
    # No yes: x' = 1 and n' = (130 + 4)/4 = 33.5, so the limit is 1 − .025^(1/32.5); Kish's 52 would say .069.
    found = weighted_share_interval(values, weights, 0.95)
    assert (found.low, found.high) == pytest.approx((0.0, 1 - 0.025 ** (1 / 32.5)))
    every = weighted_share_interval(1 - values, weights, 0.95)
    assert (every.low, every.high) == pytest.approx((0.025 ** (1 / 32.5), 1.0))
    # One yes of weight 4: A = 8, B = 32, so x' = 2 and n' = 134·8/32 = 33.5.
    values[0] = 1.0
    one = weighted_share_interval(values, weights, 0.95)
    assert beta_integral(one.high, 2.0, 31.5) == pytest.approx(0.975, abs=1e-4)


def beta_integral(x, a, b, steps=400_000):
    """Regularised incomplete beta function by the midpoint rule, in t = u³ to tame the end at 0."""
    u = (np.arange(steps) + 0.5) / steps

    def area(end):
        t = end * u**3
        return float((t ** (a - 1) * (1 - t) ** (b - 1) * 3 * u**2 * end).mean())

    return area(x) / area(1.0)


def test_too_few_effective_labels_are_refused():
    weights = np.full(200, 0.01)
    weights[:30] = 1.0
    found = share(constant(200, weights), 8, np.zeros(200))
    assert found.estimate is None
    assert found.effective_labels == pytest.approx((30 + 1.7) ** 2 / (30 + 0.017))
    assert "200 labels are worth 33" in found.reason


def test_unsure_answers_widen_to_all_no_and_all_yes():
    answers = np.array([1.0] * 20 + [0.0] * 60 + [np.nan] * 20)
    found = share(constant(100), 8, answers).estimate
    none = share(constant(100), 8, np.nan_to_num(answers, nan=0.0)).estimate
    every = share(constant(100), 8, np.nan_to_num(answers, nan=1.0)).estimate
    assert found.low == pytest.approx(none.low)
    assert found.high == pytest.approx(every.high)
    assert found.low < 0.2 < 0.4 < found.high


def test_all_unsure_is_the_widest_interval_within_what_is_known():
    judged = JudgedShares(0.1, 0.6, 0.0, 0.0, 0.0)
    found = share(constant(100), 8, np.full(100, np.nan), judged).estimate
    assert (found.low, found.high) == pytest.approx((0.1, 0.7))


def test_a_judge_that_cannot_tell_is_refused():
    found = share(constant(100), 8, np.ones(100), checks=CheckCounts(20, 10, 0, 20, 12, 0))
    assert found.estimate is None
    assert "say nothing" in found.reason


def test_a_faultless_judge_costs_no_width():
    answers = np.array([1.0] * 30 + [0.0] * 70)
    perfect = share(constant(100), 8, answers, checks=CheckCounts(20, 20, 0, 20, 0, 0)).estimate
    assert perfect == share(constant(100), 8, answers).estimate
    flawed = share(constant(100), 8, answers, checks=CheckCounts(20, 19, 0, 20, 1, 0)).estimate
    # (.30 − .05)/(.95 − .05)
    assert flawed.value == pytest.approx(0.25 / 0.9)
    assert flawed.high - flawed.low > perfect.high - perfect.low


def test_the_error_of_the_known_part_is_added():
    answers = np.array([1.0] * 50 + [0.0] * 50)
    exact = share(constant(100), 8, answers, JudgedShares(0.2, 0.5, 0.0, 0.0, 0.0)).estimate
    noisy = share(constant(100), 8, answers, JudgedShares(0.2, 0.5, 0.04**2, 0.0, 0.0)).estimate
    assert exact.value == noisy.value == pytest.approx(0.2 + 0.5 * 0.5)
    expected = np.hypot(exact.high - exact.value, 1.959964 * 0.04)
    assert noisy.high - noisy.value == pytest.approx(expected)


def test_judged_shares_of_batches_and_sub_pools():
    known, unjudged = np.array([0.1, 0.3]), np.array([0.8, 0.6])
    found = JudgedShares.from_batches(known, unjudged)
    assert (found.known, found.unjudged) == pytest.approx((0.2, 0.7))
    # Variance of the mean of two: .02/2; they move against each other.
    assert (found.known_variance, found.covariance) == pytest.approx((0.01, -0.01))
    assert found.standard_error(1.0) == pytest.approx(0.0, abs=1e-9)
    pooled = JudgedShares.from_batches(known, unjudged, [(0.1, 0.8), (0.3, 0.6)])
    assert pooled.known_variance == pytest.approx(0.02)


def test_n_max_ends_at_the_first_integer_above_the_budget():
    sizes = (2, 4, 8, 16)
    # Half of the pairs gain push with N, and those are the false negatives.
    pairs = tuple(
        DrawnPair(0, 1, tuple(1.0 if k % 2 else size / 16 for size in sizes), 1.0) for k in range(400)
    )
    design = AuditDesign(sizes, sizes, 0.05, 1000, False, pairs)
    answers = np.array([0.0 if k % 2 else 1.0 for k in range(400)])

    def limit(budget):
        return audited_limit(
            design,
            answers,
            {2: JudgedShares.nothing_known(), 16: JudgedShares.nothing_known()},
            NO_CHECKS,
            budget=budget,
            level=0.95,
            rng=np.random.default_rng(0),
        )

    found = limit(0.30)
    upper = {size: share(design, size, answers).estimate.high for size in range(2, 17)}
    assert found.value == max(size for size in upper if upper[size] <= 0.30)
    assert found.exceeded
    assert found.tested_up_to == found.value + 1
    assert limit(1.0).value == 16
    assert not limit(1.0).exceeded
    assert limit(0.01).value is None


def test_a_design_survives_json(world):
    small = dataclasses.replace(world.design, pairs=world.design.pairs[:3])
    assert AuditDesign.from_dict(json.loads(json.dumps(small.to_dict()))) == small
