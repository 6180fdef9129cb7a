"""Expectations over batches without drawing any: from the similarities of all ordered pairs (STATISTICS §3).

For anchor i and candidate j, with x_ij = exp(s_ij/T) and N − 1 candidates drawn at random, the expected softmax weight that
lands on j is ::

    q_N(i, j) = (N−1)/(n(n−1)) ∫₀^∞ x_ij exp(−t x_ij) E[exp(−t Σ of the N − 2 others)] dt

which follows from 1/Σ = ∫ exp(−tΣ) dt. With replacement the expectation is φ_i(t)^(N−2), φ_i(t) = mean_j exp(−t x_ij);
drawing without replacement multiplies it by about exp(−c²(N−2)(N−3)/2(n−1)), c the coefficient of variation of exp(−t x_ij)
over j (the second-order term of the cumulant expansion), which keeps the relative error small well beyond N = n/20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

__all__ = ["EXACT", "ExactFigures", "ExactShares", "ShareAccumulator", "expected_maximum"]

EXACT = "exact over all pairs of the corpus"

Floats = NDArray[np.float64]

_LOG_STEP = 0.5
"""Step h of the trapezoid rule in log t. Its error is the Fourier transform of exp(u − exp(u)) at 2π/h, |Γ(1 + 2πi/h)|,
which is 2e-8 here: the integrand is analytic."""
_LEFT_OUT = 1e-7
"""Relative weight of the integral below the grid, at most."""
_PRUNE_EVERY = 32
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class ExactShares:
    """Shares at N = 2, 3, …, L + 1.

    Args:
        known: (L,) false_negative_softmax_share from the known pairs.
        worst: (L,) with the worst case's pairs counted too.
        known_update, worst_update: (L,) false_negative_gradient_share; None without positives.
    """

    known: Floats
    worst: Floats
    known_update: Floats | None
    worst_update: Floats | None

    @property
    def largest(self) -> int:
        """The largest N."""
        return len(self.known) + 1

    @classmethod
    def from_sums(cls, sums: Floats, *, rows: int) -> ExactShares:
        """Finish the sums of all blocks of `ShareAccumulator`, added up.

        Args:
            sums: (5, L) see `ShareAccumulator.sums`.
            rows: n, anchors in all.
        """
        known, worst = np.clip(sums[:2] / rows, 0.0, 1.0)
        if not sums[4].any():
            return cls(known, worst, None, None)
        known_update, worst_update = np.clip(sums[2:4] / sums[4], 0.0, 1.0)
        return cls(known, worst, known_update, worst_update)


@dataclass(frozen=True)
class ExactFigures:
    """The figures of one batch size that all pairs give without batches.

    Args:
        known, worst: false_negative_softmax_share, and in the worst case.
        known_update, worst_update: false_negative_gradient_share; None without positives.
        hardest_negative: Mean over anchors of the expected largest similarity.
        pairs_above: (thresholds,) expected negative pairs of a batch.
    """

    known: float
    worst: float
    known_update: float | None
    worst_update: float | None
    hardest_negative: float
    pairs_above: Floats


class ShareAccumulator:
    """Adds up S(N), and G(N) for pairs, over blocks of anchors, for every integer N up to `largest`.

    Args:
        centres: (bins,) similarities of the histogram's bins.
        lowest: The smallest similarity that occurs; sets where the integral may stop.
        rows: n, anchors in all.
        largest: Largest N.
        temperature: T > 0.
    """

    def __init__(
        self, centres: Floats, *, lowest: float, rows: int, largest: int, temperature: float
    ) -> None:
        # Similarities count from 1 down: x ≤ 1, and its range sets the range of t.
        log_x = (centres - 1.0) / temperature
        self._x = np.exp(log_x)
        begin = np.log(_LEFT_OUT / largest)
        end = np.log(40.0) + (1.0 - lowest) / temperature
        self._t = np.exp(np.arange(begin, end + _LOG_STEP, _LOG_STEP))
        # dt = t du on the grid of u = log t; below its start the integrand is flat in t.
        self._weights = self._t * _LOG_STEP
        self._decay = np.exp(-self._x[:, None] * self._t[None, :])
        self._rows, self._largest, self._temperature = rows, largest, temperature
        self.sums = np.zeros((5, largest - 1))

    def add(
        self,
        candidates: NDArray[np.float32],
        known: NDArray[np.float32],
        worst: NDArray[np.float32] | None,
        own: Floats | None,
        checkpoint: Callable[[], None],
    ) -> None:
        """Take in the histograms of a block of anchors."""
        others = self._rows - 1
        counts = candidates.astype(np.float64)
        push = self._x[:, None] * self._decay
        phi = np.clip(counts @ self._decay / others, 1e-150, 1.0)
        # c² ≤ n − 1 for any n values; beyond the smallest φ the quotient is noise.
        spread = np.clip(counts @ self._decay**2 / others / phi**2 - 1.0, 0.0, others)
        shrink = np.exp(-spread / max(others, 1))
        stacked = [counts @ push, known.astype(np.float64) @ push]
        if worst is not None:
            stacked.append(worst.astype(np.float64) @ push)
        targets = np.stack(stacked)
        rest = np.broadcast_to(self._weights, phi.shape).copy()
        positive = None
        if own is not None:
            # An InfoNCE update adds the positive to the denominator: exp(−t x⁺) multiplies the integrand.
            positive = np.exp(-np.exp((own[:, None] - 1.0) / self._temperature) * self._t[None, :])
        for size in range(2, self._largest + 1):
            if size > 2:
                # From m to m + 1 others: φ^m exp(−c² m(m−1)/2(n−1)) grows by φ exp(−c² m/(n−1)).
                rest *= phi
                phi *= shrink
            if size % _PRUNE_EVERY == 0:
                checkpoint()
                pieces = targets[0] * rest
                alive = (pieces > _NEGLIGIBLE * pieces.max(axis=1, keepdims=True)).any(axis=0)
                rest, phi, shrink, targets = (
                    rest[:, alive],
                    phi[:, alive],
                    shrink[:, alive],
                    targets[:, :, alive],
                )
                positive = None if positive is None else positive[:, alive]
            # q sums to 1 over the candidates of an anchor; dividing by the sum takes the rule's error out.
            mass = np.einsum("krt,rt->kr", targets, rest)
            shares = mass[1:] / np.where(mass[0] > 0, mass[0], 1.0)
            at = size - 2
            self.sums[: len(shares), at] += shares.sum(axis=1)
            if positive is not None:
                updates = (size - 1) * np.einsum("krt,rt,rt->k", targets, rest, positive)
                self.sums[4, at] += updates[0]
                self.sums[2 : 1 + len(updates), at] += updates[1:]
        if worst is None:
            self.sums[1] = self.sums[0]
            self.sums[3] = self.sums[2]


def expected_maximum(candidates: NDArray[np.float32], centres: Floats, batch_size: int) -> float:
    """Return the mean over anchors of the expected largest similarity of N − 1 candidates drawn without replacement.

    P(largest ≤ bin) = C(candidates up to the bin, N−1) / C(all, N−1), exact but for the bins' width.

    Args:
        candidates: (r, bins) counts by similarity, ascending.
        centres: (bins,) similarities.
        batch_size: N.
    """
    below = np.cumsum(candidates.astype(np.float64), axis=1)
    drawn = batch_size - 1
    possible = below >= drawn
    log_ways = np.full(below.shape, -np.inf)
    log_ways[possible] = gammaln(below[possible] + 1) - gammaln(below[possible] - drawn + 1)
    cumulative = np.exp(log_ways - log_ways[:, -1:])
    probability = np.diff(cumulative, axis=1, prepend=0.0)
    return float((probability @ centres).mean())
