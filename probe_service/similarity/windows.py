"""S(N) for every integer N from one similarity matrix of a random permutation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.batches import KnownPairs
from probe_service.similarity.pairs import row_blocks

__all__ = ["WindowShares", "measure_windows"]


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
    false_sum = torch.zeros(rows_total - 1, dtype=torch.float64)
    worst_sum = torch.zeros(rows_total - 1, dtype=torch.float64)
    for rows in row_blocks(num_anchors, 4 * rows_total):
        checkpoint()
        count = rows.stop - rows.start
        around = torch.arange(rows.start, rows.start + rows_total + count) % rows_total
        wide = (anchors[rows] @ right[around].T).contiguous()
        # Entry (r, t) of the slanted view is column r + 1 + t: the candidate t + 1 places after anchor r.
        slant = wide.as_strided((count, rows_total - 1), (wide.shape[1] + 1, 1), 1)
        logits = slant.double() / temperature
        logits -= logits.amax(dim=1, keepdim=True)
        # Float64 holds exp(−700); only a tiny temperature needs the slower sum of logarithms.
        log_total = torch.logcumsumexp(logits, dim=1) if 2.0 / temperature > 700.0 else None
        weights = logits.exp() if log_total is None else logits
        total = weights.cumsum(dim=1) if log_total is None else log_total
        is_false = torch.zeros((count, rows_total - 1), dtype=torch.bool)
        if known is not None:
            pairs = known(rows)
            anchor = torch.from_numpy(pairs.anchor)
            distance = (torch.from_numpy(pairs.candidate) - anchor) % rows_total
            is_false[anchor - rows.start, distance - 1] = True
        false_sum += _running_share(weights, total, is_false, logs=log_total is not None)
        if unjudged is None:
            continue
        counted = slant >= (-2.0 if worst_case_similarity is None else worst_case_similarity)
        if not bool(unjudged.all()):
            other = unjudged[around].expand(count, -1).contiguous()
            counted &= unjudged[rows, None] | other.as_strided(slant.shape, (other.shape[1] + 1, 1), 1)
        worst_sum += _running_share(weights, total, counted | is_false, logs=log_total is not None)
    false_share = (false_sum / num_anchors).clamp(0.0, 1.0).numpy()
    worst_share = false_share if unjudged is None else (worst_sum / num_anchors).clamp(0.0, 1.0).numpy()
    return WindowShares(false_share, worst_share)


def _running_share(
    weights: torch.Tensor, total: torch.Tensor, counted: torch.Tensor, *, logs: bool
) -> torch.Tensor:
    """Sum over rows of the counted weights' running sum over the running total."""
    if logs:
        part = torch.logcumsumexp(weights.masked_fill(~counted, -torch.inf), dim=1)
        return (part - total).exp().sum(dim=0)
    return ((weights * counted).cumsum(dim=1) / total).sum(dim=0)
