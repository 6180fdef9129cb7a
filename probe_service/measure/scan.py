"""S at every integer, from running sums over random orders of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from probe_service.estimate import SOME_ANCHORS, SUB_POOLS, WHOLE, ExactShares, ShareScan, scan_shares
from probe_service.measure.task import STEP_SECONDS, batch_seconds
from probe_service.scratch import Scratch
from probe_service.similarity import measure_windows
from probe_service.workspace import Population

__all__ = ["Scan"]


@dataclass(frozen=True)
class _Part:
    """Some permutations of one pool."""

    pool: int
    first: int
    count: int


class Scan:
    """S at N = 2 … `length` under random batches.

    Args:
        population: The rows.
        length: The largest N.
        whole: Whether all encoded rows are scanned, or only the sub-pools, whose spread gives the intervals.
        temperature: T.
        scratch: Where results go.
    """

    def __init__(
        self, population: Population, length: int, *, whole: bool, temperature: float, scratch: Scratch
    ) -> None:
        self._population, self._length, self._whole = population, length, whole
        self._temperature, self._scratch = temperature, scratch

    @property
    def name(self) -> str:
        """With the population."""
        return f"scan-{self._population.name}"

    def parts(self) -> list[_Part]:
        """About a second's permutations each."""
        plan, length = self._population.plan, self._length
        dimension = self._population.anchors.shape[1]
        seconds = 3 * batch_seconds(length, dimension, num_anchors=min(length, SOME_ANCHORS))
        step = max(1, int(STEP_SECONDS / seconds))
        pools = [(WHOLE, plan.num_orders(length))] if self._whole else []
        if not plan.whole_corpus:
            pools += [(pool, -(-plan.num_orders(length) // SUB_POOLS)) for pool in range(SUB_POOLS)]
        return [
            _Part(pool, first, min(step, total - first))
            for pool, total in pools
            for first in range(0, total, step)
        ]

    def run(self, part: _Part) -> None:
        """Measure some permutations."""
        population = self._population
        unjudged = population.evidence.unjudged_rows
        false, worst = [], []
        for number in range(part.first, part.first + part.count):
            order = population.plan.order(self._length, part.pool, number)
            shares = measure_windows(
                torch.from_numpy(population.anchors[order]),
                None if population.positives is None else torch.from_numpy(population.positives[order]),
                num_anchors=SOME_ANCHORS,
                temperature=self._temperature,
                known=lambda block, order=order: population.evidence.known_pairs(order[None, :], block),  # type: ignore[misc]
                unjudged=None if unjudged is None else torch.from_numpy(unjudged[order]),
                worst_case_similarity=population.floor,
                checkpoint=self._scratch.checkpoint,
            )
            false.append(shares.false_share)
            worst.append(shares.worst_share)
        self._scratch.save_columns(self._file(part), {"false": np.stack(false), "worst": np.stack(worst)})

    def result(self, exact: ExactShares | None) -> ShareScan:
        """S at every integer.

        Args:
            exact: Shares without Monte Carlo error, used where they are given.
        """
        parts = self.parts()
        whole = None
        if self._whole:
            found = self._scratch.load_columns(self._file(part) for part in parts if part.pool == WHOLE)
            whole = found["false"], found["worst"]
        pools = []
        for pool in sorted({part.pool for part in parts} - {WHOLE}):
            found = self._scratch.load_columns(self._file(part) for part in parts if part.pool == pool)
            pools.append((found["false"].mean(axis=0), found["worst"].mean(axis=0)))
        complete = self._population.evidence.unjudged_rows is None
        return scan_shares(whole, pools, complete=complete, exact=exact)

    def _file(self, part: _Part) -> str:
        return f"{self.name}-{part.pool}-{part.first}.npz"
