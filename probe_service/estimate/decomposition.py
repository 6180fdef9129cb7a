"""Who brings the harm: S(N) cut up by row and by source, so that the parts sum to it (STATISTICS §7).

Anchor i spreads a push of 1/n over its candidates, q_N(i, j) of it on candidate j. S(N) = Σ q_N(i, j) p_ij is then the sum,
over whatever cells, of the push on false negatives in each: computed from the histograms of all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate.integral import Counts, Floats, Histograms, Layer, PushIntegral, inverse

__all__ = ["Decomposition", "DecompositionAccumulator"]


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
        candidates: Layer,
        by_source: Histograms | None,
        known_anchor: NDArray[np.int64],
        known_candidate: NDArray[np.int64],
        known_bin: NDArray[np.int64],
    ) -> Floats:
        """Take in a block of r anchors.

        Memory: what an anchor pushes on a candidate is a function of the candidate's bin, so that (r, bins) numbers serve all
        pairs of the block.

        Args:
            rows: Which anchors.
            candidates: (r, bins) their candidates by similarity.
            by_source: (r, k, bins) the same by source; None where there is one source.
            known_anchor: (p,) anchor of each known false negative of these anchors.
            known_candidate: (p,) its candidate.
            known_bin: (p,) the bin of its similarity.

        Returns:
            (sizes, p) q_N(i, j) of the known false negatives.
        """
        everything = Counts.of(candidates)
        block = self._integral.block(everything)
        k = 1
        masses = [block.mass(everything)]
        if by_source is not None:
            k = by_source.shape[1]
            masses = [block.mass(Counts(of_source)) for of_source in by_source.swapaxes(0, 1)]
        anchor_source = self._sources[rows]
        belongs = (anchor_source[None, :] == np.arange(k)[:, None]).astype(np.float64)
        cell = self._sources[known_anchor] * k + self._sources[known_candidate]
        found = np.zeros((len(self._sizes), len(known_anchor)))
        for at, size in enumerate(self._sizes):
            push = block.received([size], masses)[:, 0].T
            scale = inverse(push.sum(axis=1, keepdims=True))
            self.push[at] += belongs @ (push * scale)
            if not len(known_anchor):
                continue
            lowest, highest = int(known_bin.min()), int(known_bin.max()) + 1
            of_bin = block.by_bin(size, slice(lowest, highest)) * scale
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


def _quotient(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
