"""The rows of a trial: what their positives are, which of them mean the same, and how they are split and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import Evidence
from probe_service.trial.retrieval import Relevance

__all__ = ["DrawnBatch", "Rows", "TrialRows"]

FEWEST_UNITS = 10
"""Whole groups in the smaller part of a split, at least: fewer would be too easy to tell apart."""

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class DrawnBatch:
    """N rows and their positives, by number.

    Args:
        anchors: (N,) numbers of the rows.
        positives: (N,) numbers of the rows that bring the positives: the same for pairs, another row of the group else.
    """

    anchors: Rows
    positives: Rows


@dataclass(frozen=True)
class TrialRows:
    """n rows, each of which has a positive.

    Args:
        evidence: Which rows mean the same. Without positives of their own, the groups alone: a row's positive is then
            another row of its group, at random.
        own_positives: Whether each row brings a positive of its own.
    """

    evidence: Evidence
    own_positives: bool

    def __len__(self) -> int:
        return len(self._unit)

    def subset(self, rows: Rows) -> TrialRows:
        """Some of the rows."""
        return TrialRows(self.evidence.subset(rows), self.own_positives)

    @property
    def num_units(self) -> int:
        """How many groups there are, or different anchors of rows that bring their own positives."""
        return len(np.unique(self._unit))

    def many_units(self, share: float) -> bool:
        """Whether a part with this share of whole groups has at least `FEWEST_UNITS` of them."""
        return self.own_positives or share * self.num_units >= FEWEST_UNITS

    def split(self, share: float, rng: np.random.Generator, *, whole: bool) -> tuple[Rows, Rows]:
        """Divide the rows at random into (rest, part), the part with about `share` of them.

        Args:
            share: 0–1.
            rng: Of the choice.
            whole: Keep the rows of a group together, so that nothing of what is in the part is in the rest (where rows bring
                their own positives, those with the same anchor); else divide every group.
        """
        _, unit, sizes = np.unique(self._unit, return_inverse=True, return_counts=True)
        if whole:
            units = rng.permutation(len(sizes))
            taken = int(np.searchsorted(np.cumsum(sizes[units]), share * len(self), side="right"))
            in_part = np.isin(unit, units[: min(max(1, taken), len(sizes) - 1)])
        else:
            shuffled = rng.permutation(len(self))
            by_unit = shuffled[np.argsort(unit[shuffled], kind="stable")]
            place = np.empty(len(self), dtype=np.int64)
            place[by_unit] = np.arange(len(self)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            in_part = place < np.rint(share * sizes[unit])
        return np.flatnonzero(~in_part).astype(np.int64), np.flatnonzero(in_part).astype(np.int64)

    def draw(self, size: int, rng: np.random.Generator) -> DrawnBatch:
        """Draw a batch of N rows without replacement, and their positives."""
        anchors = rng.choice(len(self), size, replace=False)
        if self.own_positives:
            return DrawnBatch(anchors, anchors)
        order, place, first, count = self._groups
        group = self._unit[anchors]
        # One of the others of the group: skip the row itself.
        other = rng.integers(0, count[group] - 1)
        other += other >= place[anchors]
        return DrawnBatch(anchors, order[first[group] + other])

    def negatives(self, batch: DrawnBatch) -> NDArray[np.bool_]:
        """(N, N) True where candidate j is not known to be a false negative of anchor i."""
        mask = np.ones((len(batch.anchors), len(batch.anchors)), dtype=bool)
        known = self.evidence.known_pairs(batch.anchors[None, :])
        mask[known.anchor, known.candidate] = False
        return mask

    def relevance(self) -> Relevance:
        """Which rows are right answers to which, if these rows are what is evaluated on."""
        return Relevance.from_evidence(self.evidence, len(self), among_themselves=not self.own_positives)

    @property
    def any_known(self) -> bool:
        """Whether any false negative is known."""
        return bool(self.evidence.false_negative_counts().any())

    @property
    def any_grouped(self) -> bool:
        """Whether any two rows are known by their group to mean the same."""
        group = self.evidence.group
        return group is not None and bool((np.bincount(group[group >= 0], minlength=1) > 1).any())

    @property
    def _unit(self) -> Rows:
        """(n,) what keeps rows together."""
        unit = self.evidence.anchor_text if self.own_positives else self.evidence.group
        assert unit is not None
        return unit

    @cached_property
    def _groups(self) -> tuple[Rows, Rows, Rows, Rows]:
        """(rows by group, place of each row in its group, first of each group, size of each group)."""
        count = np.bincount(self._unit)
        first = np.cumsum(count) - count
        order = np.argsort(self._unit, kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order)) - first[self._unit[order]]
        return order.astype(np.int64), place, first.astype(np.int64), count.astype(np.int64)
