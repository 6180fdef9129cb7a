"""The difference of every figure between two corpora or encoders at one batch size, with an interval that covers.

Where both sides were measured on common batches (`CommonBatches`), the spread of the differences batch by batch gives the
interval; where they were measured apart, the limits of both sides do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from probe_service.estimate.closed_form import anchors_with_false_negative, false_negatives_per_anchor
from probe_service.estimate.evidence import Evidence
from probe_service.estimate.exact import EXACT, ExactFigures
from probe_service.estimate.intervals import (
    FEW_NONZERO,
    Interval,
    mean_interval,
    pooled_interval,
    share_mean_interval,
)
from probe_service.schemas import CONFIDENCE_LEVEL, Estimate, FigureComparison

__all__ = ["Reading", "Side", "compare_figures", "independent_difference", "paired_difference"]

Floats = NDArray[np.float64]
Measured = Mapping[str, Floats]

CLOSED = "closed form over the whole corpus"
NOTHING_KNOWN = "no row of the corpus has a known false negative"
UNCHANGED = "the same rows on both sides, with all that this depends on"
TOO_FEW_ROWS = "no interval: too few rows are encoded for sub-pools of batches this large"


@dataclass(frozen=True)
class Side:
    """What was measured of one corpus at one batch size.

    Args:
        whole: Per-batch columns from batches of all encoded rows (`similarity.BatchMeasurements` by field).
        pools: The same from batches within each sub-pool; None where every row is encoded, empty where the batch is too
            large for sub-pools.
        pool_rows: Rows of each sub-pool.
        evidence: Of the encoded rows.
        complete: Whether every pair is judged.
        plain: Whether an anchor's candidates are the other rows' positives alone, so that numbers of false negatives have a
            closed form.
        exact: Figures of the encoded rows without Monte Carlo error, used in place of the sampled ones.
    """

    whole: Measured
    pools: Sequence[Measured] | None
    pool_rows: Sequence[NDArray[np.int64]]
    evidence: Evidence
    complete: bool
    plain: bool
    exact: ExactFigures | None


@dataclass(frozen=True)
class Reading:
    """One figure of one side: its value, and all that its error can be read from.

    Args:
        value: The figure.
        low, high: The range that it can take.
        batches: (b, 1) values of which the figure is the mean, or (b, 2) numerators and denominators of which it is the ratio
            of the sums; None where it has no Monte Carlo error.
        pools: (K,) the figure in each sub-pool; None where every row is encoded, empty where there is no interval.
        method: How a value without Monte Carlo error was obtained.
    """

    value: float
    low: float
    high: float
    batches: Floats | None
    pools: Floats | None
    method: str = ""

    @property
    def is_ratio(self) -> bool:
        """Whether the figure is a ratio of sums over batches."""
        return self.batches is not None and self.batches.shape[1] == 2

    @cached_property
    def influence(self) -> Floats:
        """(b,) values whose mean errs as the figure does: the values themselves, or a ratio's jackknife pseudo-values."""
        assert self.batches is not None
        if not self.is_ratio:
            return self.batches[:, 0]
        top, bottom = self.batches.T
        left_out: Floats = (top.sum() - top) / (bottom.sum() - bottom)
        return len(top) * self.value - (len(top) - 1) * left_out

    def interval(self) -> Interval | None:
        """The figure's own interval; None where too few rows are encoded for one."""
        found = self.monte_carlo()
        if self.pools is not None:
            if not len(self.pools):
                return None
            found = pooled_interval(found, self.pools, CONFIDENCE_LEVEL)
        return found.clipped(self.low, self.high)

    def monte_carlo(self) -> Interval:
        """The interval that holds the error of drawing batches, and no other."""
        if self.batches is None:
            return Interval(self.value, self.value, self.value, self.method)
        if self.is_ratio:
            return _centred(self.value, self.influence, f"jackknife over {len(self.batches)} batches")
        if self.low < 0.0:
            return mean_interval(self.influence, CONFIDENCE_LEVEL)
        # What cannot be negative may be 0 in most batches.
        share = share_mean_interval(self.influence / self.high, CONFIDENCE_LEVEL)
        return Interval(self.value, share.low * self.high, share.high * self.high, share.method)


def paired_difference(a: Reading, b: Reading) -> Estimate:
    """Return B − A from common batches, and from sub-pools that both have in common.

    - Every row encoded: t over the differences of the batches. A ratio's are those of its pseudo-values: the jackknife that
      leaves a batch out on both sides.
    - A sample encoded: the variance of the sub-pools' differences over K, and the Monte Carlo variance beside it
      (`pooled_interval`).

    Where fewer than `FEW_NONZERO` batches differ, or fewer than half of the sub-pools, a handful of changed rows makes all the
    difference, and its spread is not known. The limits of both sides are then combined as if they had been measured apart:
    what they have in common only makes that interval wider than need be.
    """
    if a.batches is None or b.batches is None:
        # A side without Monte Carlo error leaves nothing to take out.
        found = _apart(a.monte_carlo(), b.monte_carlo())
    elif int((a.batches != b.batches).any(axis=1).sum()) < min(FEW_NONZERO, len(b.batches)):
        return independent_difference(a, b)
    else:
        how = "paired jackknife" if b.is_ratio else "t"
        method = f"{how} over {len(b.batches)} common batches"
        found = _centred(b.value - a.value, b.influence - a.influence, method)
    if a.pools is not None and b.pools is not None:
        pools = b.pools - a.pools
        if 2 * int((pools != 0).sum()) < len(pools) or not len(pools):
            return independent_difference(a, b)
        pooled = pooled_interval(found, pools, CONFIDENCE_LEVEL)
        method = f"differences in {len(pools)} common disjoint sub-pools, t"
        found = Interval(pooled.value, pooled.low, pooled.high, method)
    span = b.high - b.low
    return _estimate(found.clipped(-span, span))


def independent_difference(a: Reading, b: Reading) -> Estimate:
    """Return B − A of two sides that were measured apart.

    The limits are combined as squared distances from their values (MOVER; Zou and Donner 2008)::

        low = b − a − √((b − b.low)² + (a.high − a)²),   high = b − a + √((b.high − b)² + (a − a.low)²)

    For means with t limits this is Welch's interval with each side's own quantile in place of one for both. It also holds
    for limits that are not symmetric, as those of rare events, and for a side without error, which adds nothing.
    """
    interval_a, interval_b = a.interval(), b.interval()
    if interval_a is None or interval_b is None:
        return _without_interval(b.value - a.value, TOO_FEW_ROWS)
    return _estimate(_apart(interval_a, interval_b))


def compare_figures(
    size: int, a: Side, b: Side, *, coupled: bool, unchanged: Set[str] = frozenset()
) -> dict[str, FigureComparison]:
    """Compare every figure of STATISTICS §1 that both sides have, at one batch size.

    Where a side has unjudged pairs, a figure that counts false negatives is known within bounds only: its value is the lower
    bound from the known pairs, and its upper limit the worst case's. The difference then lies between the known pairs of B
    less the worst case of A, and the worst case of B less the known pairs of A.

    Args:
        size: N.
        a: What was measured of A.
        b: What was measured of B.
        coupled: Whether batch r of A and batch r of B, and the sub-pools, were drawn together.
        unchanged: Figures that cannot differ, since all that they depend on is the same on both sides.

    Returns:
        By name of the field in `CurvePoint`.
    """
    # What common batches take out of the difference is lost if only one side is exact.
    use_exact = not coupled or (a.exact is not None and b.exact is not None)
    of_a, of_b = (_Figures(size, side, use_exact=use_exact).all() for side in (a, b))
    # Where every pair is judged, S itself is known, and its bounds say nothing more.
    left_out = ("certain_share", "worst_case") if a.complete and b.complete else ()
    compared = {
        name: _compare(of_a[name], of_b[name], coupled=coupled)
        for name in of_a
        if name in of_b and name not in left_out
    }
    for name in unchanged & compared.keys():
        none = Estimate(value=0.0, low=0.0, high=0.0, method=UNCHANGED)
        compared[name] = compared[name].model_copy(update={"difference": none, "width_share": None})
    return compared


@dataclass(frozen=True)
class _Bounds:
    """A figure from the known pairs alone, and in the worst case; the same reading where every pair is judged."""

    known: Reading
    worst: Reading

    def estimate(self) -> Estimate:
        known, worst = (
            _without_interval(reading.value, TOO_FEW_ROWS) if interval is None else _estimate(interval)
            for reading, interval in ((r, r.interval()) for r in (self.known, self.worst))
        )
        return known if self.known is self.worst else _between(self.known.value, known, worst)


def _compare(a: _Bounds, b: _Bounds, *, coupled: bool) -> FigureComparison:
    difference = paired_difference if coupled else independent_difference
    from_known = difference(a.known, b.known)
    if a.known is a.worst and b.known is b.worst:
        found = from_known
    else:
        found = _between(from_known.value, difference(a.worst, b.known), difference(a.known, b.worst))
    width_share = None
    if coupled and found is from_known:
        apart = _width(independent_difference(a.known, b.known))
        together = _width(found)
        width_share = together / apart if together is not None and apart else None
    return FigureComparison(a=a.estimate(), b=b.estimate(), difference=found, width_share=width_share)


class _Figures:
    """All figures of one side."""

    def __init__(self, size: int, side: Side, *, use_exact: bool) -> None:
        self._size, self._side = size, side
        self._exact = side.exact if use_exact else None
        self._complete = side.complete
        self._partners = side.evidence.false_negative_counts()

    def all(self) -> dict[str, _Bounds]:
        exact, others = self._exact, float(self._size - 1)
        share = self._bounds(
            self._known_share("false_share", self._partners, None if exact is None else exact.known),
            self._mean("worst_share", 0.0, 1.0, None if exact is None else exact.worst),
        )
        found = {
            "false_negative_softmax_share": share,
            "false_negative_gradient_share": self._gradient_share(),
            "certain_share": self._alone(
                self._known_share(
                    "certain_share", self._side.evidence.texts_only().false_negative_counts(), None
                )
            ),
            "worst_case": None if share is None else self._alone(share.worst),
            "false_negatives_per_anchor": self._bounds(
                self._closed(false_negatives_per_anchor, others)
                if self._side.plain
                else self._mean("false_count", 0.0, others),
                self._mean("worst_count", 0.0, others),
            ),
            "anchors_with_false_negative": self._bounds(
                self._closed(anchors_with_false_negative, 1.0)
                if self._side.plain
                else self._mean("false_any_share", 0.0, 1.0),
                self._mean("worst_any_share", 0.0, 1.0),
            ),
            "top_k_mean": self._alone(self._mean("top_k", -1.0, 1.0)),
            "hardest_negative": self._alone(
                self._mean("hardest_negative", -1.0, 1.0, None if exact is None else exact.hardest_negative)
            ),
        }
        return {name: bounds for name, bounds in found.items() if bounds is not None}

    def _bounds(self, known: Reading | None, worst: Reading | None) -> _Bounds | None:
        if self._complete:
            return self._alone(known)
        return None if known is None or worst is None else _Bounds(known, worst)

    def _alone(self, reading: Reading | None) -> _Bounds | None:
        return None if reading is None else _Bounds(reading, reading)

    def _known_share(self, name: str, partners: NDArray[np.int64], exact: float | None) -> Reading | None:
        if self._side.plain and self._side.pools is None and not partners.any():
            return Reading(0.0, 0.0, 1.0, None, None, NOTHING_KNOWN)
        return self._mean(name, 0.0, 1.0, exact)

    def _gradient_share(self) -> _Bounds | None:
        def ratio(name: str, exact: float | None) -> Reading | None:
            columns = (name, "update_weight")
            return self._sampled(lambda m: np.stack([m[each] for each in columns], axis=1), 0.0, 1.0, exact)

        known, worst = (
            (None, None) if self._exact is None else (self._exact.known_update, self._exact.worst_update)
        )
        return self._bounds(ratio("false_update", known), ratio("worst_update", worst))

    def _mean(self, name: str, low: float, high: float, exact: float | None = None) -> Reading | None:
        # The mean over several columns (the k ranks) is one value of each batch.
        return self._sampled(
            lambda m: m[name].reshape(len(m[name]), -1).mean(axis=1, keepdims=True), low, high, exact
        )

    def _sampled(
        self, columns: Callable[[Measured], Floats], low: float, high: float, exact: float | None
    ) -> Reading | None:
        def value(batches: Floats) -> float:
            sums = batches.mean(axis=0)
            return float(sums[0] / sums[1]) if len(sums) == 2 else float(sums[0])

        batches, pools = columns(self._side.whole), self._side.pools
        if np.isnan(batches).any() or (batches.shape[1] == 2 and not batches[:, 1].sum() > 0):
            return None
        in_pools = None if pools is None else np.array([value(columns(pool)) for pool in pools])
        if exact is not None:
            return Reading(exact, low, high, None, in_pools, EXACT)
        return Reading(value(batches), low, high, batches, in_pools)

    def _closed(self, form: Callable[[NDArray[np.int64], int], float], high: float) -> Reading:
        side = self._side
        pools = None
        if side.pools is not None:
            rows_of_pools = side.pool_rows if side.pools else []
            pools = np.array(
                [
                    form(side.evidence.subset(rows).false_negative_counts(), self._size)
                    for rows in rows_of_pools
                ]
            )
        return Reading(form(self._partners, self._size), 0.0, high, None, pools, CLOSED)


def _apart(a: Interval, b: Interval) -> Interval:
    value = b.value - a.value
    below = float(np.hypot(b.value - b.low, a.high - a.value))
    above = float(np.hypot(b.high - b.value, a.value - a.low))
    combined = f"limits of both sides combined (A: {a.method}; B: {b.method})"
    method = b.method if below == above == 0.0 else combined
    return Interval(value, value - below, value + above, method)


def _centred(value: float, influence: Floats, method: str) -> Interval:
    """The t interval round a value whose error is that of the mean of `influence`."""
    count = len(influence)
    error = float(influence.std(ddof=1)) / count**0.5
    half = float(stdtrit(count - 1, 0.5 + CONFIDENCE_LEVEL / 2)) * error
    return Interval(value, value - half, value + half, method)


def _between(value: float, lowest: Estimate, highest: Estimate) -> Estimate:
    """A quantity of which only bounds are known."""
    if lowest.low is None or highest.high is None:
        return _without_interval(value, lowest.method if lowest.low is None else highest.method)
    return Estimate(
        value=value,
        low=min(lowest.low, value),
        high=max(highest.high, value),
        method=f"the value from known pairs alone; between known pairs and the worst case ({lowest.method}; {highest.method})",
    )


def _estimate(found: Interval) -> Estimate:
    low, high = min(found.low, found.value), max(found.high, found.value)
    return Estimate(value=found.value, low=low, high=high, method=found.method)


def _without_interval(value: float, reason: str) -> Estimate:
    return Estimate(value=value, low=None, high=None, method=reason)


def _width(estimate: Estimate) -> float | None:
    return None if estimate.low is None or estimate.high is None else estimate.high - estimate.low
