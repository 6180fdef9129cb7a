"""S(N) for every integer N from one similarity matrix of a random permutation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.batches import KnownPairs
from probe_service.similarity.threads import in_turn

__all__ = ["WindowShares", "measure_windows"]

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class WindowShares:
    """S at N = 2, 3, …, M for one permutation of M rows.

    Args:
        false_share: (M − 1,) float64, entry t belongs to N = t + 2; known false negatives only.
        worst_share: (M − 1,) the same with the worst case's pairs counted too.
    """

    false_share: NDArray[np.float64]
    worst_share: NDArray[np.float64]


def measure_windows(
    anchors: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    num_anchors: int,
    temperature: float,
    known: KnownPairs | None,
    unjudged: torch.Tensor | None,
    worst_case_similarity: float | None,
    checkpoint: Callable[[], None],
) -> WindowShares:
    """Return the softmax share of false negatives for every batch size up to M, from M rows in random order.

    In a random order, a row and the N − 1 rows after it (going round) are a random batch of N. So with the
    similarities of each row sorted by that distance, running sums give its share at every N at once. The naive
    equivalent, for each N and each start i < A::

        batch = [i, i + 1, …, i + N − 1] modulo M;  share of anchor i in `batch`

    Args:
        anchors: (M, d) float32 unit rows, in random order.
        candidates: (M, d) the positives; None for sentences.
        num_anchors: A, how many of the rows are anchors: the first ones, or all if there are fewer.
        temperature: T > 0.
        known: Known false negatives of a slice of anchors among the M rows, by position.
        unjudged: (M,) bool, rows whose pairs are unjudged unless known; None if all are judged.
        worst_case_similarity: s₀; None counts every unjudged pair.
        checkpoint: Called between blocks; may raise.

    Returns:
        The mean over the A anchors, for N = 2…M.
    """
    rows_total = len(anchors)
    num_anchors = min(num_anchors, rows_total)
    right = anchors if candidates is None else candidates
    is_open = np.zeros(0, dtype=bool) if unjudged is None else unjudged.numpy()
    floor = -2.0 if worst_case_similarity is None else worst_case_similarity

    def running_shares(rows: slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from probe_service.similarity import compiled

        starts, columns = np.zeros(rows.stop - rows.start + 1, dtype=np.int64), np.empty(0, dtype=np.int64)
        if known is not None:
            pairs = known(rows)
            order = np.argsort(pairs.anchor, kind="stable")
            columns = pairs.candidate[order]
            starts = np.searchsorted(pairs.anchor[order], np.arange(rows.start, rows.stop + 1))
        sums = np.zeros(rows_total - 1), np.zeros(0 if unjudged is None else rows_total - 1)
        compiled.add_running_shares(
            (anchors[rows] @ right.T).numpy(),
            rows.start,
            temperature,
            starts,
            columns,
            is_open,
            floor,
            *sums,
        )
        return sums

    false_sum, worst_sum = np.zeros(rows_total - 1), np.zeros(rows_total - 1)
    blocks = [
        slice(first, min(first + _ROWS_AT_ONCE, num_anchors))
        for first in range(0, num_anchors, _ROWS_AT_ONCE)
    ]
    for false, worst in in_turn(running_shares, blocks):
        checkpoint()
        false_sum += false
        if unjudged is not None:
            worst_sum += worst
    false_share = np.clip(false_sum / num_anchors, 0.0, 1.0)
    return WindowShares(
        false_share, false_share if unjudged is None else np.clip(worst_sum / num_anchors, 0.0, 1.0)
    )
