"""n_max: the largest batch size within the budget, by a fixed-sequence test on integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from probe_service.estimate.exact import EXACT, ExactShares
from probe_service.estimate.intervals import share_mean_intervals
from probe_service.schemas import CONFIDENCE_LEVEL, BatchSizeLimit, Estimate, SharePoint

__all__ = ["ShareScan", "exact_scan", "scan_of_points", "scan_shares"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ShareScan:
    """S and its limits at ascending sizes: every integer from 2 on, or a ladder of them.

    Args:
        sizes: (L,) int64.
        value, low, high: (L,) false_negative_softmax_share; the known pairs' share and its interval.
        worst_value, worst_high: (L,) the worst case and its upper limit; equal to value and high if all is judged.
        complete: Whether every pair is judged, so that `high` speaks of all false negatives.
        exact_up_to: Largest N whose value is exact for the corpus; 1 if none is.
        method: How the other intervals were made.
    """

    sizes: NDArray[np.int64]
    value: Floats
    low: Floats
    high: Floats
    worst_value: Floats
    worst_low: Floats
    worst_high: Floats
    complete: bool
    exact_up_to: int
    method: str

    @property
    def largest(self) -> int:
        """The largest N scanned."""
        return int(self.sizes[-1])

    @property
    def every_integer(self) -> bool:
        """Whether no size between the smallest and the largest is left out."""
        return len(self.sizes) == self.largest - int(self.sizes[0]) + 1

    def point(self, size: int) -> SharePoint:
        """S at one of the sizes; with incomplete evidence its upper end is the worst case's."""
        at = int(np.searchsorted(self.sizes, size))
        value = float(self.value[at])
        method = EXACT if size <= self.exact_up_to else self.method
        upper = float(self.high[at]) if self.complete else max(value, float(self.worst_high[at]))
        return SharePoint(
            batch_size=size,
            estimate=Estimate(value=value, low=float(self.low[at]), high=upper, method=method),
            worst_case=None
            if self.complete
            else Estimate(
                value=float(self.worst_value[at]),
                low=float(self.worst_low[at]),
                high=float(self.worst_high[at]),
                method=method,
            ),
        )

    def thinned(self, keep: list[int], *, points: int = 120) -> list[SharePoint]:
        """Points for drawing: evenly spaced in log N, and those in `keep`."""
        spaced = np.round(np.geomspace(self.sizes[0], self.largest, points)).astype(np.int64)
        chosen = np.union1d(spaced, np.array(keep, dtype=np.int64))
        return (
            [self.point(int(size)) for size in np.intersect1d(chosen, self.sizes)]
            if self.every_integer
            else [self.point(int(size)) for size in self.sizes]
        )

    def limit(self, budget: float, *, assumption: str) -> BatchSizeLimit:
        """The largest N whose upper limit keeps within the budget at every size tested up to it.

        The one-sided 97.5% limit is tested in ascending order; the first size above the budget ends the sequence, so that
        no correction for the number of sizes is needed and no monotony is supposed (STATISTICS §7).

        Args:
            budget: Largest acceptable S.
            assumption: What the upper limit rests on where evidence is incomplete.
        """
        upper = self.high if self.complete else np.maximum(self.worst_high, self.high)
        above = np.flatnonzero(upper > budget)
        exceeded = len(above) > 0
        passed = int(above[0]) if exceeded else len(self.sizes)
        smallest = int(self.sizes[0])
        value = int(self.sizes[passed - 1]) if passed else None
        shown = "upper limit" if self.complete else "worst case's upper limit"
        every = "every batch size" if self.every_integer else f"each of the {passed} batch sizes tested"
        if value is None:
            reason = f"the {shown} of S is {upper[0]:.3g} at a batch of {smallest} already, above the budget of {budget:g}"
        elif exceeded:
            reason = (
                f"the {shown} of S is at most {budget:g} at {every} from {smallest} to {value}, and {upper[passed]:.4f}"
                f" at {self.sizes[passed]}"
            )
        else:
            tested = "every batch size tested" if self.every_integer else every
            reason = f"the {shown} of S is at most {budget:g} at {tested}, from {smallest} to {self.largest}"
        return BatchSizeLimit(
            value=value,
            tested_up_to=self.largest,
            every_integer=self.every_integer,
            exceeded=exceeded,
            reason=reason,
            assumption=None if self.complete else assumption,
        )


def scan_shares(
    whole: tuple[Floats, Floats] | None,
    pools: list[tuple[Floats, Floats]],
    *,
    complete: bool,
    exact: ExactShares | None,
) -> ShareScan:
    """Turn the scan's permutations into S with limits at every integer.

    Args:
        whole: (P, L) S and (P, L) the worst case, one row a permutation of all encoded rows; None where `exact` covers all
            sizes.
        pools: The same, averaged over permutations, (L,) each, for every sub-pool; empty for a fully encoded corpus.
        complete: Whether every pair is judged.
        exact: Shares of the encoded rows without Monte Carlo error, used where they are given.

    Raises:
        ValueError: Neither `whole` nor `exact` is given.
    """
    if whole is None and exact is None:
        raise ValueError("S comes from permutations or from all pairs")
    known = _limits(
        None if whole is None else whole[0],
        [false for false, _ in pools],
        None if exact is None else exact.known,
    )
    worst = known
    if not complete:
        worst = _limits(
            None if whole is None else whole[1],
            [worst for _, worst in pools],
            None if exact is None else exact.worst,
        )
    if pools:
        method = f"{len(pools)} disjoint sub-pools of the encoded rows, t"
    else:
        method = "" if whole is None else f"t over {len(whole[0])} permutations"
    sizes = np.arange(2, len(known[0]) + 2)
    exact_up_to = 1 if exact is None or pools else min(exact.largest, len(known[0]) + 1)
    return ShareScan(sizes, *known, *worst, complete, exact_up_to, method)


def exact_scan(exact: ExactShares, *, complete: bool) -> ShareScan:
    """S at every integer where all of it is exact."""
    known, worst = exact.known, exact.known if complete else exact.worst
    sizes = np.arange(2, exact.largest + 1)
    return ShareScan(sizes, known, known, known, worst, worst, worst, complete, exact.largest, EXACT)


def scan_of_points(points: Sequence[SharePoint], *, complete: bool) -> ShareScan | None:
    """S at a ladder of sizes, each measured on batches of its own; None if none of them has an interval.

    Args:
        points: In ascending order of size.
        complete: Whether every pair is judged.
    """
    given = [point for point in points if point.estimate.low is not None]
    if not given:
        return None
    known = [point.estimate for point in given]
    worst = [point.worst_case or point.estimate for point in given]

    def column(estimates: list[Estimate], end: str) -> Floats:
        return np.array([getattr(estimate, end) for estimate in estimates], dtype=np.float64)

    return ShareScan(
        sizes=np.array([point.batch_size for point in given]),
        value=column(known, "value"),
        low=column(known, "low"),
        high=column(known, "high"),
        worst_value=column(worst, "value"),
        worst_low=column(worst, "low"),
        worst_high=column(worst, "high"),
        complete=complete,
        exact_up_to=1,
        method=known[-1].method,
    )


def _limits(
    shares: Floats | None, pools: list[Floats], exact: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """Value, low and high at every size; `exact` values stand for the first sizes, with no error but that of the pools."""
    if shares is None:
        assert exact is not None
        value = exact
        monte_carlo = np.zeros_like(value)
        low = high = value
    else:
        found = share_mean_intervals(shares, CONFIDENCE_LEVEL)
        value, low, high = found.value.copy(), found.low.copy(), found.high.copy()
        z = ndtri(0.5 + CONFIDENCE_LEVEL / 2)
        monte_carlo = np.maximum(high - value, value - low) / z
        if exact is not None:
            first = min(len(exact), len(value))
            value[:first] = low[:first] = high[:first] = exact[:first]
            monte_carlo[:first] = 0.0
    if not pools:
        return value, low, high
    drawn = np.stack(pools).var(axis=0, ddof=1) / len(pools)
    half = stdtrit(len(pools) - 1, 0.5 + CONFIDENCE_LEVEL / 2) * np.sqrt(drawn + monte_carlo**2)
    return value, np.clip(value - half, 0.0, 1.0), np.clip(value + half, 0.0, 1.0)
