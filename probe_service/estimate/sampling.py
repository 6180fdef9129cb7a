"""Which rows go into which batch: seeded so that any part of the work can be done alone, or again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["SOME_ANCHORS", "SUB_POOLS", "WHOLE", "SamplingPlan"]

SUB_POOLS = 20
MIN_ANCHORS = 20_000
"""Of STATISTICS §3."""
SCAN_ANCHORS = 100_000
"""Anchors behind the scan over all integers: permutations × their length …"""
SCAN_ORDERS = (100, 400)
"""… with at least and at most so many permutations."""
SOME_ANCHORS = 256
"""Anchors that may stand for all of a large batch or permutation: further ones share their candidates, and add little."""
WHOLE = -1
"""Pool number of batches that are drawn from all encoded rows."""

_BATCHES, _POOLS, _ORDERS, _NULLS = 1, 2, 3, 4


@dataclass(frozen=True)
class SamplingPlan:
    """How batches are drawn from m encoded rows of a corpus of n.

    Args:
        rows_usable: n.
        rows_encoded: m.
        num_repeats: Batches asked for at each size.
        seed: Of the request.
        min_anchors: Anchors behind every figure, at least: batches × N.
    """

    rows_usable: int
    rows_encoded: int
    num_repeats: int
    seed: int
    min_anchors: int = MIN_ANCHORS

    @property
    def whole_corpus(self) -> bool:
        """Whether every usable row is encoded, so that only Monte Carlo error is left."""
        return self.rows_encoded == self.rows_usable

    @property
    def largest_size_with_interval(self) -> int:
        """Largest N whose interval can be given: all, or m / 20 where only a sample was encoded."""
        return self.rows_encoded if self.whole_corpus else self.rows_encoded // SUB_POOLS

    def num_batches(self, size: int) -> int:
        """Batches of all encoded rows at this size."""
        return max(self.num_repeats, -(-self.min_anchors // size))

    def num_pool_batches(self, size: int) -> int:
        """Batches in each sub-pool at this size; 0 where no sub-pools are used."""
        if self.whole_corpus or size > self.largest_size_with_interval:
            return 0
        return max(2, -(-self.num_batches(size) // SUB_POOLS))

    def num_anchors(self, size: int) -> int:
        """Anchors of each batch of all encoded rows that stand for all N, so that there are `min_anchors` together."""
        return min(size, max(SOME_ANCHORS, -(-self.min_anchors // self.num_batches(size))))

    def num_orders(self, length: int) -> int:
        """Permutations of the scan over all integers up to `length`."""
        fewest, most = SCAN_ORDERS
        return max(fewest, min(most, -(-SCAN_ANCHORS // length)))

    def pool_rows(self, pool: int) -> NDArray[np.int64]:
        """Rows of one sub-pool; all rows for `WHOLE`."""
        if pool == WHOLE:
            return np.arange(self.rows_encoded, dtype=np.int64)
        rows: NDArray[np.int64] = self._pools[pool]
        return rows

    def batches(self, size: int, pool: int, first: int, count: int) -> NDArray[np.int64]:
        """(count, N) rows of batches first … first + count − 1, each drawn without replacement."""
        rows = self.pool_rows(pool)
        drawn = [
            self._rng(_BATCHES, size, pool + 1, number).choice(len(rows), size, replace=False)
            for number in range(first, first + count)
        ]
        return rows[np.stack(drawn)]

    def order(self, length: int, pool: int, number: int) -> NDArray[np.int64]:
        """(length,) rows in random order, for the scan."""
        rows = self.pool_rows(pool)
        return rows[self._rng(_ORDERS, pool + 1, number).choice(len(rows), length, replace=False)]

    def null_rng(self, size: int, number: int) -> np.random.Generator:
        """The generator of one null batch."""
        return self._rng(_NULLS, size, number)

    @cached_property
    def _pools(self) -> NDArray[np.int64]:
        """(K, m / K) rows of every sub-pool."""
        order = self._rng(_POOLS).permutation(self.rows_encoded)
        size = self.rows_encoded // SUB_POOLS
        return np.sort(order[: SUB_POOLS * size].reshape(SUB_POOLS, size), axis=1).astype(np.int64)

    def _rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])
