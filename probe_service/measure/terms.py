"""What stands in the softmax of a training step, and measuring a stack of batches accordingly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.corpus import draw_hard_negatives, softmax_candidates
from probe_service.errors import RequestError
from probe_service.estimate import BorrowedCurve, Evidence
from probe_service.schemas import SIMILARITY_THRESHOLDS, Direction, LossOptions, PartitionMode
from probe_service.similarity import (
    BIN_CENTRES,
    BatchMeasurements,
    FurtherCandidates,
    KnownPairs,
    in_turn,
    measure_batches,
    stack_size,
)
from probe_service.workspace import HardNegatives, Population

__all__ = ["DrawnCandidate", "Softmaxes"]

_WITH_OWN_PAIR = (Direction.QUERY_TO_DOC, Direction.DOC_TO_QUERY)

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class _Tiers:
    """What is known about the candidates of one direction, by tier."""

    known: Evidence
    certain: Evidence | None
    inferred: Evidence | None

    @classmethod
    def of(cls, known: Evidence) -> _Tiers:
        return cls(known, None if known.group is None else known.texts_only(), known.inferred())


@dataclass(frozen=True)
class _Term:
    """One direction: what stands for a row, what it is compared with, and what is known about the two."""

    direction: Direction
    left: NDArray[np.float32]
    right: NDArray[np.float32]
    tiers: _Tiers
    hard: _Tiers | None
    """Of the rows and behind them the hard negatives as rows of their own; None where there are none."""

    def known_alone(self) -> _Term:
        """The same, with the known pairs in place of every tier."""
        hard = None if self.hard is None else _Tiers(self.hard.known, None, None)
        return replace(self, tiers=_Tiers(self.tiers.known, None, None), hard=hard)


@dataclass(frozen=True)
class DrawnCandidate:
    """A negative of an anchor, drawn by the push that it receives.

    Args:
        anchor: Row.
        candidate: Row, or m and more: m + the place of a hard negative.
        judged: Whether it is known to be a false negative, or known not to be one.
    """

    anchor: int
    candidate: int
    judged: bool


class Softmaxes:
    """The softmaxes of one training step over a population.

    Args:
        population: The rows.
        loss: Which terms.
        temperature: T.
        k: Ranks of the similarity curve.
        borrowed: p(s) learnt elsewhere; None: no scenario.
    """

    def __init__(
        self,
        population: Population,
        loss: LossOptions,
        *,
        temperature: float,
        k: int,
        borrowed: BorrowedCurve | None,
    ) -> None:
        self._population, self._loss = population, loss
        self._temperature, self._k = temperature, k
        self._borrowed = None if borrowed is None else borrowed.probability(BIN_CENTRES)
        negatives = population.hard_negatives
        self._hard_per_row = 0 if negatives is None else negatives.per_row

    @property
    def plain(self) -> bool:
        """Whether an anchor's candidates are the other rows' positives and nothing else, as the exact method supposes."""
        return self._population.hard_negatives is None and self._loss.directions == (Direction.QUERY_TO_DOC,)

    @property
    def candidates_per_row(self) -> int:
        """Columns of the widest softmax for each row of a batch: what its cost grows with."""
        return sum(
            1 + (self._hard_per_row if direction in (Direction.QUERY_TO_DOC, Direction.DOC_TO_DOC) else 0)
            for direction in self._loss.directions
        )

    def candidates_per_anchor(self, size: int) -> int:
        """Negatives in the widest softmax of a batch of N rows."""
        loss = self._loss
        found = softmax_candidates(loss.directions, loss.partition_mode, size, self._hard_per_row)
        return max(softmax.negatives for softmax in found)

    @cached_property
    def all_judged(self) -> bool:
        """Whether something is known about every candidate."""
        evidences = [term.tiers.known for term in self._terms]
        evidences += [term.hard.known for term in self._terms if term.hard is not None]
        return all(evidence.unjudged_rows is None for evidence in evidences)

    @property
    def chains(self) -> bool:
        """Whether chains of known links add pairs to the known ones."""
        return any(
            tiers is not None and tiers.inferred is not None
            for term in self._terms
            for tiers in (term.tiers, term.hard)
        )

    def measure(
        self,
        batches: Rows,
        rng: np.random.Generator,
        checkpoint: Callable[[], None],
        *,
        shares_alone: bool = False,
        num_anchors: int | None = None,
    ) -> BatchMeasurements:
        """Measure batches of one size.

        Args:
            batches: (b, N) rows.
            rng: Chooses hard negatives where a row has more than it brings.
            checkpoint: Called often; may raise.
            shares_alone: Whether S and its worst case are all that is wanted; nothing else of the result is then to be used.
            num_anchors: How many anchors of each batch are measured, its first ones; None: all. The most similar pairs are
                then left out.

        Returns:
            Of the b batches, in order; shares are means over the softmaxes where there are several.
        """
        size = batches.shape[1]
        step = stack_size(size, self.candidates_per_row, num_anchors=num_anchors)

        def measure_stack(drawn: tuple[Rows, Rows | None]) -> BatchMeasurements:
            of_each = [
                self._measure_softmax(terms, *drawn, shares_alone=shares_alone, num_anchors=num_anchors)
                for terms in self._softmaxes
            ]
            return _mean(of_each)

        stacks = (batches[start : start + step] for start in range(0, len(batches), step))
        drawn = ((stack, self._choose(stack, rng)) for stack in stacks)
        found = []
        for measured in in_turn(measure_stack, drawn):
            checkpoint()
            found.append(measured)
        return BatchMeasurements.concatenate(found)

    def draw_pair(self, batch: Rows, rng: np.random.Generator) -> DrawnCandidate:
        """Draw an anchor of a batch, and one of its negatives with the probability of its weight in the softmax.

        Args:
            batch: (N,) rows.
            rng: Draws.

        Raises:
            RequestError: ``audit_query_to_doc_only`` where the loss has other directions.
        """
        if self._loss.directions != (Direction.QUERY_TO_DOC,):
            raise RequestError(
                "audit_query_to_doc_only",
                "Pairs are drawn for the direction query_to_doc; leave the other directions out.",
                column="directions",
            )
        (term,) = self._terms
        place = int(rng.integers(len(batch)))
        anchor = int(batch[place])
        others = np.delete(batch, place)
        vectors, candidates, tiers = term.right[others], others, term.tiers
        chosen = self._choose(batch[None, :], rng)
        if chosen is not None and term.hard is not None:
            negatives = self._population.hard_negatives
            assert negatives is not None
            vectors = np.concatenate([vectors, negatives.vectors[chosen.ravel()]])
            candidates = np.concatenate([candidates, len(self._population) + chosen.ravel()])
            tiers = term.hard
        similarities = np.clip((vectors @ term.left[anchor]).astype(np.float64), -1.0, 1.0)
        # The largest of s/T plus Gumbel noise is each candidate's with its softmax probability.
        keys = similarities / self._temperature + rng.gumbel(size=len(similarities))
        candidate = int(candidates[int(keys.argmax())])
        pair = np.array([[anchor, candidate]])
        known = len(tiers.known.known_pairs(pair, slice(0, 1)).anchor) > 0
        unjudged = tiers.known.unjudged_rows
        open_pair = unjudged is not None and bool(unjudged[pair].any())
        return DrawnCandidate(anchor, candidate, judged=known or not open_pair)

    @cached_property
    def _terms(self) -> list[_Term]:
        return [self._term(direction) for direction in self._loss.directions]

    @cached_property
    def _softmaxes(self) -> list[list[_Term]]:
        """The terms of each; the in-batch candidates of the first are those of the similarity curve."""
        in_order = sorted(self._terms, key=lambda term: term.direction is not Direction.QUERY_TO_DOC)
        if self._loss.partition_mode is PartitionMode.JOINT:
            return [in_order]
        return [[term] for term in in_order]

    def _term(self, direction: Direction) -> _Term:
        population = self._population
        docs = population.anchors if population.positives is None else population.positives
        doc_keys = population.positive_keys
        anchor_side = (population.anchors, population.anchor_keys)
        doc_side = (docs, doc_keys if doc_keys is not None else population.anchor_keys)
        (left, left_keys), (right, right_keys) = {
            Direction.QUERY_TO_DOC: (anchor_side, doc_side),
            Direction.QUERY_TO_QUERY: (anchor_side, anchor_side),
            Direction.DOC_TO_QUERY: (doc_side, anchor_side),
            Direction.DOC_TO_DOC: (doc_side, doc_side),
        }[direction]
        known = population.evidence
        if direction is not Direction.QUERY_TO_DOC:
            known = _evidence(population, direction, left_keys, right_keys, None)
        hard = None
        negatives = population.hard_negatives
        if negatives is not None and direction in (Direction.QUERY_TO_DOC, Direction.DOC_TO_DOC):
            hard = _Tiers.of(_evidence(population, direction, left_keys, right_keys, negatives))
        return _Term(direction, left, right, _Tiers.of(known), hard)

    def _choose(self, batches: Rows, rng: np.random.Generator) -> Rows | None:
        """(b, N, h) places of the hard negatives that the rows bring; None where there are none."""
        negatives = self._population.hard_negatives
        if negatives is None:
            return None
        rows = batches.ravel()
        counts = negatives.count[rows]
        if (counts == negatives.per_row).all():
            places = np.broadcast_to(np.arange(negatives.per_row), (len(rows), negatives.per_row))
        else:
            places = draw_hard_negatives(counts.tolist(), negatives.per_row + 1, rng).places
        chosen: Rows = negatives.first[rows][:, None] + places
        return chosen.reshape(*batches.shape, negatives.per_row)

    def _measure_softmax(
        self,
        terms: list[_Term],
        rows: Rows,
        chosen: Rows | None,
        *,
        shares_alone: bool,
        num_anchors: int | None,
    ) -> BatchMeasurements:
        if shares_alone:
            terms = [term.known_alone() for term in terms]
        first, *others = terms
        population = self._population
        further = [_in_batch_block(term, rows) for term in others]
        if chosen is not None:
            negatives = population.hard_negatives
            assert negatives is not None
            further += [
                _hard_block(term, rows, chosen, negatives, len(population))
                for term in terms
                if term.hard is not None
            ]
        sentences = population.positives is None
        own = population.own_similarity
        tiers = first.tiers
        return measure_batches(
            torch.from_numpy(first.left[rows]),
            None if sentences else torch.from_numpy(first.right[rows]),
            temperature=self._temperature,
            k=0 if shares_alone or num_anchors is not None else self._k,
            thresholds=() if shares_alone else SIMILARITY_THRESHOLDS,
            known=_pairs_of(tiers.known, rows),
            certain=None if tiers.certain is None else _pairs_of(tiers.certain, rows),
            inferred=None if tiers.inferred is None else _pairs_of(tiers.inferred, rows),
            unjudged=_unjudged(tiers.known, rows),
            worst_case_similarity=population.floor,
            borrowed=None if self.all_judged or shares_alone else self._borrowed,
            own_similarity=None if own is None else torch.from_numpy(own[rows]),
            own_terms=sum(term.direction in _WITH_OWN_PAIR for term in terms),
            further=further,
            num_anchors=num_anchors,
        )


def _evidence(
    population: Population,
    direction: Direction,
    left: Sequence[Hashable],
    right: Sequence[Hashable],
    negatives: HardNegatives | None,
) -> Evidence:
    """What is known in one direction about the rows and, behind them, the hard negatives as rows of their own.

    An anchor accepts its listed positives. In the other directions the two of a listed pair accept each other, whichever of
    them stands for a row.
    """
    left, right = list(left), list(right)
    groups = None if population.groups is None else list(population.groups)
    if negatives is not None:
        left += negatives.keys
        right += negatives.keys
        if groups is not None:
            groups += negatives.groups
    rows = np.arange(len(left))
    if direction is not Direction.QUERY_TO_DOC and population.positive_keys is not None:
        listed = [*population.anchor_keys, *population.positive_keys]
        left += listed
        right += [*population.positive_keys, *population.anchor_keys]
        if groups is not None:
            groups += [None] * len(listed)
    return Evidence.from_keys(left, right, groups).subset(rows)


def _pairs_of(evidence: Evidence, rows: Rows) -> KnownPairs:
    return lambda block: evidence.known_pairs(rows, block)


def _unjudged(evidence: Evidence, rows: Rows) -> torch.Tensor | None:
    unjudged = evidence.unjudged_rows
    return None if unjudged is None else torch.from_numpy(unjudged[rows])


def _in_batch_block(term: _Term, rows: Rows) -> FurtherCandidates:
    """The other rows in another direction."""
    tiers = term.tiers
    unjudged = _unjudged(tiers.known, rows)
    return FurtherCandidates(
        left=torch.from_numpy(term.left[rows]),
        right=torch.from_numpy(term.right[rows]),
        own_count=False,
        hard=False,
        known=_pairs_of(tiers.known, rows),
        certain=None if tiers.certain is None else _pairs_of(tiers.certain, rows),
        inferred=None if tiers.inferred is None else _pairs_of(tiers.inferred, rows),
        left_unjudged=unjudged,
        right_unjudged=unjudged,
    )


def _hard_block(
    term: _Term, rows: Rows, chosen: Rows, negatives: HardNegatives, count: int
) -> FurtherCandidates:
    """The hard negatives of all rows; a row's own are terms of its anchor alone."""
    tiers = term.hard
    assert tiers is not None
    batches, size, per_row = chosen.shape
    flat = chosen.reshape(batches, size * per_row)
    extended = np.concatenate([rows, count + flat], axis=1)

    def pairs(evidence: Evidence) -> KnownPairs:
        def among(block: slice) -> _Columns:
            found = evidence.known_pairs(extended, block)
            here = found.candidate >= size
            keep = here
            if term.direction is Direction.DOC_TO_DOC:
                keep = here & ((found.candidate - size) // per_row != found.anchor)
            return _Columns(found.batch[keep], found.anchor[keep], found.candidate[keep] - size)

        return among

    unjudged = tiers.known.unjudged_rows
    return FurtherCandidates(
        left=torch.from_numpy(term.left[rows]),
        right=torch.from_numpy(negatives.vectors[flat]),
        own_count=term.direction is Direction.QUERY_TO_DOC,
        hard=True,
        known=pairs(tiers.known),
        certain=None if tiers.certain is None else pairs(tiers.certain),
        inferred=None if tiers.inferred is None else pairs(tiers.inferred),
        left_unjudged=None if unjudged is None else torch.from_numpy(unjudged[rows]),
        right_unjudged=None if unjudged is None else torch.from_numpy(unjudged[count + flat]),
    )


@dataclass(frozen=True)
class _Columns:
    batch: Rows
    anchor: Rows
    candidate: Rows


def _mean(softmaxes: list[BatchMeasurements]) -> BatchMeasurements:
    """Figures of a loss that is the mean of several softmaxes; the similarities are the first one's."""
    first = softmaxes[0]
    if len(softmaxes) == 1:
        return first
    similarities = {"top_k", "masked_top_k", "hardest_negative", "pairs_above", "any_above"}
    columns = {}
    for field in fields(first):
        of_each = [getattr(found, field.name) for found in softmaxes]
        if field.name in similarities:
            columns[field.name] = of_each[0]
        elif field.name == "log_xi":
            columns[field.name] = np.concatenate(of_each, axis=1)
        else:
            columns[field.name] = np.mean(of_each, axis=0)
    return BatchMeasurements(**columns)
