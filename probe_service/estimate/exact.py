"""Expectations over batches without drawing any: from the similarities of all ordered pairs (STATISTICS §3).

The pass over all pairs leaves histograms of each anchor's candidates by similarity; `estimate.integral` turns them into the
push that a candidate in each bin can expect. Bins of 0.001 are narrow enough: at T = .01, where x changes by a tenth within
a bin, S is off by about 1e-5, since the errors of an anchor's pairs have no common sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import gammaln

from probe_service.estimate.integral import Counts, Floats, Histograms, Layer, PushIntegral, inverse

__all__ = [
    "EXACT",
    "TEMPERATURES",
    "ExactFigures",
    "ExactShares",
    "ShareAccumulator",
    "ShareGrid",
    "SizeScan",
    "expected_maximum",
]

EXACT = "exact over all pairs of the corpus"

TEMPERATURES = tuple(
    np.concatenate([np.geomspace(0.01, 0.05, 11)[:-1], np.geomspace(0.05, 0.2, 10)]).tolist()
)
"""Temperatures to show S at: evenly spaced in log T on either side of .05, which is one of them."""

_NODES = 24


@dataclass(frozen=True)
class SizeScan:
    """The sizes at which a figure is computed to know it at every integer N from 2 to `largest`.

    Shares are analytic in log N, as the integral is where N is no integer too. The polynomial through 24 Chebyshev points of
    log N, 2 and the largest N among them, is off by less than 1e-6 for shares, and by 1e-5 at most for the chance that nothing
    but masked candidates is drawn.

    Args:
        largest: Largest N.
    """

    largest: int

    @cached_property
    def sizes(self) -> list[float]:
        """Ascending; not all are integers."""
        if self.largest - 1 <= _NODES:
            return [float(size) for size in range(2, self.largest + 1)]
        low, high = np.log([2.0, self.largest])
        inner = np.exp((low + high) / 2 - (high - low) / 2 * np.cos(np.pi * np.arange(_NODES) / (_NODES - 1)))
        return [2.0, *inner[1:-1].tolist(), float(self.largest)]

    def at_every_size(self, values: Floats) -> Floats:
        """Interpolate (…, sizes) to (…, largest − 1), one value for each N from 2 on."""
        if len(self.sizes) == self.largest - 1:
            return values
        # The barycentric formula, whose weights for Chebyshev points are ±1, and half of that at the ends.
        weights = (-1.0) ** np.arange(_NODES)
        weights[[0, -1]] /= 2
        apart = np.log(self.sizes)[:, None] - np.log(np.arange(2, self.largest + 1))
        with np.errstate(divide="ignore"):
            parts = weights[:, None] / apart
        # At a point itself there is nothing to interpolate.
        parts = np.where((apart == 0).any(axis=0), apart == 0, parts)
        every: Floats = values @ (parts / parts.sum(axis=0))
        return every


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
    """

    known: float
    worst: float
    known_update: float | None
    worst_update: float | None
    hardest_negative: float


class ShareAccumulator:
    """Adds up S(N), and G(N) for pairs, over blocks of anchors, for every integer N up to `largest`.

    Args:
        centres: (bins,) similarities of the histogram's bins.
        lowest: The smallest similarity that can occur; sets where the integral may stop.
        rows: n, anchors in all.
        largest: Largest N.
        temperature: T, at least `integral.SMALLEST_TEMPERATURE`.
    """

    def __init__(
        self, centres: Floats, *, lowest: float, rows: int, largest: int, temperature: float
    ) -> None:
        self._integral = PushIntegral(centres, temperature=temperature, largest=largest, lowest=lowest)
        self._scan, self._rows = SizeScan(largest), rows
        self._sums = np.zeros((5, len(self._scan.sizes)))

    @property
    def sums(self) -> Floats:
        """(5, L) sums over the anchors so far of their shares, for each N from 2 on.

        S known and worst, then E[v · share] known and worst, then E[v] (all three 0 without positives). Sums of several
        accumulators add up.
        """
        return self._scan.at_every_size(self._sums)

    def add(
        self,
        candidates: Layer,
        known: Layer,
        worst: Layer | None,
        own: Floats | None,
    ) -> None:
        """Take in the histograms of a block of anchors.

        Args:
            candidates: (r, bins) what can be drawn beside each anchor: the n − 1 others.
            known: (r, bins) known false negatives among them.
            worst: (r, bins) those and what the worst case counts; None where that is nothing.
            own: (r,) similarity of the own positives; None for sentences.
        """
        counts = Counts.of(candidates)
        if counts.each.max() > self._rows - 1:
            raise ValueError(f"an anchor has more than {self._rows - 1} candidates")
        block = self._integral.block(counts)
        masses = [block.mass(counts)]
        masses += [block.mass(Counts.of(layer)) for layer in (known, worst) if layer is not None]
        total, *layers = block.received(self._scan.sizes, masses)
        # q sums to 1 over the candidates of an anchor; dividing by the sum takes the rule's error out.
        scale = inverse(total)
        shares = [(layer * scale).sum(axis=1) for layer in layers]
        self._sums[:2] += shares[0], shares[-1]
        if own is not None:
            updates = [
                (layer * scale).sum(axis=1) for layer in block.received(self._scan.sizes, masses, own=own)
            ]
            self._sums[2:] += updates[1], updates[-1], updates[0]


class ShareGrid:
    """Adds up S over blocks of anchors at given batch sizes and temperatures.

    Args:
        centres: (bins,) similarities of the histogram's bins.
        rows: n, anchors in all.
        sizes: Batch sizes N, each at most n/20; between integers S is the smooth function through them.
        temperatures: Each at least `integral.SMALLEST_TEMPERATURE`.
    """

    def __init__(
        self, centres: Floats, rows: int, sizes: Sequence[float], temperatures: Sequence[float] = TEMPERATURES
    ) -> None:
        self._rows, self._sizes = rows, sizes
        self._integrals = [
            PushIntegral(centres, temperature=t, largest=int(max(sizes))) for t in temperatures
        ]
        self.sums = np.zeros((2, len(temperatures), len(sizes)))
        """(layers, temperatures, sizes) sums over the anchors so far; those of several grids add up."""

    def add(
        self,
        candidates: Layer,
        known: Layer,
        worst: Layer | None,
    ) -> None:
        """Take in the histograms of a block of anchors, as `ShareAccumulator.add` does."""
        counts = Counts.of(candidates)
        false = [Counts.of(layer) for layer in (known, worst) if layer is not None]
        for row, integral in enumerate(self._integrals):
            block = integral.block(counts)
            total, *layers = block.received(self._sizes, [block.mass(each) for each in (counts, *false)])
            shares = [(layer * inverse(total)).sum(axis=1) for layer in layers]
            self.sums[:, row] += shares[0], shares[-1]

    def shares(self) -> Floats:
        """Return (layers, temperatures, sizes) S, 0–1, once all anchors are in: known pairs, then the worst case."""
        return np.clip(self.sums / self._rows, 0.0, 1.0)


def expected_maximum(candidates: Histograms, centres: Floats, batch_size: int) -> float:
    """Return the mean over anchors of the expected largest similarity of N − 1 candidates drawn without replacement.

    P(largest ≤ bin) = C(candidates up to the bin, N−1) / C(all, N−1), exact but for the bins' width.

    Args:
        candidates: (r, bins) counts by similarity, ascending.
        centres: (bins,) similarities.
        batch_size: N.
    """
    occupied = np.flatnonzero(candidates.any(axis=0))
    bins = slice(int(occupied[0]), int(occupied[-1]) + 1)
    below = np.cumsum(candidates[:, bins].astype(np.int32), axis=1)
    highest, steps = centres[bins][-1], np.diff(centres[bins])
    expected = 0.0
    for count in np.unique(below[:, -1]).tolist():
        # Many bins, few counts: looked up.
        probability = _all_among(count, batch_size - 1)
        rows = below[below[:, -1] == count, :-1]
        # Up to here all bins together add less than 1e-12.
        first = int(np.searchsorted(probability[rows.max(axis=0, initial=0)], 1e-12))
        expected += float((highest - probability.take(rows[:, first:]) @ steps[first:]).sum())
    return expected / len(below)


@lru_cache(maxsize=64)
def _all_among(count: int, drawn: int) -> Floats:
    """(count + 1,) chance that all of `drawn` candidates of `count` are among the first k: C(k, drawn) / C(count, drawn)."""
    up_to = np.arange(drawn, count + 1)
    log_ways = gammaln(up_to + 1.0) - gammaln(up_to - drawn + 1.0)
    return np.concatenate([np.zeros(drawn), np.exp(log_ways - log_ways[-1])])
