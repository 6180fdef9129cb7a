"""Who brings the harm: S(N) cut up by row and by source, so that the parts sum to it (STATISTICS §7).

Anchor i spreads a push of 1/n over its candidates, q_N(i, j) of it on candidate j. S(N) = Σ q_N(i, j) p_ij is then the sum,
over whatever cells, of the push on false negatives in each. `DecompositionAccumulator` computes it from the histograms of all
pairs; `SampledDecomposition` from batches of any sampler (`similarity.decompose_batches`), with intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from probe_service.estimate.integral import Counts, Floats, Histograms, PushIntegral
from probe_service.estimate.intervals import (
    FEW_NONZERO,
    Interval,
    jackknife_ratio,
    share_mean_interval,
)

__all__ = [
    "Decomposition",
    "DecompositionAccumulator",
    "RowIntervals",
    "SampledDecomposition",
    "SourceCell",
]


@dataclass(frozen=True)
class Decomposition:
    """S(N) of one batch size in parts, for n rows from k sources.

    Args:
        batch_size: N.
        by_anchor: (n,) what each row as an anchor adds to S; sums to S.
        by_candidate: (n,) the false push that each row receives; sums to S.
        false: (k, k) false push by (anchor's source, candidate's source); sums to S.
        push: (k, k) all push by the same; sums to 1.
    """

    batch_size: int
    by_anchor: Floats
    by_candidate: Floats
    false: Floats
    push: Floats

    @property
    def share(self) -> float:
        """S(N), 0–1."""
        return float(self.false.sum())

    @property
    def received_share(self) -> Floats:
        """(k, k) of the push of a source's anchors (row), the share that each source's candidates (column) receive."""
        return _quotient(self.push, np.broadcast_to(self.push.sum(axis=1, keepdims=True), self.push.shape))

    @property
    def false_share(self) -> Floats:
        """(k, k) of the push in each cell, the share on false negatives; NaN where there is no push."""
        return _quotient(self.false, self.push)


class DecompositionAccumulator:
    """Adds up the parts of S(N) over blocks of anchors, from the histograms of all pairs.

    The arrays `by_anchor`, `by_candidate` (sizes, n), `false` and `push` (sizes, k, k) hold sums over the anchors so far;
    those of several accumulators add up.

    Args:
        centres: (bins,) similarities of the histograms' bins.
        rows: n, anchors in all.
        sizes: Batch sizes N, each at most n/20.
        temperature: T.
        sources: (n,) number of each row's source, 0…k−1; None: one source.
    """

    def __init__(
        self,
        centres: Floats,
        *,
        rows: int,
        sizes: Sequence[int],
        temperature: float,
        sources: NDArray[np.int64] | None = None,
    ) -> None:
        self._integral = PushIntegral(centres, temperature=temperature, largest=max(sizes))
        self._rows, self._sizes = rows, sizes
        self._sources = np.zeros(rows, dtype=np.int64) if sources is None else sources
        k = int(self._sources.max()) + 1
        self.by_anchor, self.by_candidate = np.zeros((len(sizes), rows)), np.zeros((len(sizes), rows))
        self.false, self.push = np.zeros((len(sizes), k, k)), np.zeros((len(sizes), k, k))

    def add(
        self,
        rows: slice,
        by_source: Histograms,
        known_anchor: NDArray[np.int64],
        known_candidate: NDArray[np.int64],
        known_bin: NDArray[np.int64],
        checkpoint: Callable[[], None] = lambda: None,
    ) -> Floats:
        """Take in a block of r anchors.

        Memory: what an anchor pushes on a candidate is a function of the candidate's bin, so that (r, bins) numbers serve all
        pairs of the block.

        Args:
            rows: Which anchors.
            by_source: (r, k, bins) their candidates by source and similarity; (r, 1, bins) with one source.
            known_anchor: (p,) anchor of each known false negative of these anchors.
            known_candidate: (p,) its candidate.
            known_bin: (p,) the bin of its similarity.
            checkpoint: Called at every size; may raise.

        Returns:
            (sizes, p) q_N(i, j) of the known false negatives.
        """
        count, k, bins = by_source.shape
        block = self._integral.block(Counts(by_source.sum(axis=1)))
        mass = block.mass(Counts(by_source.reshape(count * k, bins))).reshape(count, k, -1)
        anchor_source = self._sources[rows]
        belongs = (anchor_source[None, :] == np.arange(k)[:, None]).astype(np.float64)
        cell = self._sources[known_anchor] * k + self._sources[known_candidate]
        found = np.zeros((len(self._sizes), len(known_anchor)))
        for at, size in enumerate(self._sizes):
            checkpoint()
            coefficients = block.coefficients(block.survival(size), size)
            push: Floats = np.einsum("rkg,rg->rk", mass, coefficients)
            total = push.sum(axis=1, keepdims=True)
            scale = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
            self.push[at] += belongs @ (push * scale)
            if not len(known_anchor):
                continue
            lowest, highest = int(known_bin.min()), int(known_bin.max()) + 1
            of_bin = (coefficients * scale) @ block.push[lowest:highest].T
            false = of_bin[known_anchor - rows.start, known_bin - lowest]
            self.by_anchor[at] += np.bincount(known_anchor, false, minlength=self._rows)
            self.by_candidate[at] += np.bincount(known_candidate, false, minlength=self._rows)
            self.false[at] += np.bincount(cell, false, minlength=k * k).reshape(k, k)
            found[at] = false / self._rows
        return found

    def decompositions(self) -> list[Decomposition]:
        """The parts at each size, once all anchors are in."""
        return [
            Decomposition(
                size,
                self.by_anchor[at] / self._rows,
                self.by_candidate[at] / self._rows,
                self.false[at] / self._rows,
                self.push[at] / self._rows,
            )
            for at, size in enumerate(self._sizes)
        ]


@dataclass(frozen=True)
class SourceCell:
    """What the anchors of one source push on the candidates of another, in sampled batches.

    Args:
        push: Share of all push.
        false: Share of all push that is in this cell and on false negatives; its sum over cells is S.
        false_share: false / push; None where fewer than 30 batches had push in this cell, which is too few for an interval.
    """

    push: Interval
    false: Interval
    false_share: Interval | None


@dataclass(frozen=True)
class RowIntervals:
    """What each of n rows adds to S, in sampled batches.

    Args:
        value: (n,) sums to S.
        low, high: (n,) limits by t over batches; NaN where fewer than 30 batches held false push of this row, which is too
            few for any.
    """

    value: Floats
    low: Floats
    high: Floats


class SampledDecomposition:
    """Adds up the parts of S over sampled batches, for any sampler.

    Args:
        rows: n, rows of the corpus.
        sources: k, number of sources.
    """

    def __init__(self, rows: int, sources: int) -> None:
        self._rows, self._sources = rows, sources
        self._false: list[Floats] = []
        self._push: list[Floats] = []
        # Sum, sum of squares and number of values above 0, for each row: as an anchor, as a candidate.
        self._moments = np.zeros((2, 3, rows))

    def add(
        self, rows: NDArray[np.int64], *, false: Floats, push: Floats, by_anchor: Floats, by_candidate: Floats
    ) -> None:
        """Take in b batches.

        Args:
            rows: (b, N) rows of each batch, each row at most once.
            false: (b, k, k) false push by (anchor's source, candidate's source); sums to the batch's S.
            push: (b, k, k) all push by the same; sums to 1.
            by_anchor: (b, N) false push of each row as an anchor.
            by_candidate: (b, N) false push that each row receives.
        """
        self._false.append(false)
        self._push.append(push)
        for side, values in enumerate((by_anchor, by_candidate)):
            for moment, powers in enumerate((values, values**2, values > 0)):
                self._moments[side, moment] += np.bincount(rows.ravel(), powers.ravel(), minlength=self._rows)

    def cells(self, level: float) -> list[list[SourceCell]]:
        """[anchor's source][candidate's source], intervals at `level`; ratios by jackknife over batches."""
        false, push = np.concatenate(self._false), np.concatenate(self._push)
        return [
            [_cell(false[:, a, c], push[:, a, c], level) for c in range(self._sources)]
            for a in range(self._sources)
        ]

    def by_anchor(self, level: float) -> RowIntervals:
        """What each row as an anchor adds to S."""
        return self._of_rows(0, level)

    def by_candidate(self, level: float) -> RowIntervals:
        """The false push that each row receives."""
        return self._of_rows(1, level)

    def _of_rows(self, side: int, level: float) -> RowIntervals:
        batches = sum(len(part) for part in self._false)
        total, squares, above = self._moments[side]
        # A batch without the row is a batch in which it adds 0.
        value = total / batches
        variance = np.maximum(squares - batches * value**2, 0.0) / (batches - 1)
        half = stats.t.ppf(0.5 + level / 2, batches - 1) * np.sqrt(variance / batches)
        half[above < min(FEW_NONZERO, batches)] = np.nan
        return RowIntervals(value, np.maximum(value - half, 0.0), value + half)


def _cell(false: Floats, push: Floats, level: float) -> SourceCell:
    enough = np.count_nonzero(push) >= FEW_NONZERO
    return SourceCell(
        push=share_mean_interval(push, level),
        false=share_mean_interval(false, level),
        false_share=jackknife_ratio(false, push, level).clipped(0.0, 1.0) if enough else None,
    )


def _quotient(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
