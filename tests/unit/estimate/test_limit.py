"""S over sizes with limits, and the fixed-sequence search for n_max."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from probe_service.estimate import ExactShares, scan_of_points, scan_shares
from probe_service.schemas import Estimate, SharePoint


def points(limits, sizes):
    return [
        SharePoint(
            batch_size=size,
            estimate=Estimate(value=high - 0.01, low=high - 0.02, high=high, method="t over 20 epochs"),
            worst_case=None,
        )
        for size, high in zip(sizes, limits, strict=True)
    ]


def test_all_pairs_of_a_sample_give_the_value_and_sub_pools_its_spread():
    rng = np.random.default_rng(0)
    pools = [(rng.uniform(0.1, 0.2, 6), rng.uniform(0.4, 0.6, 6)) for _ in range(20)]
    exact = ExactShares(np.linspace(0.1, 0.2, 6), np.linspace(0.4, 0.6, 6), None, None)
    scan = scan_shares(None, pools, complete=False, exact=exact)
    spread = np.std([known[3] for known, _ in pools], ddof=1) / 20**0.5
    half = stats.t.ppf(0.975, 19) * spread
    point = scan.point(5)
    assert point.estimate.value == pytest.approx(exact.known[3])
    assert point.estimate.low == pytest.approx(exact.known[3] - half)
    worst_half = stats.t.ppf(0.975, 19) * np.std([worst[3] for _, worst in pools], ddof=1) / 20**0.5
    assert point.worst_case.high == pytest.approx(exact.worst[3] + worst_half)
    assert point.estimate.high == point.worst_case.high
    assert "sub-pools" in point.estimate.method
    assert scan.exact_up_to == 1


def test_permutations_go_on_where_all_pairs_end():
    rng = np.random.default_rng(1)
    shares = rng.uniform(0.2, 0.3, (40, 8))
    exact = ExactShares(np.array([0.1, 0.15, 0.2]), np.array([0.1, 0.15, 0.2]), None, None)
    scan = scan_shares((shares, shares), [], complete=True, exact=exact)
    assert (scan.value[:3] == exact.known).all()
    assert (scan.low[:3] == scan.high[:3]).all()
    half = stats.t.ppf(0.975, 39) * shares[:, 3].std(ddof=1) / 40**0.5
    assert scan.high[3] == pytest.approx(shares[:, 3].mean() + half)
    assert scan.exact_up_to == 4


def test_the_first_size_above_the_budget_ends_the_search_whatever_follows():
    scan = scan_of_points(points([0.1, 0.15, 0.25, 0.1], [4, 8, 12, 16]), complete=True)
    limit = scan.limit(0.2, assumption="")
    assert (limit.value, limit.tested_up_to, limit.every_integer, limit.exceeded) == (8, 16, False, True)
    assert "each of the 2 batch sizes tested from 4 to 8" in limit.reason
    assert "0.2500 at 12" in limit.reason
    assert scan.limit(0.05, assumption="").value is None
    assert not scan.limit(0.3, assumption="").exceeded
    assert scan.limit(0.3, assumption="").value == 16


def test_sizes_without_an_interval_bear_no_limit():
    bare = SharePoint(
        batch_size=64, estimate=Estimate(value=0.3, low=None, high=None, method="-"), worst_case=None
    )
    scan = scan_of_points([*points([0.1], [4]), bare], complete=True)
    assert scan.largest == 4
    assert scan_of_points([bare], complete=True) is None
