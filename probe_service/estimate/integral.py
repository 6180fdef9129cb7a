"""q_N(i, j) of blocks of anchors at once, from histograms of their similarities (STATISTICS §3).

Let anchor i have M candidates, N − 1 of which are drawn without replacement, and x_k = exp(s_ik/T), y_k = exp(−t x_k). With
1/Σ = ∫ exp(−tΣ) dt, candidate j receives ::

    q_i(j) = (N−1)/M ∫ x_j y_j B_j(t) dt,      B_j = mean of Π y over draws of m = N − 2 candidates other than j

and q_i sums to 1. From φ = mean y and c² = mean y²/φ² − 1 over all M::

    A_m = mean of Π y over draws of m of all M ≈ φ^m exp(−c² m(m−1)/2(M−1))     (second-order cumulant; exact for m ≤ 1)
    B_j ∝ A_m − y_j m/(M−m+1) A_{m−1}      the first two terms of e_m(y without j) = Σ_k (−y_j)^k e_{m−k}(y)

which is exact at N = 2 and 3; up to N = n/20 the error of S is far below 1e-3. The grid of t doubles from point to point, so
that y_k(t)² = y_k(2t) is on it too: φ serves for c², and x y² for the second term of B, without further products.

All functions of s are smooth on the scale of T. So a histogram may be thinned: what a bin holds is shared out among the four
nearest nodes of a coarser grid, by the weights with which a cubic through these would be read off at the bin. Sums over the
thinned histogram are then those of interpolated functions: S is off by less than 1e-5, at a fraction of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    "Layer",
    "PushIntegral",
    "Singles",
    "inverse",
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
_WIDEST = 0.25
"""Nodes of a thinned histogram are at most this many T apart."""
_THINNED_AT_MOST = 5
"""How often a histogram is thinned by half at most."""
_BEYOND = 4
"""Nodes of a thinned histogram beyond either end of the bins: cubics need neighbours."""
_NEAR, _FAR = np.float32(9 / 16), np.float32(-1 / 16)
"""Weights of the two nearer and the two farther nodes of the cubic, half-way between nodes."""


class Counts:
    """The histograms of a block of anchors, looked at once and then multiplied many times.

    Products are in float32, whose rounding is a hundredth of the integral's other errors: what is small is computed as such
    (1 − φ), and not as the rest of something large.

    Args:
        histograms: (r, bins) candidates of each anchor by similarity.
    """

    def __init__(self, histograms: Histograms) -> None:
        self.histograms = histograms
        occupied = np.flatnonzero(histograms.any(axis=0))
        first, stop = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (0, 1)
        counts = histograms[:, first:stop].astype(np.float32)
        self.each: Floats = counts.sum(axis=1, dtype=np.float64)
        """(r,) candidates of each anchor."""
        self._thinned = [(first, counts)]
        self._multiplied: dict[int, Singles | sparse.csr_array] = {}

    @classmethod
    def of(cls, layer: Layer) -> Counts:
        """What several figures are computed from is best looked at once for all of them."""
        return layer if isinstance(layer, Counts) else cls(layer)

    def first(self, level: int) -> int:
        """The lowest occupied bin, or node of the histograms thinned by half `level` times."""
        return self._at(level)[0]

    def times(self, table: Singles, level: int) -> Singles:
        """Return (g, r) sums over the candidates of their nodes' rows of a table.

        Args:
            table: (nodes, g), with `_BEYOND` nodes on either side.
            level: How often the table's grid is thinned by half.
        """
        first, counts = self._at(level)
        if level not in self._multiplied:
            few = np.count_nonzero(counts) < _SPARSE_BELOW * counts.size
            self._multiplied[level] = sparse.csr_array(counts) if few else counts
        rows = table[first + _BEYOND : first + _BEYOND + counts.shape[1]]
        multiplied = self._multiplied[level]
        if isinstance(multiplied, np.ndarray):
            return np.asarray(rows.T @ multiplied.T)
        return np.ascontiguousarray((multiplied @ rows).T)

    def _at(self, level: int) -> tuple[int, Singles]:
        while len(self._thinned) <= level:
            self._thinned.append(_thin(*self._thinned[-1]))
        return self._thinned[level]


Layer = Histograms | Counts
"""(r, bins) candidates of each anchor by similarity."""


def _thin(first: int, counts: Singles) -> tuple[int, Singles]:
    """Share out what stands between every other node among its four neighbours.

    Args:
        first: Node of the first column.
        counts: (r, nodes).

    Returns:
        The same for a grid of half as many nodes: node i of it was node 2i.
    """
    if first % 2:
        counts = np.concatenate([np.zeros((len(counts), 1), dtype=np.float32), counts], axis=1)
        first -= 1
    kept, between = counts[:, ::2], counts[:, 1::2]
    thinned = np.zeros((len(counts), kept.shape[1] + 3), dtype=np.float32)
    thinned[:, 1:-2] = kept
    for weight, shifts in ((_FAR, (0, 3)), (_NEAR, (1, 2))):
        part = weight * between
        for shift in shifts:
            thinned[:, shift : shift + between.shape[1]] += part
    return first // 2 - 1, thinned


class PushIntegral:
    """What is the same for all anchors at one temperature.

    Args:
        centres: (bins,) similarities of the histograms' bins, evenly spaced, ascending.
        temperature: T, at least `SMALLEST_TEMPERATURE`.
        largest: Largest N.
        lowest: The smallest similarity that can occur; sets where the integral may stop.

    Raises:
        ValueError: The temperature is too small.
    """

    def __init__(self, centres: Floats, *, temperature: float, largest: int, lowest: float = -1.0) -> None:
        if temperature < SMALLEST_TEMPERATURE:
            raise ValueError(f"temperatures below {SMALLEST_TEMPERATURE} have to be sampled")
        self._tables = _tables(centres.astype(np.float64).tobytes(), temperature, largest, lowest)

    def block(self, candidates: Counts, *, masked: Floats | None = None) -> BlockPush:
        """Take in a block of anchors.

        Args:
            candidates: All that can be drawn beside each anchor.
            masked: (r,) further candidates, which can be drawn but receive no push (x = 0); none by default.
        """
        tables = self._tables
        # Beyond the point where the lowest occupied node has decayed there is nothing; one more for y².
        ends = np.log(_DECAYED) - tables.log_x[candidates.first(tables.level) + _BEYOND]
        points = min(len(tables.times), int(np.searchsorted(tables.times, np.exp(ends))) + 2)
        hidden = np.zeros(len(candidates.each)) if masked is None else masked
        candidates_each = candidates.each + hidden
        decayed = candidates.times(tables.decayed[:, :points], tables.level) / candidates_each
        phi = np.clip(1.0 - decayed, _NOTHING, 1.0)
        others = np.maximum(candidates_each - 1.0, 1.0)
        # c² ≤ M − 1 for any M values; beyond the smallest φ the quotient is noise.
        spread = np.clip(phi[1:] / phi[:-1] ** 2 - 1.0, 0.0, others)
        phi = phi[:-1]
        return BlockPush(
            candidates_each=candidates_each,
            log_phi=np.log(phi).astype(np.float32),
            shrink=(spread / (2.0 * others)).astype(np.float32),
            mass_inverse=(1.0 / (candidates_each * phi)).astype(np.float32),
            tables=tables,
        )


@dataclass(frozen=True)
class _Tables:
    """What a `PushIntegral` looks up.

    Args:
        centres: (bins,) similarities of the bins.
        temperature: T.
        level: How often the histograms are thinned by half.
        log_x: (nodes,) log x.
        times: (g,) t.
        weights: (g,) of the quadrature.
        decayed: (nodes, g) 1 − exp(−t x).
        push: (nodes, g) x exp(−t x), with the quadrature's weights.
    """

    centres: Floats
    temperature: float
    level: int
    log_x: Floats
    times: Floats
    weights: Floats
    decayed: Singles
    push: Singles

    @cached_property
    def steps(self) -> Singles:
        """(g − 1,) the quadrature's weight of each t over that of the next."""
        ratio: Singles = (self.weights[:-1] / self.weights[1:]).astype(np.float32)
        return ratio

    @cached_property
    def push_by_bin(self) -> Singles:
        """(bins, g) `push` of a candidate in each bin."""
        return _push(_log_x(self.centres, self.temperature), self.times, self.weights)


@lru_cache(maxsize=_KEPT_TABLES)
def _tables(centres_bytes: bytes, temperature: float, largest: int, lowest: float) -> _Tables:
    centres = np.frombuffer(centres_bytes)
    width = float(centres[-1] - centres[0]) / (len(centres) - 1)
    level = min(max(int(np.floor(np.log2(_WIDEST * temperature / width))), 0), _THINNED_AT_MOST)
    nodes = np.arange(-_BEYOND, -(-(len(centres) - 1) // 2**level) + 1 + _BEYOND)
    log_x = _log_x(centres[0] + nodes * (width * 2**level), temperature)
    first = np.log(_FLAT / largest)
    last = np.log(_DECAYED) + (1.0 - lowest) / temperature
    times = np.exp(np.arange(first, last + 2 * _STEP, _STEP))
    # dt = t du on the grid of u = log t; below its start the terms of the flat integrand halve from point to point.
    weights = times * _STEP
    weights[0] *= 2.0
    decayed = -np.expm1(-np.exp(log_x)[:, None] * times).astype(np.float32)
    push = _push(log_x, times, weights)
    return _Tables(centres, temperature, level, log_x, times, weights, decayed, push)


def _log_x(similarities: Floats, temperature: float) -> Floats:
    # Similarities count from 1 down, so that x ≤ 1 and its range sets the range of t.
    log_x: Floats = (similarities - 1.0) / temperature
    return log_x


def _push(log_x: Floats, times: Floats, weights: Floats) -> Singles:
    x = np.exp(log_x)[:, None]
    # The weights are in the push, since neither alone is in the range of float32.
    push: Singles = (x * weights * np.exp(-x * times)).astype(np.float32)
    return push


@dataclass(frozen=True)
class BlockPush:
    """The integrand of a block of r anchors on a grid of g points of t; made by `PushIntegral.block`.

    Points come first, anchors second: what is cut off is then the end of an array.

    Args:
        candidates_each: (r,) M of each anchor.
        log_phi: (g, r) logarithm of φ, the mean over its candidates of exp(−t x).
        shrink: (g, r) c²/2(M−1).
        mass_inverse: (g, r) 1/Mφ.
        tables: What is the same for all anchors.
    """

    candidates_each: Floats
    log_phi: Singles
    shrink: Singles
    mass_inverse: Singles
    tables: _Tables

    @property
    def points(self) -> int:
        """How many."""
        return len(self.log_phi)

    def mass(self, counts: Counts) -> Singles:
        """Return (g, r) the summed x exp(−t x) of these candidates, with the quadrature's weights."""
        return counts.times(self.tables.push[:, : self.points], self.tables.level)

    def received(
        self, sizes: Sequence[float], masses: Sequence[Singles], *, own: Floats | None = None
    ) -> Floats:
        """Return (k, sizes, r) what the candidates behind each of k masses receive, up to a factor common to an anchor's.

        Dividing by what all its candidates receive takes the quadrature's error out too.

        Args:
            sizes: N, each at least 2; between integers it is the smooth function through them.
            masses: (g, r) each, see `mass`; those of another block may have other points beyond some t.
            own: (r,) s⁺, where exp(s⁺/T) is in the denominator too, as in an InfoNCE update.
        """
        stacked = np.stack([mass[: min(map(len, masses))] for mass in masses])
        positive = self._no_positive if own is None else self._with_positive(own)
        found = np.empty((len(masses), len(sizes), len(self.candidates_each)))
        for at, size in enumerate(sizes):
            coefficients = self._coefficients(size, positive)[: stacked.shape[1]]
            found[:, at] = np.einsum("gr,kgr->kr", coefficients, stacked[:, : len(coefficients)])
        return found

    def by_bin(self, size: int, bins: slice) -> Singles:
        """Return (r, bins) what one candidate in each bin receives, up to the factor of `received`.

        Args:
            size: N.
            bins: Which bins.
        """
        coefficients = self._coefficients(size, self._no_positive)
        found: Singles = coefficients.T @ self.tables.push_by_bin[bins, : len(coefficients)].T
        return found

    def _coefficients(self, size: float, positive: Singles) -> Singles:
        """Return (p, r) a with Σ_t a[t, i] · `push`[bin, t] ∝ q_i of a candidate in that bin, as far as A_m is not gone."""
        from probe_service.estimate import compiled

        drawn = size - 2
        points = self.points
        if drawn:
            points = min(points, int(np.searchsorted(self._slowest_decay, _GONE / drawn)) + 2)
        found = np.empty((points, len(self.candidates_each)), dtype=np.float32)
        compiled.push_coefficients(
            self.log_phi,
            self.shrink,
            self._itself,
            self._itself_at_most,
            positive,
            (drawn / (1.0 - (drawn - 1) / self.candidates_each)).astype(np.float32),
            np.float32(drawn),
            found,
        )
        return found

    @property
    def _no_positive(self) -> Singles:
        return np.empty((0, len(self.candidates_each)), dtype=np.float32)

    def _with_positive(self, own: Floats) -> Singles:
        exponent = -self.tables.times[: self.points, None] * np.exp(_log_x(own, self.tables.temperature))
        return np.exp(exponent).astype(np.float32)

    @cached_property
    def _slowest_decay(self) -> Singles:
        """(g,) what the anchor whose candidates decay last loses of log φ, ascending."""
        decay: Singles = -self.log_phi.max(axis=1)
        return decay

    @cached_property
    def _itself(self) -> Singles:
        """(g, r) 1/Mφ, with the weight of t for that of 2t."""
        return self.mass_inverse * self.tables.steps[: self.points, None]

    @cached_property
    def _itself_at_most(self) -> Singles:
        """(g, r) y_j ≤ min(1, Mφ): a factor of at most this keeps every push from going below 0 where m is not ≪ M."""
        return np.maximum(self.mass_inverse, np.float32(1.0)) * self.tables.steps[: self.points, None]


def inverse(total: Floats) -> Floats:
    """Return 1 / total, by which what is `received` becomes a share of it; 0 where there is nothing to receive."""
    return np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
