"""Batches of two corpora that have as many rows in common as they can, each drawn as if the other were not there.

A difference between two corpora is small beside the spread of either over batches. Batches that share their rows share that
spread, so it drops out of the difference.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_PARTNER", "CommonBatches", "match_rows"]

NO_PARTNER = -1

Rows = NDArray[np.int64]


def match_rows(a: Sequence[Hashable], b: Sequence[Hashable]) -> Rows:
    """Match the rows of two corpora one to one by key: the k-th row of a key in B is the k-th of that key in A.

    Args:
        a: Key of each row of A, equal where rows count as the same.
        b: Key of each row of B.

    Returns:
        (len(b),) int64, the row of A that each row of B is, or `NO_PARTNER`.
    """
    waiting: dict[Hashable, list[int]] = {}
    for row in range(len(a) - 1, -1, -1):
        waiting.setdefault(a[row], []).append(row)
    found = np.full(len(b), NO_PARTNER, dtype=np.int64)
    for row, key in enumerate(b):
        if candidates := waiting.get(key):
            found[row] = candidates.pop()
    return found


@dataclass(frozen=True)
class CommonBatches:
    """Pairs of batches, one of each corpus.

    Every row of the smaller corpus has one partner in the larger: itself where the larger has it, else a row that only the
    larger has. A pair of batches begins with a batch of the larger corpus. Its rows give way to their partners, and a row
    without a partner to a random partner of the rows that are not in the batch.

    Both batches are uniform draws without replacement of their corpora, whoever is whose partner. Of the larger this holds
    by construction. The rows with a partner stand for the smaller corpus, one for one; given that k of them are in the batch,
    they are a uniform k-subset of it, and adding N − k drawn uniformly from the others makes a uniform N-subset.

    Args:
        partner: (l,) int64, the row of the smaller corpus that is each larger's row partner, or `NO_PARTNER`.
        larger_is_b: Which corpus is the larger.
    """

    partner: Rows
    larger_is_b: bool

    @classmethod
    def pair_up(cls, matched: Rows, rows_a: int, rng: np.random.Generator | None = None) -> CommonBatches:
        """Give every row of the smaller corpus its partner.

        Args:
            matched: (rows of B,) from `match_rows`.
            rows_a: Rows of A.
            rng: Pairs up at random what has no match. None: in file order, so that an edited row mostly meets what it was;
                only where nothing but the batches is random (every row is encoded), since sorted files agree by rank.
        """
        of_b = np.flatnonzero(matched != NO_PARTNER)
        larger_is_b = len(matched) >= rows_a
        if larger_is_b:
            partner, smaller = matched.copy(), rows_a
        else:
            partner, smaller = np.full(rows_a, NO_PARTNER, dtype=np.int64), len(matched)
            partner[matched[of_b]] = of_b
        left = np.setdiff1d(np.arange(smaller), partner)
        free = np.flatnonzero(partner == NO_PARTNER)
        if rng is not None:
            free = rng.permutation(free)
        partner[free[: len(left)]] = left
        return cls(partner, larger_is_b)

    def pools(self, pool: Rows) -> tuple[Rows, Rows]:
        """The rows of A and of B in a pool of rows of the larger corpus."""
        partners = self.partner[pool]
        return self._in_order(pool, partners[partners != NO_PARTNER])

    def draw(self, batches: Rows, pool: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
        """Complete batches of the larger corpus to pairs of batches.

        Args:
            batches: (b, N) rows of the larger corpus, drawn from the pool without replacement.
            pool: Rows of the larger corpus that take part; at least N of them have a partner.
            rng: Source of randomness.

        Returns:
            (b, N) rows of A and of B.
        """
        drawn = self.partner[batches]
        candidates = self.partner[pool]
        candidates = candidates[candidates != NO_PARTNER]
        # Vectorised over batches this would need (b, rows) of memory; only batches with a row that lacks a partner come here.
        for batch in np.flatnonzero((drawn == NO_PARTNER).any(axis=1)):
            lacks = drawn[batch] == NO_PARTNER
            outside = candidates[~np.isin(candidates, drawn[batch])]
            drawn[batch, lacks] = rng.choice(outside, int(lacks.sum()), replace=False)
        return self._in_order(batches, drawn)

    def _in_order(self, larger: Rows, smaller: Rows) -> tuple[Rows, Rows]:
        return (smaller, larger) if self.larger_is_b else (larger, smaller)
