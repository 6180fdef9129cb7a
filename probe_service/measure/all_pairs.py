"""The figures that all pairs of a population give without batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import (
    TEMPERATURES,
    Counts,
    Decomposition,
    DecompositionAccumulator,
    ExactFigures,
    ExactShares,
    HarmfulRow,
    Mask,
    MaskAccumulator,
    MaskEffect,
    SamplingPlan,
    ShareAccumulator,
    ShareGrid,
    expected_maximum,
    most_harmful_rows,
)
from probe_service.estimate.integral import SMALLEST_TEMPERATURE
from probe_service.measure.task import STEP_SECONDS
from probe_service.schemas import SIMILARITY_THRESHOLDS
from probe_service.scratch import Scratch
from probe_service.similarity import BIN_CENTRES, RowHistograms, in_turn, row_histograms
from probe_service.workspace import Population

__all__ = ["LARGEST_EXACT_CORPUS", "AllPairs", "AllPairsInDetail", "exact_limit"]

LARGEST_EXACT_CORPUS = 50_000
"""Rows up to which all pairs are looked at; their number grows with the square."""
MARGINS = (0.0, 0.05, 0.1)
"""Masks of pairs: candidates with s_ij > s_ii⁺ − margin."""
LIMITS = (0.95, 0.9, 0.8)
"""Masks of sentences, which have no positive to compare with: candidates with s_ij ≥ limit."""
MOST_SOURCES = 24
"""More sources than these are told apart as the most frequent ones and the rest."""

_ANCHORS_AT_ONCE = 256
_PER_KNOWN_PAIR = ("harm_anchor", "harm_candidate", "harm_push")


def exact_limit(plan: SamplingPlan, largest: int, temperature: float) -> int:
    """Largest N whose shares come from all pairs: a twentieth of the encoded rows (STATISTICS §3); 0 if none does.

    Args:
        plan: Of the population.
        largest: Largest N that is asked for.
        temperature: T; the smallest are out of the exact method's range.
    """
    if plan.rows_encoded > LARGEST_EXACT_CORPUS or temperature < SMALLEST_TEMPERATURE:
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
        self.population, self.largest = population, largest
        self.sizes = [size for size in sizes if size <= largest]
        self.temperature, self._scratch = temperature, scratch

    @property
    def name(self) -> str:
        """With the population."""
        return f"all-pairs-{self.population.name}"

    def parts(self) -> list[_Part]:
        """About a second's anchors each."""
        rows = len(self.population)
        seconds = rows * (self.population.anchors.shape[1] * 3e-11 + 4e-9) + self.largest * 5e-7 + 3e-4
        step = max(1, int(STEP_SECONDS / seconds))
        return [_Part(first, min(rows, first + step)) for first in range(0, rows, step)]

    def run(self, part: _Part) -> None:
        """Look at all pairs of some anchors, on every core at some of them."""
        blocks = [
            slice(first, min(first + _ANCHORS_AT_ONCE, part.stop))
            for first in range(part.first, part.stop, _ANCHORS_AT_ONCE)
        ]
        found = []
        self._scratch.checkpoint()
        for columns in in_turn(self._look_at, blocks):
            found.append(columns)
            self._scratch.checkpoint()
        joined = {}
        for name in found[0]:
            values = [columns[name] for columns in found]
            joined[name] = np.concatenate(values) if name in _PER_KNOWN_PAIR else np.sum(values, axis=0)[None]
        self._scratch.save_columns(self._file(part), joined)

    def _look_at(self, block: slice) -> dict[str, NDArray[np.float64]]:
        """Sums over a block of anchors, and columns of its known pairs."""
        population, rows = self.population, np.arange(len(self.population))
        accumulator = ShareAccumulator(
            BIN_CENTRES,
            lowest=-1.0,
            rows=len(rows),
            largest=self.largest,
            temperature=self.temperature,
        )
        detail = self._detail()
        hardest, above = np.zeros(len(self.sizes)), np.zeros(len(SIMILARITY_THRESHOLDS))
        for found in row_histograms(
            population.anchors,
            population.positives,
            block=block,
            thresholds=SIMILARITY_THRESHOLDS,
            known=lambda anchors: population.evidence.known_pairs(rows[None, :], anchors),
            unjudged=population.evidence.unjudged_rows,
            worst_case_similarity=population.floor,
            sources=None if detail is None else detail.sources,
        ):
            worst = None if found.worst is None else Counts(found.worst)
            layers = Counts(found.candidates), Counts(found.known), worst
            accumulator.add(*layers, found.own)
            if detail is not None:
                detail.add(found, *layers)
            above += found.above
            for at, size in enumerate(self.sizes):
                hardest[at] += expected_maximum(found.candidates, BIN_CENTRES, size) * len(found.candidates)
        columns = {"sums": accumulator.sums, "hardest": hardest, "above": above}
        return columns if detail is None else columns | detail.columns()

    @cached_property
    def shares(self) -> ExactShares:
        """S, and G for pairs, at every integer."""
        return ExactShares.from_sums(self._sums["sums"], rows=len(self.population))

    def figures(self, size: int) -> ExactFigures | None:
        """The figures at one of the sizes asked for; None beyond the largest."""
        if size > self.largest:
            return None
        shares, rows, at = self.shares, len(self.population), size - 2
        return ExactFigures(
            known=float(shares.known[at]),
            worst=float(shares.worst[at]),
            known_update=None if shares.known_update is None else float(shares.known_update[at]),
            worst_update=None if shares.worst_update is None else float(shares.worst_update[at]),
            hardest_negative=float(self._sums["hardest"][self.sizes.index(size)] / rows),
        )

    def pairs_above(self, size: int) -> NDArray[np.float64]:
        """Expected pairs of a batch of any N with similarity ≥ each of SIMILARITY_THRESHOLDS."""
        rows = len(self.population)
        in_batch = size * (size - 1) / (1 if self.population.positives is not None else 2)
        expected: NDArray[np.float64] = self._sums["above"] / (rows * (rows - 1)) * in_batch
        return expected

    def _detail(self) -> _Detail | None:
        """What else this pass finds out."""
        return None

    @cached_property
    def _found(self) -> dict[str, NDArray[np.float64]]:
        return self._scratch.load_columns(self._file(part) for part in self.parts())

    @cached_property
    def _sums(self) -> dict[str, NDArray[np.float64]]:
        return {
            name: values.sum(axis=0) for name, values in self._found.items() if name not in _PER_KNOWN_PAIR
        }

    def _file(self, part: _Part) -> str:
        return f"{self.name}-{part.first}.npz"


class AllPairsInDetail(AllPairs):
    """The pass that also finds S at other temperatures, what masks do, and who brings the harm."""

    @property
    def deciding_size(self) -> int | None:
        """The batch size whose S is cut up: the largest one asked for that all pairs speak of."""
        return self.sizes[-1] if self.sizes else None

    @property
    def masks(self) -> list[Mask]:
        """The masks that are tried."""
        if self.population.positives is not None:
            return [Mask(margin, relative_to_positive=True) for margin in MARGINS]
        return [Mask(limit, relative_to_positive=False) for limit in LIMITS]

    @cached_property
    def sources(self) -> tuple[NDArray[np.int64], list[str]]:
        """(n,) number of each row's source, and the sources' names; those beyond the most frequent ones are one."""
        given = self.population.sources
        if given is None:
            return np.zeros(len(self.population), dtype=np.int64), ["(all)"]
        names, inverse, counts = np.unique(np.array(given), return_inverse=True, return_counts=True)
        if len(names) <= MOST_SOURCES:
            return inverse.astype(np.int64), [str(name) for name in names]
        frequent = np.sort(np.argsort(-counts, kind="stable")[: MOST_SOURCES - 1])
        code = np.full(len(names), MOST_SOURCES - 1, dtype=np.int64)
        code[frequent] = np.arange(MOST_SOURCES - 1)
        return code[inverse], [*(str(names[place]) for place in frequent), "(others)"]

    @cached_property
    def by_temperature(self) -> NDArray[np.float64]:
        """(layers, temperatures, sizes) S: of the known pairs, then in the worst case."""
        shares: NDArray[np.float64] = np.clip(self._sums["grid"] / len(self.population), 0.0, 1.0)
        return shares

    @cached_property
    def decomposition(self) -> Decomposition | None:
        """S at the deciding size by row and source."""
        size = self.deciding_size
        if size is None:
            return None
        rows = len(self.population)
        sums = {name: self._sums[name] / rows for name in ("by_anchor", "by_candidate", "false", "push")}
        return Decomposition(size, **sums)

    def harmful_rows(self, count: int) -> list[HarmfulRow]:
        """The rows whose removal takes most false push away, at the deciding size."""
        found = self._found
        return most_harmful_rows(
            found["harm_anchor"].astype(np.int64),
            found["harm_candidate"].astype(np.int64),
            found["harm_push"],
            rows=len(self.population),
            count=count,
        )

    def mask_effects(self) -> list[MaskEffect]:
        """What each mask does, at every integer."""
        return [
            MaskEffect.from_sums(mask, sums, rows=len(self.population))
            for mask, sums in zip(self.masks, self._sums["masks"], strict=True)
        ]

    def _detail(self) -> _Detail | None:
        return _Detail(self) if self.sizes else None


class _Detail:
    """Accumulators of one block of a pass in detail."""

    def __init__(self, task: AllPairsInDetail) -> None:
        size = task.deciding_size
        assert size is not None
        codes, names = task.sources
        rows = len(task.population)
        self.sources = codes if len(names) > 1 else None
        self._grid = ShareGrid(BIN_CENTRES, rows, task.sizes, TEMPERATURES)
        self._parts = DecompositionAccumulator(
            BIN_CENTRES, rows=rows, sizes=[size], temperature=task.temperature, sources=codes
        )
        self._masks = MaskAccumulator(
            BIN_CENTRES, largest=task.largest, temperature=task.temperature, masks=task.masks
        )
        self._known: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []

    def add(self, found: RowHistograms, candidates: Counts, known: Counts, worst: Counts | None) -> None:
        """Take in the histograms of some anchors."""
        self._grid.add(candidates, known, worst)
        push = self._parts.add(
            found.rows,
            candidates,
            found.by_source,
            found.known_anchor,
            found.known_candidate,
            found.known_bin,
        )
        self._known.append((found.known_anchor, found.known_candidate, push[0]))
        self._masks.add(candidates, known, worst, found.own)

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """What the block leaves: sums, and the pairs one row each."""
        parts = self._parts
        sums = {
            "grid": self._grid.sums,
            "masks": self._masks.sums,
            "by_anchor": parts.by_anchor[0],
            "by_candidate": parts.by_candidate[0],
            "false": parts.false[0],
            "push": parts.push[0],
        }
        pairs = dict(zip(_PER_KNOWN_PAIR, map(np.concatenate, zip(*self._known, strict=True)), strict=True))
        return sums | pairs
