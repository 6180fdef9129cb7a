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
_NO_PAIR = -2.0
"""Stands in the place of the own pair: below every threshold, and counted in the first bin until it is taken out."""
BIN_CENTRES: NDArray[np.float64] = np.linspace(-1.0, 1.0, _BINS + 1)
"""Centres of the bins; −1 and 1 are centres themselves, so that equal texts fall exactly on theirs."""


@dataclass(frozen=True)
class RowHistograms:
    """Counts of the candidates of r anchors by similarity, and the p known false negatives among them one by one.

    Args:
        rows: Which anchors.
        candidates: (r, bins) float32, all negatives.
        known: (r, bins) known false negatives.
        worst: (r, bins) known false negatives and those that the worst case counts; None if all pairs are judged.
        own: (r,) similarity of the anchor's own positive; None for sentences.
        above: (thresholds,) ordered negative pairs of these anchors with similarity ≥ each threshold.
        known_anchor, known_candidate: (p,) rows of each known false negative.
        known_bin: (p,) the bin of its similarity.
        by_source: (r, sources, bins) `candidates` by the candidate's source; None where no sources were given.
    """

    rows: slice
    candidates: NDArray[np.float32]
    known: NDArray[np.float32]
    worst: NDArray[np.float32] | None
    own: NDArray[np.float64] | None
    above: NDArray[np.float64]
    known_anchor: NDArray[np.int64]
    known_candidate: NDArray[np.int64]
    known_bin: NDArray[np.int64]
    by_source: NDArray[np.float32] | None


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
    sources: NDArray[np.int64] | None = None,
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
        sources: (n,) number of each row's source, from 0; None: no histograms by source. Blocks shrink as sources grow in
            number: a few dozen at most.

    Yields:
        Histograms of as many anchors at a time as one block of similarities, or of their histograms, holds.
    """
    left = torch.from_numpy(anchors)
    right = left if candidates is None else torch.from_numpy(candidates)
    bins = len(BIN_CENTRES)
    loose = None if unjudged is None else torch.from_numpy(unjudged)
    parts = 1 if sources is None else int(sources.max()) + 1
    for part in row_blocks(block.stop - block.start, max(len(right), parts * bins)):
        checkpoint()
        rows = slice(block.start + part.start, block.start + part.stop)
        count = rows.stop - rows.start
        similarities = left[rows] @ right.T
        diagonal = torch.diagonal(similarities, offset=rows.start)
        own = diagonal.double().clamp(-1.0, 1.0).numpy()
        diagonal.fill_(_NO_PAIR)
        above = [float(torch.count_nonzero(similarities >= threshold)) for threshold in thresholds]
        pairs = known(rows)
        known_place = (torch.from_numpy(pairs.anchor - rows.start), torch.from_numpy(pairs.candidate))
        counted = None if loose is None else _unjudged_pairs(similarities, rows, loose, worst_case_similarity)
        # int32 holds every position: a block has at most `BLOCK_ELEMENTS`.
        bin_of = similarities.add_(1.0).mul_(_BINS / 2).round_().clamp_(0, _BINS).to(torch.int32)
        known_bin = bin_of[known_place].to(torch.int64).numpy()
        by_source = None
        if sources is None:
            total = _histogram(bin_of, bins)
            total[:, 0] -= 1  # where the own pair went
        else:
            by_source = _histogram(bin_of + torch.from_numpy(sources.astype(np.int32) * bins), parts * bins)
            by_source = by_source.reshape(count, parts, bins)
            by_source[np.arange(count), sources[rows], 0] -= 1
            total = by_source.sum(axis=1)
        worst = None
        if counted is not None:
            counted[known_place] = True
            # One bin after the last takes what is not counted.
            worst = _histogram(torch.where(counted, bin_of, bins), bins + 1)[:, :bins]
        found = np.bincount((pairs.anchor - rows.start) * bins + known_bin, minlength=count * bins)
        yield RowHistograms(
            rows=rows,
            candidates=total,
            known=found.reshape(count, bins).astype(np.float32),
            worst=worst,
            own=None if candidates is None else own,
            above=np.array(above),
            known_anchor=pairs.anchor,
            known_candidate=pairs.candidate,
            known_bin=known_bin,
            by_source=by_source,
        )


def _unjudged_pairs(
    similarities: torch.Tensor, rows: slice, loose: torch.Tensor, floor: float | None
) -> torch.Tensor:
    """(r, n) bool, the unjudged pairs that the worst case counts."""
    counted = similarities >= (-1.5 if floor is None else floor)
    if not bool(loose.all()):
        counted &= loose[rows, None] | loose[None, :]
    return counted


def _histogram(bin_of: torch.Tensor, bins: int) -> NDArray[np.float32]:
    """(r, bins) float32 counts of the bins in each row of (r, n) int32 `bin_of`."""
    place = bin_of + torch.arange(0, len(bin_of) * bins, bins, dtype=torch.int32)[:, None]
    counts = torch.bincount(place.view(-1), minlength=len(bin_of) * bins)
    histogram: NDArray[np.float32] = counts.view(len(bin_of), bins).numpy().astype(np.float32)
    return histogram
