"""How many candidates an anchor meets, from where, in each direction of the loss.

The counts are those of sentence-transformers 6.2 (``MultipleNegativesRankingLoss`` and its cached twin, which contrasts
the full batch whatever its mini-batch size); the draw of hard negatives is FlagEmbedding's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probe_service.errors import CorpusError, RequestError
from probe_service.schemas import Direction, PartitionMode

__all__ = [
    "Candidates",
    "HardNegativeDraw",
    "candidates_per_anchor",
    "direction_candidates",
    "draw_hard_negatives",
    "softmax_candidates",
]


@dataclass(frozen=True)
class Candidates:
    """The terms of one softmax for row i, counted by the population that they come from.

    Args:
        own_pair: Times that s(anchor i, positive i) is a term: 1 in `query_to_doc` and in `doc_to_query`, so 2 where one
            softmax holds both.
        other_anchors: Anchors of other rows.
        other_positives: Positives of other rows.
        other_hard_negatives: Hard negatives of other rows.
        own_hard_negatives: Hard negatives of row i: a population of their own, never judged like the others.
    """

    own_pair: int
    other_anchors: int
    other_positives: int
    other_hard_negatives: int
    own_hard_negatives: int

    @property
    def negatives(self) -> int:
        """Terms other than the own pair."""
        return self.other_anchors + self.other_positives + self.other_hard_negatives + self.own_hard_negatives

    @property
    def terms(self) -> int:
        """Finite logits in the denominator."""
        return self.own_pair + self.negatives

    def __add__(self, other: Candidates) -> Candidates:
        return Candidates(
            self.own_pair + other.own_pair,
            self.other_anchors + other.other_anchors,
            self.other_positives + other.other_positives,
            self.other_hard_negatives + other.other_hard_negatives,
            self.own_hard_negatives + other.own_hard_negatives,
        )


def candidates_per_anchor(
    per_device_batch_size: int, world_size: int = 1, *, gather: bool = False, hard_negatives: int = 0
) -> int:
    """Count the negatives of one anchor: world × per-device × (1 + hard negatives) − 1 where gathered.

    Without gathering an anchor meets its own device's rows only: per-device × (1 + hard negatives) − 1. Gradient
    accumulation adds none; a cached loss counts its full batch.

    Args:
        per_device_batch_size: Rows in one device's batch, ≥ 1.
        world_size: Devices, ≥ 1.
        gather: Whether the loss gathers the candidates of all devices.
        hard_negatives: Hard negatives of each row, ≥ 0 (FlagEmbedding: ``train_group_size`` − 1).

    Raises:
        RequestError: ``sampler_invalid`` where a number is out of its range.
    """
    rows = _rows_in_contrast(per_device_batch_size, world_size, gather=gather)
    return direction_candidates(Direction.QUERY_TO_DOC, rows, hard_negatives).negatives


def direction_candidates(direction: Direction, rows_in_contrast: int, hard_negatives: int = 0) -> Candidates:
    """Count what row i meets in one direction among N rows with h hard negatives each.

    ===============  ========  =============  ===============  ====================  ==================
    direction        own pair  other anchors  other positives  other hard negatives  own hard negatives
    ===============  ========  =============  ===============  ====================  ==================
    query_to_doc     1                        N − 1            (N − 1)·h             h
    query_to_query             N − 1
    doc_to_query     1         N − 1
    doc_to_doc                                N − 1            (N − 1)·h
    ===============  ========  =============  ===============  ====================  ==================

    Args:
        direction: Which comparison.
        rows_in_contrast: N ≥ 1.
        hard_negatives: h ≥ 0.

    Raises:
        RequestError: ``sampler_invalid`` where a number is out of its range.
    """
    if rows_in_contrast < 1 or hard_negatives < 0:
        raise RequestError(
            "sampler_invalid", f"{rows_in_contrast} rows with {hard_negatives} hard negatives are no batch."
        )
    others = rows_in_contrast - 1
    to_docs = direction in (Direction.QUERY_TO_DOC, Direction.DOC_TO_DOC)
    return Candidates(
        own_pair=int(direction in (Direction.QUERY_TO_DOC, Direction.DOC_TO_QUERY)),
        other_anchors=0 if to_docs else others,
        other_positives=others if to_docs else 0,
        other_hard_negatives=others * hard_negatives if to_docs else 0,
        own_hard_negatives=hard_negatives if direction is Direction.QUERY_TO_DOC else 0,
    )


def softmax_candidates(
    directions: Sequence[Direction],
    partition_mode: PartitionMode,
    rows_in_contrast: int,
    hard_negatives: int = 0,
) -> tuple[Candidates, ...]:
    """Count the terms of every softmax of the loss: one where `joint`, else one for each direction, in their order.

    Args:
        directions: Without repeats; `query_to_doc` is always among them.
        partition_mode: What one softmax runs over.
        rows_in_contrast: N ≥ 1.
        hard_negatives: h ≥ 0.

    Raises:
        RequestError: ``sampler_invalid`` where the loss itself would refuse, or a number is out of its range.
    """
    if Direction.QUERY_TO_DOC not in directions:
        raise RequestError("sampler_invalid", "directions must hold query_to_doc: it has the own pair.")
    if len(set(directions)) < len(directions):
        raise RequestError("sampler_invalid", "directions names one of them twice.")
    each = tuple(
        direction_candidates(direction, rows_in_contrast, hard_negatives) for direction in directions
    )
    if partition_mode is PartitionMode.PER_DIRECTION:
        lacking = [
            str(direction) for direction, found in zip(directions, each, strict=True) if not found.own_pair
        ]
        if lacking:
            raise RequestError(
                "sampler_invalid", f"{', '.join(lacking)} lack the own pair; use partition_mode joint."
            )
        return each
    joint = each[0]
    for found in each[1:]:
        joint += found
    return (joint,)


@dataclass(frozen=True)
class HardNegativeDraw:
    """Which of its own hard negatives each row of a batch brings.

    Args:
        places: (rows, train_group_size − 1) int64, places from 0 in the row's own list.
        rows_repeating: Rows with fewer than that, so that some stand in the batch twice or more.
        rows_choosing: Rows with more, so that some stay out this time.
    """

    places: NDArray[np.int64]
    rows_repeating: int
    rows_choosing: int


def draw_hard_negatives(
    available: Sequence[int], train_group_size: int, rng: np.random.Generator
) -> HardNegativeDraw:
    """Draw train_group_size − 1 hard negatives for each row, where rows have different numbers of them.

    FlagEmbedding's rule (``AbsEmbedderTrainDataset``): a row with enough brings a random subset, drawn afresh each time; a
    row with fewer has its list repeated until it is long enough, and brings a random subset of that. So none is
    missing, but a short list weighs as much as a long one, and its negatives several times.

    Args:
        available: Hard negatives of each row, ≥ 1 where train_group_size > 1.
        train_group_size: Positives and negatives together, ≥ 1; 1 draws none.
        rng: Source of randomness.

    Raises:
        RequestError: ``sampler_invalid`` if train_group_size < 1.
        CorpusError: ``corpus_hard_negatives_missing`` if rows have none, with their number.
    """
    wanted = train_group_size - 1
    if wanted < 0:
        raise RequestError("sampler_invalid", f"train_group_size is {train_group_size}; it is at least 1.")
    numbers = np.asarray(available, dtype=np.int64)
    lacking = np.flatnonzero(numbers < 1) if wanted else np.empty(0, dtype=np.int64)
    if len(lacking):
        raise CorpusError(
            "corpus_hard_negatives_missing",
            f"{len(lacking)} rows have no hard negative, but train_group_size {train_group_size} asks for {wanted}.",
            count=len(lacking),
        )
    places = np.empty((len(numbers), wanted), dtype=np.int64)
    for number in np.unique(numbers) if wanted else ():
        copies = max(1, -(-wanted // int(number)))
        alike = np.flatnonzero(numbers == number)
        # The first few of a random order: those of random keys.
        order = rng.random((len(alike), int(number) * copies)).argsort(axis=1)
        places[alike] = order[:, :wanted] % number
    return HardNegativeDraw(
        places=places,
        rows_repeating=int((numbers < wanted).sum()),
        rows_choosing=int((numbers > wanted).sum()),
    )


def _rows_in_contrast(per_device_batch_size: int, world_size: int, *, gather: bool) -> int:
    if per_device_batch_size < 1 or world_size < 1:
        raise RequestError(
            "sampler_invalid",
            f"{per_device_batch_size} rows on each of {world_size} devices are no batch; both are at least 1.",
        )
    return per_device_batch_size * (world_size if gather else 1)
