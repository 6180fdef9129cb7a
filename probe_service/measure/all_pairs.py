"""The figures that all pairs of a population give without batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from probe_service.estimate import ExactFigures, ExactShares, SamplingPlan, ShareAccumulator, expected_maximum
from probe_service.measure.task import STEP_SECONDS
from probe_service.schemas import SIMILARITY_THRESHOLDS
from probe_service.scratch import Scratch
from probe_service.similarity import BIN_CENTRES, row_histograms
from probe_service.workspace import Population

__all__ = ["AllPairs", "exact_limit"]

LARGEST_EXACT_CORPUS = 50_000
"""Rows up to which all pairs are looked at; their number grows with the square."""


def exact_limit(plan: SamplingPlan, largest: int) -> int:
    """Largest N whose shares come from all pairs: n / 20 of a fully encoded corpus (STATISTICS §3); 0 if none does.

    Args:
        plan: Of the population.
        largest: Largest N that is asked for.
    """
    if not plan.whole_corpus or plan.rows_encoded > LARGEST_EXACT_CORPUS:
        return 0
    limit = min(plan.rows_encoded // 20, largest)
    return limit if limit >= 2 else 0


@dataclass(frozen=True)
class _Part:
    """Some anchors."""

    first: int
    stop: int


class AllPairs:
    """One pass over all pairs of a population whose anchors meet the other rows' positives and nothing else.

    Args:
        population: The rows.
        sizes: Batch sizes whose figures are asked for.
        largest: Largest N: every integer from 2 to it gets its shares.
        temperature: T.
        scratch: Where results go.
    """

    def __init__(
        self,
        population: Population,
        sizes: list[int],
        largest: int,
        *,
        temperature: float,
        scratch: Scratch,
    ) -> None:
        self._population, self.largest = population, largest
        self._sizes = [size for size in sizes if size <= largest]
        self._temperature, self._scratch = temperature, scratch

    def parts(self) -> list[_Part]:
        """About a second's anchors each."""
        rows = len(self._population)
        seconds = rows * (self._population.anchors.shape[1] * 4e-11 + 4e-8) + self.largest * 5e-7 + 3e-4
        step = max(1, int(STEP_SECONDS / seconds))
        return [_Part(first, min(rows, first + step)) for first in range(0, rows, step)]

    def run(self, part: _Part) -> None:
        """Look at all pairs of some anchors."""
        population, rows = self._population, np.arange(len(self._population))
        accumulator = ShareAccumulator(
            BIN_CENTRES,
            lowest=-1.0,
            rows=len(rows),
            largest=self.largest,
            temperature=self._temperature,
        )
        hardest, above = np.zeros(len(self._sizes)), np.zeros(len(SIMILARITY_THRESHOLDS))
        for found in row_histograms(
            population.anchors,
            population.positives,
            block=slice(part.first, part.stop),
            thresholds=SIMILARITY_THRESHOLDS,
            known=lambda block: population.evidence.known_pairs(rows[None, :], block),
            unjudged=population.evidence.unjudged_rows,
            worst_case_similarity=population.floor,
            checkpoint=self._scratch.checkpoint,
        ):
            accumulator.add(found.candidates, found.known, found.worst, found.own, self._scratch.checkpoint)
            above += found.above
            for at, size in enumerate(self._sizes):
                hardest[at] += expected_maximum(found.candidates, BIN_CENTRES, size) * len(found.candidates)
        self._scratch.save_columns(
            self._file(part),
            {"sums": accumulator.sums[None], "hardest": hardest[None], "above": above[None]},
        )

    @cached_property
    def shares(self) -> ExactShares:
        """S, and G for pairs, at every integer."""
        return ExactShares.from_sums(self._sums["sums"], rows=len(self._population))

    def figures(self, size: int) -> ExactFigures | None:
        """The figures at one of the sizes asked for; None beyond the largest."""
        if size > self.largest:
            return None
        shares, rows, at = self.shares, len(self._population), size - 2
        in_batch = size * (size - 1) / (1 if self._population.positives is not None else 2)
        return ExactFigures(
            known=float(shares.known[at]),
            worst=float(shares.worst[at]),
            known_update=None if shares.known_update is None else float(shares.known_update[at]),
            worst_update=None if shares.worst_update is None else float(shares.worst_update[at]),
            hardest_negative=float(self._sums["hardest"][self._sizes.index(size)] / rows),
            pairs_above=self._sums["above"] / (rows * (rows - 1)) * in_batch,
        )

    @cached_property
    def _sums(self) -> dict[str, np.ndarray]:
        found = self._scratch.load_columns(self._file(part) for part in self.parts())
        return {name: values.sum(axis=0) for name, values in found.items()}

    def _file(self, part: _Part) -> str:
        return f"all-pairs-{self._population.name}-{part.first}.npz"
