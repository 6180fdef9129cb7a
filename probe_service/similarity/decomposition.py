"""False push of sampled batches by row and by source: what `estimate.SampledDecomposition` adds up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.batches import KnownPairs
from probe_service.similarity.pairs import row_blocks

__all__ = ["BatchDecomposition", "decompose_batches"]


@dataclass(frozen=True)
class BatchDecomposition:
    """The parts of S of each of b batches of N rows from k sources.

    Args:
        false: (b, k, k) float64, mean over anchors of their false push, by (anchor's source, candidate's source).
        push: (b, k, k) the same of all push; sums to 1.
        by_anchor: (b, N) what the anchor in each place adds to S.
        by_candidate: (b, N) the false push that the candidate in each place receives.
    """

    false: NDArray[np.float64]
    push: NDArray[np.float64]
    by_anchor: NDArray[np.float64]
    by_candidate: NDArray[np.float64]


def decompose_batches(
    anchors: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    temperature: float,
    known: KnownPairs,
    sources: NDArray[np.int64],
    source_count: int,
    checkpoint: Callable[[], None] = lambda: None,
) -> BatchDecomposition:
    """Cut up the softmax share of false negatives of a stack of batches.

    The naive equivalent for one batch, with S = anchors @ candidates.T and own positives left out::

        W = softmax(S / T, axis=1) / N
        false[a, c] = (W * known)[sources == a][:, sources == c].sum();  push[a, c] the same without known
        by_anchor = (W * known).sum(axis=1);  by_candidate = (W * known).sum(axis=0)

    Args:
        anchors: (b, N, d) float32 unit rows; b > 1 only where b·N² fits one block (`stack_size`).
        candidates: (b, N, d) the positives, by position; None for sentences.
        temperature: T > 0.
        known: Known false negatives.
        sources: (b, N) number of each row's source, below `source_count`.
        source_count: k.
        checkpoint: Called between blocks; may raise to abandon the work.
    """
    batches, size, _ = anchors.shape
    right = anchors if candidates is None else candidates
    k = source_count
    belongs = torch.nn.functional.one_hot(torch.from_numpy(sources), k).double()
    push = torch.zeros((batches, k, k), dtype=torch.float64)
    false = np.zeros(batches * k * k)
    by_anchor, by_candidate = np.zeros(batches * size), np.zeros(batches * size)
    for rows in row_blocks(size, size) if batches == 1 else [slice(0, size)]:
        checkpoint()
        logits = (anchors[:, rows] @ right.transpose(1, 2)).div_(temperature)
        torch.diagonal(logits, offset=rows.start, dim1=1, dim2=2).fill_(-torch.inf)
        weights = logits.softmax(dim=2, dtype=torch.float64).div_(size)
        push += belongs[:, rows].transpose(1, 2) @ (weights @ belongs)
        pairs = known(rows)
        found = weights.numpy()[pairs.batch, pairs.anchor - rows.start, pairs.candidate]
        cell = sources[pairs.batch, pairs.anchor] * k + sources[pairs.batch, pairs.candidate]
        false += np.bincount(pairs.batch * k * k + cell, found, minlength=len(false))
        by_anchor += np.bincount(pairs.batch * size + pairs.anchor, found, minlength=len(by_anchor))
        by_candidate += np.bincount(pairs.batch * size + pairs.candidate, found, minlength=len(by_candidate))
    return BatchDecomposition(
        false=false.reshape(batches, k, k),
        push=push.numpy(),
        by_anchor=by_anchor.reshape(batches, size),
        by_candidate=by_candidate.reshape(batches, size),
    )
