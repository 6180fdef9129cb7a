"""q_N(i, j) of blocks of anchors at once, from histograms of their similarities (STATISTICS §3).

Let anchor i have M candidates, N − 1 of which are drawn without replacement, and x_k = exp(s_ik/T), y_k = exp(−t x_k). With
1/Σ = ∫ exp(−tΣ) dt, candidate j receives ::

    q_i(j) = (N−1)/M ∫ x_j y_j B_j(t) dt,      B_j = mean of Π y over draws of m = N − 2 candidates other than j

and q_i sums to 1. From φ = mean y and c² = mean y²/φ² − 1 over all M::

    A_m = mean of Π y over draws of m of all M ≈ φ^m exp(−c² m(m−1)/2(M−1))     (second-order cumulant; exact for m ≤ 1)
    B_j ∝ A_m − y_j m/(M−m+1) A_{m−1}      the first two terms of e_m(y without j) = Σ_k (−y_j)^k e_{m−k}(y)

which is exact at N = 2 and 3; up to N = n/20 the error of S is far below 1e-3. The grid of t doubles from point to point, so
that y_k(t)² = y_k(2t) is on it too: φ serves for c², and x y² for the second term of B, without further products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

__all__ = [
    "SMALLEST_TEMPERATURE",
    "BlockPush",
    "Counts",
    "Floats",
    "Histograms",
    "PushIntegral",
    "Singles",
    "received",
]

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Histograms = Singles | Floats

SMALLEST_TEMPERATURE = 0.003
"""Below it exp(−2/T) and its inverse leave the range of float64."""

_STEP = float(np.log(2.0))
"""Step h of the trapezoid rule in log t. Its error is the Fourier transform of exp(u − exp(u)) at 2π/h, |Γ(1 + 2πi/h)| =
5e-6 of the integral, much the same for all candidates, and gone once q sums to 1."""
_FLAT = 1e-4
"""Where the grid begins, N·t is at most this: the integrand is flat below, and summed as such."""
_DECAYED = 40.0
"""Where the grid ends, t·x is at least this for every candidate."""
_GONE = 45.0
"""Beyond where A_m is below exp(−this) for every anchor, the integrand is below float64's rounding of its sum."""
_NOTHING = 1e-8
"""φ below this is the rounding of 1 − φ; there A_m is as small, or (N = 3) no candidate that gets any push is left."""
_KEPT_TABLES = 32
"""Every block of anchors asks for the same tables again: one for each temperature, about 2 MB."""
_SPARSE_BELOW = 0.02
"""Histograms with a smaller share of occupied bins are multiplied as sparse ones."""


class Counts:
    """The histograms of a block of anchors, looked at once and then multiplied many times.

    Products are in float32, whose rounding is a hundredth of the integral's other errors: what is small is computed as such
    (1 − φ), and not as the rest of something large.

    Args:
        histograms: (r, bins) candidates of each anchor by similarity.
    """

    def __init__(self, histograms: Histograms) -> None:
        occupied = np.flatnonzero(histograms.any(axis=0))
        self.bins = slice(int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else slice(0, 1)
        """Outside of these all bins are empty."""
        counts = histograms[:, self.bins].astype(np.float32)
        self.each: Floats = counts.sum(axis=1, dtype=np.float64)
        """(r,) candidates of each anchor."""
        few = np.count_nonzero(counts) < _SPARSE_BELOW * counts.size
        self._counts = sparse.csr_array(counts) if few else counts

    def times(self, table: Singles) -> Singles:
        """Return (r, g) sums over the candidates of their bins' rows of a (bins, g) table."""
        return np.asarray(self._counts @ table[self.bins])


class PushIntegral:
    """What is the same for all anchors at one temperature.

    Args:
        centres: (bins,) similarities of the histograms' bins, ascending.
        temperature: T, at least `SMALLEST_TEMPERATURE`.
        largest: Largest N.
        lowest: The smallest similarity that can occur; sets where the integral may stop.

    Raises:
        ValueError: The temperature is too small.
    """

    def __init__(self, centres: Floats, *, temperature: float, largest: int, lowest: float = -1.0) -> None:
        if temperature < SMALLEST_TEMPERATURE:
            raise ValueError(f"temperatures below {SMALLEST_TEMPERATURE} have to be sampled")
        self._temperature = temperature
        tables = _tables(centres.astype(np.float64).tobytes(), temperature, largest, lowest)
        self._log_x, self._times, self._steps, self._decayed, self._push = tables

    def block(self, candidates: Counts, *, masked: Floats | None = None) -> BlockPush:
        """Take in a block of anchors.

        Args:
            candidates: All that can be drawn beside each anchor.
            masked: (r,) further candidates, which can be drawn but receive no push (x = 0); none by default.
        """
        # Beyond the point where the lowest occupied bin has decayed there is nothing; one more for y².
        ends = np.log(_DECAYED) - self._log_x[candidates.bins.start]
        points = min(len(self._times), int(np.searchsorted(self._times, np.exp(ends))) + 2)
        hidden = np.zeros(len(candidates.each)) if masked is None else masked
        candidates_each = candidates.each + hidden
        decayed = candidates.times(self._decayed[:, :points]) / candidates_each[:, None]
        phi = np.clip(1.0 - decayed, _NOTHING, 1.0)
        others = np.maximum(candidates_each - 1.0, 1.0)[:, None]
        # c² ≤ M − 1 for any M values; beyond the smallest φ the quotient is noise.
        spread = np.clip(phi[:, 1:] / phi[:, :-1] ** 2 - 1.0, 0.0, others)
        return BlockPush(
            candidates_each=candidates_each[:, None],
            phi=phi[:, :-1],
            log_phi=np.log(phi[:, :-1]).astype(np.float32),
            shrink=(spread / (2.0 * others)).astype(np.float32),
            times=self._times[: points - 1],
            steps=self._steps[: points - 2],
            push=self._push[:, : points - 1],
            temperature=self._temperature,
        )


@lru_cache(maxsize=_KEPT_TABLES)
def _tables(
    centres: bytes, temperature: float, largest: int, lowest: float
) -> tuple[Floats, Floats, Singles, Singles, Singles]:
    """What a `PushIntegral` looks up: log x by bin; t, and steps of the weights; 1 − exp(−t x), and the push, by bin and t."""
    # Similarities count from 1 down, so that x ≤ 1 and its range sets the range of t.
    log_x = (np.frombuffer(centres) - 1.0) / temperature
    first = np.log(_FLAT / largest)
    last = np.log(_DECAYED) + (1.0 - lowest) / temperature
    times = np.exp(np.arange(first, last + 2 * _STEP, _STEP))
    # dt = t du on the grid of u = log t; below its start the terms of the flat integrand halve from point to point.
    weights = times * _STEP
    weights[0] *= 2.0
    exponent = np.exp(log_x)[:, None] * times
    # The weights are in the push, since neither alone is in the range of float32.
    push = (np.exp(log_x)[:, None] * weights * np.exp(-exponent)).astype(np.float32)
    decayed = -np.expm1(-exponent).astype(np.float32)
    return log_x, times, (weights[:-1] / weights[1:]).astype(np.float32), decayed, push


@dataclass(frozen=True)
class BlockPush:
    """The integrand of a block of r anchors on a grid of g points of t; made by `PushIntegral.block`.

    Args:
        candidates_each: (r, 1) M of each anchor.
        phi, log_phi: (r, g) mean over its candidates of exp(−t x), and its logarithm.
        shrink: (r, g) c²/2(M−1).
        times: (g,) t.
        steps: (g − 1,) the quadrature's weight of each t over that of the next.
        push: (bins, g) x exp(−t x) of a candidate, with the quadrature's weights.
        temperature: T.
    """

    candidates_each: Floats
    phi: Floats
    log_phi: Singles
    shrink: Singles
    times: Floats
    steps: Singles
    push: Singles
    temperature: float

    def survival(self, size: int) -> Singles:
        """Return (r, p) A_m(t) for batches of `size` = N, as far as it is not gone."""
        drawn = size - 2
        points = len(self.times)
        if drawn:
            points = min(points, int(np.searchsorted(self._slowest_decay, _GONE / drawn)) + 2)
        exponent = self.log_phi[:, :points] * np.float32(drawn)
        exponent -= self.shrink[:, :points] * np.float32(drawn * (drawn - 1))
        survival: Singles = np.exp(exponent, out=exponent)
        return survival

    def with_positive(self, own: Floats) -> Singles:
        """Return (r, g) what multiplies `survival` where exp(s⁺/T) is in the denominator too, as in an InfoNCE update."""
        exponent = -self.times * np.exp((own - 1.0) / self.temperature)[:, None]
        return np.exp(exponent).astype(np.float32)

    def coefficients(self, survival: Singles, size: int) -> Singles:
        """Return (r, p) a with ∝ a[i] @ push[bin, :p] = q_i of a candidate in that bin.

        Args:
            survival: (r, p) of this block at this size.
            size: N.
        """
        drawn = size - 2
        if drawn == 0:
            return survival
        before = slice(0, survival.shape[1] - 1)
        ratio = drawn / (1.0 - (drawn - 1) / self.candidates_each)
        itself = np.minimum(ratio.astype(np.float32), self._most[:, before])
        itself *= self._step_by_mass[:, before]
        itself *= survival[:, before]
        coefficients = survival.copy()
        coefficients[:, 1:] -= itself
        return coefficients

    @cached_property
    def _slowest_decay(self) -> Singles:
        """(g,) what the anchor whose candidates decay last loses of log φ, ascending."""
        decay: Singles = -self.log_phi.max(axis=0)
        return decay

    @cached_property
    def _step_by_mass(self) -> Singles:
        """(r, g − 1) 1/Mφ, with the weight of t for that of 2t."""
        inverse: Singles = (self.steps / (self.candidates_each * self.phi[:, :-1])).astype(np.float32)
        return inverse

    @cached_property
    def _most(self) -> Singles:
        """(r, g) y_j ≤ min(1, Mφ): a factor of at most this keeps every push from going below 0 where m is not ≪ M."""
        return np.maximum(self.candidates_each * self.phi, 1.0).astype(np.float32)

    def mass(self, counts: Counts) -> Singles:
        """Return (r, g) the summed x exp(−t x) of these candidates, with the quadrature's weights."""
        return counts.times(self.push)


def received(mass: Singles, coefficients: Singles) -> Floats:
    """Return (r,) what the candidates behind `mass` receive; divide by what all candidates receive."""
    # Either may end earlier: where A_m is gone, or where no candidate is left in the lowest bins.
    points = min(mass.shape[1], coefficients.shape[1])
    total: Singles = np.einsum("rg,rg->r", mass[:, :points], coefficients[:, :points])
    return total.astype(np.float64)
