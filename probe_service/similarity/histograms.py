"""Per-row histograms of the similarities of all ordered pairs, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.batches import KnownPairs
from probe_service.similarity.pairs import BLOCK_ELEMENTS
from probe_service.similarity.threads import in_turn

__all__ = ["BIN_CENTRES", "RowHistograms", "row_histograms"]

_BINS = 2048
_NO_PAIR = -2.0
"""Stands in the place of the own pair: below every threshold and floor, and in the first bin."""
_TILE_ROWS = 256
_TILE_COLUMNS = 2_048
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
        sources: (n,) number of each row's source, from 0; None: no histograms by source. Blocks shrink as sources grow in
            number: a few dozen at most.

    Yields:
        Histograms of a few hundred anchors at a time, fewer where the histograms by source are many.
    """
    right = anchors if candidates is None else candidates
    counting = _Counting(
        torch.from_numpy(anchors),
        torch.from_numpy(right),
        np.unique(np.array(thresholds, dtype=np.float32)),
        known,
        unjudged,
        worst_case_similarity,
        sources,
    )
    where = np.searchsorted(counting.thresholds, np.array(thresholds, dtype=np.float32))
    step = max(1, min(_TILE_ROWS, BLOCK_ELEMENTS // (counting.kinds * len(BIN_CENTRES))))
    blocks = [slice(first, min(first + step, block.stop)) for first in range(block.start, block.stop, step)]
    for found in in_turn(counting.count, blocks):
        yield replace(found, own=None if candidates is None else found.own, above=found.above[where])


@dataclass(frozen=True)
class _Counting:
    """What is counted, for any block of rows; see `row_histograms`."""

    left: torch.Tensor
    right: torch.Tensor
    thresholds: NDArray[np.float32]
    known: KnownPairs
    unjudged: NDArray[np.bool_] | None
    floor: float | None
    sources: NDArray[np.int64] | None

    @property
    def kinds(self) -> int:
        """How many sources are told apart."""
        return 1 if self.sources is None else int(self.sources.max()) + 1

    def count(self, rows: slice) -> RowHistograms:
        """Count the similarities of some rows to all columns, a tile at a time."""
        from probe_service.similarity import compiled

        bins, count, columns = len(BIN_CENTRES), rows.stop - rows.start, len(self.right)
        kind_bins = np.zeros(columns, dtype=np.uint32)
        if self.sources is not None:
            kind_bins = (self.sources * bins).astype(np.uint32)
        loose = np.zeros(columns, dtype=bool) if self.unjudged is None else self.unjudged
        counts = np.zeros((count, self.kinds * bins), dtype=np.int32)
        open_counts = np.zeros((0 if self.unjudged is None else count, bins), dtype=np.int32)
        above = np.zeros(len(self.thresholds), dtype=np.int64)
        pairs = self.known(rows)
        similarity, own = np.empty(len(pairs.anchor), dtype=np.float32), np.empty(count)
        buffer = torch.empty(count * _TILE_COLUMNS)
        for start in range(0, columns, _TILE_COLUMNS):
            stop = min(start + _TILE_COLUMNS, columns)
            tile = buffer[: count * (stop - start)].view(count, stop - start)
            torch.mm(self.left[rows], self.right[start:stop].T, out=tile)
            # The own pairs are counted in the first bin until they are taken out.
            if rows.start < stop and rows.stop > start:
                diagonal = torch.diagonal(tile, offset=rows.start - start)
                first = max(start - rows.start, 0)
                own[first : first + len(diagonal)] = diagonal.numpy()
                diagonal.fill_(_NO_PAIR)
            here = (pairs.candidate >= start) & (pairs.candidate < stop)
            similarity[here] = tile.numpy()[pairs.anchor[here] - rows.start, pairs.candidate[here] - start]
            compiled.count_tile(
                tile.numpy(),
                kind_bins[start:stop],
                loose[rows],
                loose[start:stop],
                np.float32(-1.5 if self.floor is None else self.floor),
                self.thresholds,
                counts,
                open_counts,
                above,
            )
        by_kind = counts.reshape(count, self.kinds, bins)
        own_kind = 0 if self.sources is None else self.sources[rows]
        by_kind[np.arange(count), own_kind, 0] -= 1
        known_bin = np.clip(np.rint((similarity + np.float32(1.0)) * np.float32(_BINS / 2)), 0, _BINS)
        known_bin = known_bin.astype(np.int64)
        place = (pairs.anchor - rows.start) * bins + known_bin
        worst = None
        if self.unjudged is not None:
            # Known pairs that are not open, or not similar enough, count as well.
            counted = self.unjudged[pairs.anchor] | self.unjudged[pairs.candidate]
            counted &= similarity >= np.float32(-1.5 if self.floor is None else self.floor)
            worst = open_counts + _histograms(place[~counted], count)
        return RowHistograms(
            rows=rows,
            candidates=(by_kind[:, 0] if self.kinds == 1 else by_kind.sum(axis=1)).astype(np.float32),
            known=_histograms(place, count),
            worst=None if worst is None else worst.astype(np.float32),
            own=np.clip(own, -1.0, 1.0),
            above=above.astype(np.float64),
            known_anchor=pairs.anchor,
            known_candidate=pairs.candidate,
            known_bin=known_bin,
            by_source=None if self.sources is None else by_kind.astype(np.float32),
        )


def _histograms(place: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
    """(r, bins) counts of places in all rows' histograms, one after the other."""
    counts = np.zeros(rows * len(BIN_CENTRES), dtype=np.float32)
    np.add.at(counts, place, np.float32(1.0))
    return counts.reshape(rows, -1)
