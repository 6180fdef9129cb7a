"""Which rows to drop first, where dropping is the remedy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate.integral import Floats

__all__ = ["HarmfulRow", "most_harmful_rows"]


@dataclass(frozen=True)
class HarmfulRow:
    """A row, and the false push that goes with it.

    Args:
        row: Row of the corpus.
        false_push: What it adds to S(N) as an anchor and as a candidate, once the rows before it in the list are gone.
    """

    row: int
    false_push: float


def most_harmful_rows(
    anchor: NDArray[np.int64], candidate: NDArray[np.int64], push: Floats, *, rows: int, count: int
) -> list[HarmfulRow]:
    """List the rows whose removal takes most false push away, one after the other (greedy).

    After each row the push that it shared with others is gone, so that of two copies only one is listed. The list says what
    to try, not what it gains: the batch's free place goes to another row, and the push that a row received to other
    candidates. Measure that on the remaining rows, in a pass of its own.

    Args:
        anchor: (p,) anchor of each known false negative, each ordered pair once.
        candidate: (p,) its candidate.
        push: (p,) its q_N(i, j), from `DecompositionAccumulator.add`.
        rows: n.
        count: Longest list; it ends earlier where no false push is left.
    """
    left = np.bincount(anchor, push, minlength=rows) + np.bincount(candidate, push, minlength=rows)
    own, other = np.concatenate([anchor, candidate]), np.concatenate([candidate, anchor])
    order = np.argsort(own, kind="stable")
    other, shared = other[order], np.concatenate([push, push])[order]
    start = np.searchsorted(own[order], np.arange(rows + 1))
    # Sums of what is left after subtractions end in rounding errors, not in 0.
    negligible = 1e-9 * float(push.sum())
    listed = []
    for _ in range(min(count, rows)):
        row = int(left.argmax())
        if left[row] <= negligible:
            break
        listed.append(HarmfulRow(row, float(left[row])))
        left[row] = -np.inf
        pairs = slice(start[row], start[row + 1])
        np.subtract.at(left, other[pairs], shared[pairs])
    return listed
