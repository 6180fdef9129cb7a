"""The share of the push that a pair receives, for any batch size, from its anchor's row of similarities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

__all__ = ["RowPush", "push_of_row"]

Floats = NDArray[np.float64]

BINS = 256
"""Candidates of a row are binned by s/T, each bin with its exact mean of x; a bin is at most 0.16 wide at T = .05."""
_STEP = 0.5
"""Of the grid in log t. The trapezoid rule's error for x·t·exp(−x·t) over log t is about exp(−π²/step) = 3e-9."""
_TAIL = 1e-6
_NEWTON_STEPS = 60


@dataclass(frozen=True)
class RowPush:
    """q_N(i, ·) of one anchor i, at several batch sizes.

    Args:
        rows: n, rows of the corpus.
        sizes: The batch sizes N.
        offset: Largest s_ij/T of the row; x is kept as exp(s/T − offset).
        total: Σ x over the n − 1 candidates.
        temperature: T.
        times: (g,) grid of t, for the scaled x.
        log_multipliers: (sizes, g) log ρ(t); 0 where no integral is needed (N = 2 and N = n).
        weights: (sizes, g) quadrature weights: R(t)·t·dlog t over the normaliser.
    """

    rows: int
    sizes: tuple[int, ...]
    offset: float
    total: float
    temperature: float
    times: Floats
    log_multipliers: Floats
    weights: Floats

    def of(self, similarities: NDArray[np.floating]) -> Floats:
        """Return q_N(i, j) for candidates j with these similarities.

        Args:
            similarities: (c,) s_ij of candidates j ≠ i of this anchor.

        Returns:
            (c, sizes): the share of the whole batch's push, so that the sum over all ordered pairs is 1.
        """
        x = np.exp(_clamped(similarities) / self.temperature - self.offset)
        shares = np.empty((len(x), len(self.sizes)))
        for place, size in enumerate(self.sizes):
            if size == 2:
                shares[:, place] = 1.0 / (self.rows - 1)
            elif size == self.rows:
                shares[:, place] = x / self.total
            else:
                used = self.weights[place] > 0.0
                log_odds = self.log_multipliers[place, used] - self.times[used] * x[:, None]
                shares[:, place] = x * (expit(log_odds) @ self.weights[place, used])
        return shares / self.rows


def push_of_row(
    similarities: NDArray[np.floating], own: int, sizes: Sequence[int], temperature: float
) -> RowPush:
    """Prepare q_N(i, ·), the expected share of the push that each candidate of anchor i receives, for every size N.

    The naive equivalent, over all batches C of N − 1 other rows::

        q_N(i, j) = 1/n · mean over C of [ x_j / Σ_{k∈C} x_k if j in C else 0 ],    x = exp(s_i/T)

    so that Σ_j q_N(i, j) = 1/n. It is computed as follows (STATISTICS §3, corrected for drawing without replacement).
    x_j / Σ x_k = ∫ x_j exp(−t Σ_k x_k) dt. With y_k = exp(−t x_k), the mean over C of Π_{k∈C} y_k is
    R(t) = e_{N−1}(y) / C(n−1, N−1), e the elementary symmetric polynomial; and under the conditional Bernoulli law
    with odds ρ y_k (sample size N − 1) a candidate is in C with probability π_j = ρ y_j / (1 + ρ y_j) + O(1/n), ρ solving
    Σ π = N − 1. So q_N(i, j) = 1/n ∫ x_j π_j(t) R(t) dt, where R comes from the saddle point approximation of e, whose
    errors cancel against those at t = 0 (Hájek 1964; Daniels 1954). For N ≪ n this is the integral of STATISTICS §3;
    at N = n it is exact. The result is divided by its own sum over j, so that this is 1/n exactly.

    Args:
        similarities: (n,) s_ij of the anchor to all candidates; cosines, clamped to [−1, 1].
        own: Column of the anchor's own positive, which is no negative.
        sizes: Batch sizes N, each from 2 to n.
        temperature: T > 0.

    Returns:
        The anchor's push at each size.

    Raises:
        ValueError: A size is out of range.
    """
    n = len(similarities)
    if min(sizes) < 2 or max(sizes) > n:
        raise ValueError(f"batch sizes must be from 2 to {n}")
    logits = np.delete(_clamped(similarities), own) / temperature
    offset = float(logits.max())
    x, count = _binned(logits - offset)
    total = float((x * count).sum())
    # From where the largest batch begins to decide to where the smallest has decided.
    first = np.log(_TAIL * (n - 1) / (max(sizes) - 1) / total)
    last = np.log(-np.log(_TAIL) / float(x.min()))
    times = np.exp(np.arange(first, last + _STEP, _STEP))
    log_y = -times[:, None] * x
    log_mean_y = np.log(np.exp(log_y) @ count / (n - 1))
    log_multipliers = np.zeros((len(sizes), len(times)))
    weights = np.zeros_like(log_multipliers)
    for place, size in enumerate(sizes):
        if size in (2, n):  # one candidate has all the push; every candidate is in the batch
            continue
        # Drawing without replacement only lowers the mean of Π y (negative association), so what is left out is nothing.
        log_bound = (size - 1) * log_mean_y
        used = np.flatnonzero((log_bound > np.log(_TAIL)) & (times * total * (size - 1) > _TAIL * (n - 1)))
        log_multipliers[place, used], survival, hazard = _survival(x, log_y[used], count, size - 1)
        weight = survival * times[used]
        weights[place, used] = weight / (weight @ hazard)
    return RowPush(n, tuple(sizes), offset, total, temperature, times, log_multipliers, weights)


def _clamped(similarities: NDArray[np.floating]) -> Floats:
    return np.clip(similarities.astype(np.float64), -1.0, 1.0)


def _binned(logits: Floats) -> tuple[Floats, Floats]:
    """Return x and the number of candidates of each bin that is not empty."""
    low = float(logits.min())
    width = max(-low, 1e-12) / BINS
    index = np.minimum(((logits - low) / width).astype(np.int64), BINS - 1)
    count = np.bincount(index, minlength=BINS).astype(np.float64)
    summed = np.bincount(index, np.exp(logits), minlength=BINS)
    filled = count > 0
    return summed[filled] / count[filled], count[filled]


def _survival(x: Floats, log_y: Floats, count: Floats, drawn: int) -> tuple[Floats, Floats, Floats]:
    """Return log ρ(t), R(t) and the hazard Σ x π for `drawn` candidates of a row.

    Args:
        x: (b,) of the bins.
        log_y: (g, b) −t x.
        count: (b,).
        drawn: N − 1, below the number of candidates.
    """
    candidates = float(count.sum())
    odds = drawn / (candidates - drawn)
    # ρ is kept relative to the largest y at each t, so that nothing underflows where all y are tiny.
    largest = log_y.max(axis=1)
    y = np.exp(log_y - largest[:, None])
    rho = np.maximum(drawn / (y @ count), odds)
    low = np.full(len(rho), odds)
    high = odds * np.exp(np.minimum(largest - log_y.min(axis=1), 600.0))
    for _ in range(_NEWTON_STEPS):
        scaled = rho[:, None] * y
        included = scaled / (1.0 + scaled)
        excess = included @ count - drawn
        variance = (included * (1.0 - included)) @ count
        if np.all(np.abs(excess) <= 1e-9 * drawn):
            break
        # The sum of π increases with ρ; where Newton's step in log ρ leaves the bracket, halve the bracket instead.
        low, high = np.where(excess < 0, rho, low), np.where(excess > 0, rho, high)
        with np.errstate(over="ignore"):
            newton = rho * np.exp(np.clip(-excess / np.maximum(variance, 1e-300), -700.0, 700.0))
        rho = np.where((newton > low) & (newton < high), newton, np.sqrt(low) * np.sqrt(high))
    logs = np.log1p(scaled) @ count - drawn * (np.log(rho) - largest) - 0.5 * np.log1p(2 * np.pi * variance)
    at_zero = (
        candidates * np.log1p(odds)
        - drawn * np.log(odds)
        - 0.5 * np.log1p(2 * np.pi * drawn * (1.0 - drawn / candidates))
    )
    return np.log(rho) - largest, np.exp(np.minimum(logs - at_zero, 0.0)), included @ (x * count)
