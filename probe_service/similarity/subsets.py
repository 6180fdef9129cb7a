"""The most similar pairs of many random batches, from one list of the corpus's most similar pairs.

A batch is a random subset of the rows, so its most similar pairs are those of the list whose two rows it has: no batch's
own N×N matrix is needed (STATISTICS §3). A list of P of all n rows' pairs holds about P·N²/n² pairs of a batch of N;
where it holds fewer than k, it cannot tell, and the batch is to be measured directly. Small batches are measured
directly anyway: their matrix costs less than going through the list (`benchmarks/search.py`: the list wins from
N = 128 on).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probe_service.similarity.pairs import TopPairs, top_pairs
from probe_service.similarity.threads import in_turn

__all__ = ["PairList", "SubsetMeasurements", "measure_subsets", "most_similar_pairs"]

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

_TOGETHER = 64
"""Batches that go through the list together: one bit each of a machine word."""
_FIRST_STRETCH = 4_096
_LONGEST_STRETCH = 65_536


@dataclass(frozen=True)
class PairList:
    """The most similar negative pairs of n rows.

    Args:
        pairs: Most similar first.
        rows: n.
        complete_above: Every pair more similar than this is in the list; −inf where all pairs are.
    """

    pairs: TopPairs
    rows: int
    complete_above: float

    def without(self, known: NDArray[np.bool_]) -> PairList:
        """Return the list of the other pairs: that of batches in which some are masked.

        Args:
            known: (p,) bool, which pairs of the list to leave out, e.g. the known false negatives.
        """
        kept = TopPairs(
            self.pairs.similarity[~known], self.pairs.anchor[~known], self.pairs.candidate[~known]
        )
        return PairList(kept, self.rows, self.complete_above)


@dataclass(frozen=True)
class SubsetMeasurements:
    """What the list says of b batches.

    Args:
        top_k: (b, k) the k largest similarities of negative pairs, descending; NaN where the list holds fewer.
        too_short: (b,) bool, batches of which the list holds fewer than k pairs although there may be more. Their
            `top_k` must be measured directly.
    """

    top_k: Floats
    too_short: NDArray[np.bool_]


def most_similar_pairs(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32] | None = None,
    *,
    count: int,
    checkpoint: Callable[[], None],
) -> PairList:
    """List the most similar negative pairs of all rows.

    Args:
        anchors: (n, d) float32 unit rows.
        candidates: (n, d) the positives; None for unordered pairs of the anchors.
        count: How many pairs, at least 1; all of them if there are fewer.
        checkpoint: Called between blocks; may raise to abandon the search.
    """
    found = top_pairs(anchors, candidates, k=count, on_block=lambda _done, _rows: checkpoint())
    rows = len(anchors)
    every = rows * (rows - 1) // (2 if candidates is None else 1)
    listed = len(found.similarity)
    return PairList(found, rows, -np.inf if listed == every else float(found.similarity[-1]))


def measure_subsets(
    listed: PairList,
    batches: Places,
    *,
    k: int,
    checkpoint: Callable[[], None],
) -> SubsetMeasurements:
    """Find the k most similar pairs of each batch by going through the list.

    The naive equivalent for one batch::

        inside = [s for s, i, j in listed if i in batch and j in batch]
        inside[:k]

    Similarities are the list's, in float64: a direct measurement in float32 gives the same up to its rounding.

    Args:
        listed: The most similar pairs of n rows.
        batches: (b, N) the rows of each batch, 0 … n − 1, each at most once.
        k: How many.
        checkpoint: Called after every 64 batches; may raise to abandon the work.
    """
    parts = [batches[first : first + _TOGETHER] for first in range(0, len(batches), _TOGETHER)]
    found = [np.empty((0, k))]
    for best in in_turn(lambda part: _scan(listed, part, k), parts):
        found.append(best)
        checkpoint()
    top_k = np.concatenate(found)
    too_short = np.isnan(top_k[:, -1]) & (listed.complete_above > -np.inf)
    return SubsetMeasurements(top_k, too_short)


def _scan(listed: PairList, batches: Places, k: int) -> Floats:
    """Return (b, k) the k largest similarities of at most 64 batches, NaN where there are fewer, in one go through the list."""
    anchor, candidate, similarity = listed.pairs.anchor, listed.pairs.candidate, listed.pairs.similarity
    has_row = np.zeros((listed.rows, _TOGETHER), dtype=bool)
    has_row[batches, np.arange(len(batches))[:, None]] = True
    batches_of = np.packbits(has_row, axis=1).view(np.uint64)[:, 0]
    top = np.full((len(batches), k), np.nan)
    found = np.zeros(len(batches), dtype=np.int64)
    start, length = 0, _FIRST_STRETCH
    while start < len(similarity) and (found < k).any():
        stop = min(len(similarity), start + length)
        both = batches_of[anchor[start:stop]] & batches_of[candidate[start:stop]]
        shared = np.flatnonzero(both)
        inside = np.unpackbits(both[shared].view(np.uint8).reshape(-1, 8), axis=1)[:, : len(batches)]
        count = inside.sum(axis=0, dtype=np.int64)
        batch, place = np.nonzero(inside.T)
        rank = np.arange(len(batch)) + np.repeat(found - np.cumsum(count) + count, count)
        wanted = rank < k
        top[batch[wanted], rank[wanted]] = similarity[start + shared[place[wanted]]]
        found += count
        start, length = stop, min(2 * length, _LONGEST_STRETCH)
    return top
