"""The similarity curve of large batches, from one list of the corpus's most similar pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import WHOLE
from probe_service.measure.task import STEP_SECONDS, batch_seconds
from probe_service.measure.terms import Softmaxes
from probe_service.schemas import SIMILARITY_THRESHOLDS
from probe_service.scratch import Scratch
from probe_service.similarity import PairList, TopPairs, measure_subsets, most_similar_pairs
from probe_service.workspace import Population

__all__ = ["SMALLEST_LISTED_SIZE", "ListedCurve", "PairListing"]

LISTED_PAIRS = 500_000
SMALLEST_LISTED_SIZE = 128
"""Below it a batch's own matrix costs less than going through the list (benchmarks/search.py)."""
LISTED_BATCHES = 1_000
_KNOWN_AT_ONCE = 65_536
_BATCHES_AT_ONCE = 256
_PAIRS_ENOUGH = 8
"""A list that is expected to hold so many times k pairs of a batch is hardly ever too short."""


class PairListing:
    """The most similar pairs of a population, and which of them are known false negatives.

    Args:
        population: The rows.
        scratch: Where the list goes.
    """

    def __init__(self, population: Population, scratch: Scratch) -> None:
        self._population, self._scratch = population, scratch

    @property
    def name(self) -> str:
        """With the population."""
        return f"pair-list-{self._population.name}"

    def parts(self) -> list[str]:
        """One."""
        return ["all"]

    def run(self, part: str) -> None:  # noqa: ARG002 - there is one
        """List them."""
        population = self._population
        found = most_similar_pairs(
            population.anchors,
            population.positives,
            count=LISTED_PAIRS,
            checkpoint=self._scratch.checkpoint,
        )
        pairs = np.stack([found.pairs.anchor, found.pairs.candidate], axis=1)
        known = np.zeros(len(pairs), dtype=bool)
        for start in range(0, len(pairs), _KNOWN_AT_ONCE):
            self._scratch.checkpoint()
            marked = population.evidence.known_pairs(pairs[start : start + _KNOWN_AT_ONCE], slice(0, 1))
            known[start + marked.batch] = True
        self._scratch.save_columns(
            f"{self.name}.npz",
            {
                "pairs": pairs,
                "similarity": found.pairs.similarity,
                "known": known,
                "complete_above": np.array([found.complete_above]),
            },
        )

    @cached_property
    def result(self) -> tuple[PairList, PairList]:
        """The list, and the list without the known false negatives."""
        found = self._scratch.load_columns([f"{self.name}.npz"])
        pairs = TopPairs(found["similarity"], found["pairs"][:, 0], found["pairs"][:, 1])
        listed = PairList(pairs, len(self._population), float(found["complete_above"][0]))
        return listed, listed.without(found["known"]) if found["known"].any() else listed


@dataclass(frozen=True)
class _Part:
    """Some batches."""

    first: int
    count: int


class ListedCurve:
    """The most similar pairs of a thousand batches of one size.

    The first batches are those that are measured directly for all other figures.

    Args:
        population: The rows.
        listing: Their most similar pairs.
        size: N.
        softmaxes: Measures the batches of which the list holds too few pairs.
        k: Ranks of the similarity curve.
        scratch: Where results go.
    """

    def __init__(
        self,
        population: Population,
        listing: PairListing,
        size: int,
        softmaxes: Softmaxes,
        *,
        k: int,
        scratch: Scratch,
    ) -> None:
        self._population, self._listing, self._size = population, listing, size
        self._softmaxes, self._k, self._scratch = softmaxes, k, scratch

    @property
    def name(self) -> str:
        """With the population and the size."""
        return f"listed-{self._population.name}-{self._size}"

    def parts(self) -> list[_Part]:
        """Some hundred batches each; fewer where the list may be too short and direct measurements would take long."""
        rows = len(self._population)
        expected = min(1.0, LISTED_PAIRS / (rows * (rows - 1) / 2)) * self._size * (self._size - 1) / 2
        step = _BATCHES_AT_ONCE
        if expected < _PAIRS_ENOUGH * self._k:
            seconds = batch_seconds(self._size, self._population.anchors.shape[1]) / 4
            step = max(1, min(step, int(STEP_SECONDS / seconds)))
        return [_Part(first, min(step, LISTED_BATCHES - first)) for first in range(0, LISTED_BATCHES, step)]

    def run(self, part: _Part) -> None:
        """Go through the list for some batches."""
        checkpoint = self._scratch.checkpoint
        batches = self._population.plan.batches(self._size, WHOLE, part.first, part.count)
        listed, unknown = self._listing.result
        found = measure_subsets(listed, batches, k=self._k, checkpoint=checkpoint)
        masked = found
        if unknown is not listed:
            masked = measure_subsets(unknown, batches, k=self._k, checkpoint=checkpoint)
        # A batch without any pair has none above.
        any_above = (found.top_k[:, :1] >= np.array(SIMILARITY_THRESHOLDS)).astype(np.float64)
        columns = {"top_k": found.top_k, "masked_top_k": masked.top_k, "any_above": any_above}
        direct = found.too_short | masked.too_short
        if direct.any():
            rng = np.random.default_rng(
                0
            )  # chooses among hard negatives, of which a listed population has none
            measured = self._softmaxes.measure(batches[direct], rng, checkpoint)
            for name, values in columns.items():
                values[direct] = getattr(measured, name)
        self._scratch.save_columns(f"{self.name}-{part.first}.npz", columns)

    def result(self) -> dict[str, NDArray[np.float64]]:
        """Columns of `similarity.BatchMeasurements`, one row a batch."""
        return self._scratch.load_columns(f"{self.name}-{part.first}.npz" for part in self.parts())
