"""Per-row histograms of the similarities of all ordered pairs, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.batches import KnownPairs
from probe_service.similarity.pairs import row_blocks

__all__ = ["BIN_CENTRES", "RowHistograms", "row_histograms"]

_BINS = 2048
BIN_CENTRES: NDArray[np.float64] = np.linspace(-1.0, 1.0, _BINS + 1)
"""Centres of the bins; −1 and 1 are centres themselves, so that equal texts fall exactly on theirs."""


@dataclass(frozen=True)
class RowHistograms:
    """Counts of the candidates of some anchors by similarity.

    Args:
        rows: Which anchors.
        candidates: (r, bins) float32, all negatives.
        known: (r, bins) known false negatives.
        worst: (r, bins) known false negatives and those that the worst case counts; None if all pairs are judged.
        own: (r,) similarity of the anchor's own positive; None for sentences.
        above: (thresholds,) ordered negative pairs of these anchors with similarity ≥ each threshold.
    """

    rows: slice
    candidates: NDArray[np.float32]
    known: NDArray[np.float32]
    worst: NDArray[np.float32] | None
    own: NDArray[np.float64] | None
    above: NDArray[np.float64]


def row_histograms(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32] | None,
    *,
    block: slice,
    thresholds: Sequence[float],
    known: KnownPairs,
    unjudged: NDArray[np.bool_] | None,
    worst_case_similarity: float | None,
    checkpoint: Callable[[], None],
) -> Iterator[RowHistograms]:
    """Count the similarities of some anchors to all candidates, a few anchors at a time.

    Args:
        anchors: (n, d) float32 unit rows.
        candidates: (n, d) positives; None for sentences.
        block: The anchors.
        thresholds: Similarities of `above`.
        known: Known false negatives of a slice of anchors, among all n.
        unjudged: (n,) rows whose pairs are unjudged unless known; None if all are judged.
        worst_case_similarity: s₀; None counts every unjudged pair.
        checkpoint: Called between blocks; may raise.

    Yields:
        Histograms of as many anchors at a time as one block of similarities holds.
    """
    left = torch.from_numpy(anchors)
    right = left if candidates is None else torch.from_numpy(candidates)
    bins = len(BIN_CENTRES)
    loose = None if unjudged is None else torch.from_numpy(unjudged)
    for part in row_blocks(block.stop - block.start, max(len(right), bins)):
        checkpoint()
        rows = slice(block.start + part.start, block.start + part.stop)
        count = rows.stop - rows.start
        similarities = left[rows] @ right.T
        position = torch.arange(count)
        own = similarities[position, position + rows.start].double().clamp(-1.0, 1.0).numpy()
        index = similarities.add(1.0).mul_(_BINS / 2).round_().clamp_(0, _BINS).to(torch.int64)
        index += position[:, None] * bins
        negative = torch.ones_like(similarities, dtype=torch.bool)
        negative[position, position + rows.start] = False
        pairs = known(rows)
        is_known = torch.zeros_like(negative)
        is_known[torch.from_numpy(pairs.anchor - rows.start), torch.from_numpy(pairs.candidate)] = True

        def counted(
            mask: torch.Tensor, index: torch.Tensor = index, count: int = count
        ) -> NDArray[np.float32]:
            found = torch.bincount(index[mask], minlength=count * bins)
            histogram: NDArray[np.float32] = found.view(count, bins).numpy().astype(np.float32)
            return histogram

        worst = None
        if loose is not None:
            floor = -2.0 if worst_case_similarity is None else worst_case_similarity
            mask = similarities >= floor
            if not bool(loose.all()):
                mask &= loose[rows, None] | loose[None, :]
            worst = counted((mask | is_known) & negative)
        yield RowHistograms(
            rows,
            counted(negative),
            counted(is_known),
            worst,
            None if candidates is None else own,
            np.array([float((similarities[negative] >= threshold).sum()) for threshold in thresholds]),
        )
