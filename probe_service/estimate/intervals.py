"""Intervals for means, shares, ratios and quantiles over independent batches, and over sub-pools of a sample.

Every function returns an `Interval` at the given confidence level (two-sided).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

__all__ = [
    "FEW_NONZERO",
    "Interval",
    "clopper_pearson",
    "grouped_quantile",
    "jackknife_ratio",
    "mean_interval",
    "pooled_interval",
    "share_mean_interval",
    "share_mean_intervals",
]

Floats = NDArray[np.float64]

FEW_NONZERO = 30
"""Fewer batches than this with a value above 0 are too few for a t interval of a share."""


@dataclass(frozen=True)
class Interval:
    """A value with its limits and the name of the method."""

    value: float
    low: float
    high: float
    method: str

    def clipped(self, low: float, high: float) -> Interval:
        """The same, kept within the range that the quantity can take."""
        return Interval(
            min(max(self.value, low), high),
            min(max(self.low, low), high),
            min(max(self.high, low), high),
            self.method,
        )


def mean_interval(values: Floats, level: float) -> Interval:
    """Student's t interval for the mean of independent values, one for each batch.

    Raises:
        ValueError: Fewer than two values.
    """
    count = len(values)
    if count < 2:
        raise ValueError("an interval needs at least two batches")
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / count**0.5
    half = float(stdtrit(count - 1, 0.5 + level / 2)) * error
    return Interval(mean, mean - half, mean + half, f"t over {count} batches")


def clopper_pearson(successes: int, trials: int, level: float) -> Interval:
    """Clopper–Pearson interval for a probability; Clopper and Pearson 1934."""
    tail = (1 - level) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, tail))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - tail))
    return Interval(successes / trials, low, high, f"Clopper–Pearson over {trials} batches")


def share_mean_interval(values: Floats, level: float) -> Interval:
    """Interval for the mean of values in [0, 1], many of which may be 0: `share_mean_intervals` of one column."""
    found = share_mean_intervals(values[:, None], level)
    return Interval(float(found.value[0]), float(found.low[0]), float(found.high[0]), found.methods[0])


@dataclass(frozen=True)
class ShareIntervals:
    """Intervals of several means, one a column.

    Args:
        value, low, high: (c,) each, 0–1.
        methods: How each was made.
    """

    value: Floats
    low: Floats
    high: Floats
    methods: list[str]


def share_mean_intervals(values: Floats, level: float) -> ShareIntervals:
    """Intervals for the means of columns of values in [0, 1], many of which may be 0.

    With at least `FEW_NONZERO` values above 0 (or all of them) this is the t interval. With fewer, t would claim too
    much: a run of zeros has no spread. Then the mean is P(value > 0) · E[value | value > 0], the first factor within its
    Clopper–Pearson limits, the second within its t limits (or [0, 1] below five values), each at (1 + level)/2, so that
    the product covers with at least `level` (Bonferroni).

    Args:
        values: (b, c), one row a batch.
        level: Confidence level.
    """
    batches = len(values)
    above = (values > 0).sum(axis=0)
    value = values.mean(axis=0)
    half = stdtrit(batches - 1, 0.5 + level / 2) * values.std(axis=0, ddof=1) / batches**0.5
    low, high = value - half, value + half
    few = above < min(FEW_NONZERO, batches)
    methods = [f"t over {batches} batches"] * len(value)
    if few.any():
        part = (1 + level) / 2
        tail = (1 - part) / 2
        hits = above[few]
        with np.errstate(invalid="ignore", divide="ignore"):
            share_low = np.where(hits == 0, 0.0, betaincinv(hits, batches - hits + 1, tail))
            share_high = np.where(hits == batches, 1.0, betaincinv(hits + 1, batches - hits, 1 - tail))
            size = values[:, few].sum(axis=0) / hits
            spread = np.where(values[:, few] > 0, values[:, few] - size, 0.0)
            error = np.sqrt((spread**2).sum(axis=0) / (hits - 1) / hits)
            size_half = stdtrit(np.maximum(hits - 1, 1), 0.5 + part / 2) * error
        enough = hits >= 5
        size_low = np.where(enough, size - size_half, 0.0)
        size_high = np.where(enough, size + size_half, 1.0)
        low[few] = share_low * np.clip(size_low, 0.0, 1.0)
        high[few] = share_high * np.clip(size_high, 0.0, 1.0)
        for column in np.flatnonzero(few):
            methods[column] = f"Clopper–Pearson for the {above[column]} of {batches} batches above 0, times t"
    value = np.clip(value, 0.0, 1.0)
    return ShareIntervals(
        value, np.clip(np.minimum(low, value), 0.0, 1.0), np.clip(np.maximum(high, value), 0.0, 1.0), methods
    )


def jackknife_ratio(numerators: Floats, denominators: Floats, level: float) -> Interval:
    """Delete-one jackknife for Σ numerators / Σ denominators over batches.

    Raises:
        ValueError: The denominators sum to 0, or there are fewer than two batches.
    """
    count = len(numerators)
    top, bottom = float(numerators.sum()), float(denominators.sum())
    if count < 2 or bottom == 0:
        raise ValueError("a ratio needs at least two batches and a denominator above 0")
    left_out = (top - numerators) / (bottom - denominators)
    value = top / bottom
    error = float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))
    half = float(stdtrit(count - 1, 0.5 + level / 2)) * error
    return Interval(value, value - half, value + half, f"jackknife over {count} batches")


def grouped_quantile(values: Floats, probability: float, level: float, *, groups: int = 20) -> Interval:
    """Interval for a quantile over anchors of (b, N) values, from groups of whole batches.

    Anchors of one batch share their candidates, so batches, not anchors, are the independent units: the quantile is
    taken in each of `groups` equal groups of batches, and its spread gives the interval.
    """
    used = min(groups, len(values))
    parts = np.array_split(values, used)
    spread = np.array([np.quantile(part, probability) for part in parts])
    value = float(np.quantile(values, probability))
    half = float(stdtrit(used - 1, 0.5 + level / 2)) * float(spread.std(ddof=1)) / used**0.5
    return Interval(value, value - half, value + half, f"quantiles of {used} groups of batches")


def pooled_interval(whole: Interval, pool_values: Floats, level: float) -> Interval:
    """Interval for a corpus of which only a sample of rows was encoded (STATISTICS §4, m < n).

    Args:
        whole: The figure from batches of all encoded rows, with its Monte Carlo interval at `level`.
        pool_values: (K,) the figure from batches within each of K disjoint random sub-pools.
        level: Confidence level.

    Returns:
        The whole's value. Its variance is the pools' variance over K (which rows were encoded) and the whole's own Monte
        Carlo variance; t with K − 1 degrees of freedom.
    """
    pools = len(pool_values)
    quantile = float(stdtrit(pools - 1, 0.5 + level / 2))
    drawn = float(pool_values.var(ddof=1)) / pools
    monte_carlo = max(whole.high - whole.value, whole.value - whole.low) / float(ndtri(0.5 + level / 2))
    half = quantile * (drawn + monte_carlo**2) ** 0.5
    return Interval(
        whole.value,
        whole.value - half,
        whole.value + half,
        f"{pools} disjoint sub-pools of the encoded rows, t",
    )
