"""Similarities of negative pairs: the k best pairs of a batch, and what a batch's similarities say.

`top_pairs` finds the k most similar negative pairs, exactly, with their rows. `measure_batches` goes once over the
similarities of a stack of batches and keeps a few numbers of each; `measure_windows` gives one figure for every batch
size from one random order; `measure_subsets` finds the best pairs of many batches in one list of the corpus's. None
ever holds more than one block of the N×N matrix.
"""

from __future__ import annotations

from probe_service.similarity.batches import (
    BatchMeasurements,
    FurtherCandidates,
    KnownPairs,
    batch_top_k,
    measure_batches,
    noise_similarity,
    stack_size,
)
from probe_service.similarity.histograms import BIN_CENTRES, RowHistograms, row_histograms
from probe_service.similarity.pairs import TopPairs, top_pairs
from probe_service.similarity.subsets import (
    PairList,
    SubsetMeasurements,
    measure_subsets,
    most_similar_pairs,
)
from probe_service.similarity.threads import in_turn
from probe_service.similarity.windows import WindowShares, measure_windows

__all__ = [
    "BIN_CENTRES",
    "BatchMeasurements",
    "FurtherCandidates",
    "KnownPairs",
    "PairList",
    "RowHistograms",
    "SubsetMeasurements",
    "TopPairs",
    "WindowShares",
    "batch_top_k",
    "in_turn",
    "measure_batches",
    "measure_subsets",
    "measure_windows",
    "most_similar_pairs",
    "noise_similarity",
    "row_histograms",
    "stack_size",
    "top_pairs",
]
