"""The k most similar negative pairs of a batch, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["BLOCK_ELEMENTS", "TopPairs", "row_blocks", "top_pairs"]

BLOCK_ELEMENTS = 4_000_000
"""Similarities held at once: 16 MB in float32."""

_RESCORE_ROWS = 8_192
_SPARE_PAIRS = 8_192
"""Pairs held beyond twice the k that are asked for, before the hopeless ones are dropped."""

OnBlock = Callable[[int, int], None]


@dataclass(frozen=True)
class TopPairs:
    """The most similar negative pairs, most similar first; ties by (anchor, candidate).

    Args:
        similarity: (r,) float64, cosines clamped to [−1, 1], r ≤ k.
        anchor: (r,) int64, row of the anchor.
        candidate: (r,) int64, row of the candidate.
    """

    similarity: NDArray[np.float64]
    anchor: NDArray[np.int64]
    candidate: NDArray[np.int64]


def top_pairs(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32] | None = None,
    *,
    k: int,
    impl: Literal["blocked", "reference"] = "blocked",
    on_block: OnBlock | None = None,
) -> TopPairs:
    """Return the k most similar negative pairs.

    The naive equivalent, which `impl="reference"` is::

        s = anchors.astype(float64) @ (candidates or anchors).astype(float64).T
        pairs = [(-s[i, j], i, j) for i, j in (i < j if candidates is None else i != j)]
        sorted(pairs)[:k]

    The blocked implementation never allocates the N×N matrix: its memory is one block of `BLOCK_ELEMENTS` and about
    twice the k pairs. It screens with float32 products, keeps every pair within the proven rounding error of the k-th
    best, and rescores those in float64, so that its answer, ties included, is that of the naive one. k may be millions.

    Args:
        anchors: (N, d) float32, rows of unit length.
        candidates: (N, d) float32; candidate i is the positive of anchor i. None: the anchors themselves, unordered
            pairs, each once.
        k: How many pairs, at least 1; fewer come back where there are fewer.
        impl: Which implementation.
        on_block: Called with (rows done, rows) after each block; may raise to abandon the search.

    Returns:
        At most k pairs.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if anchors.ndim != 2 or (candidates is not None and candidates.shape != anchors.shape):
        raise ValueError("anchors and candidates must be (N, d) of the same shape")
    if impl == "reference":
        return _reference(anchors, candidates, k)
    # Only the first copies of a vector can be in the answer: a later copy has k twins that are as similar and earlier.
    # One more copy may be the row itself. Without this, a corpus of equal rows would tie everywhere.
    if candidates is None:
        rows = _first_copies(anchors, k + 1)
        found = _blocked_unordered(anchors[rows], k, on_block)
        return TopPairs(found.similarity, rows[found.anchor], rows[found.candidate])
    anchor_rows = _first_copies(anchors, k + 1)
    candidate_rows = _first_copies(candidates, k + 1)
    found = _blocked_ordered(
        anchors[anchor_rows], candidates[candidate_rows], anchor_rows, candidate_rows, k, on_block
    )
    return TopPairs(found.similarity, anchor_rows[found.anchor], candidate_rows[found.candidate])


def _reference(anchors: NDArray[np.float32], candidates: NDArray[np.float32] | None, k: int) -> TopPairs:
    n = len(anchors)
    own = np.eye(n, dtype=bool) if candidates is not None else np.tril(np.ones((n, n), dtype=bool))
    i, j = np.nonzero(~own)
    return _best(anchors, anchors if candidates is None else candidates, i, j, k)


def _best(
    left: NDArray[np.float32],
    right: NDArray[np.float32],
    i: NDArray[np.int64],
    j: NDArray[np.int64],
    k: int,
) -> TopPairs:
    """Score the pairs in float64, each with the same order of additions, and keep the k best."""
    scores = np.empty(len(i), dtype=np.float64)
    for start in range(0, len(i), _RESCORE_ROWS):
        part = slice(start, start + _RESCORE_ROWS)
        scores[part] = np.einsum(
            "nd,nd->n", left[i[part]].astype(np.float64), right[j[part]].astype(np.float64)
        )
    np.clip(scores, -1.0, 1.0, out=scores)
    order = np.lexsort((j, i, -scores))[:k]
    return TopPairs(scores[order], i[order], j[order])


def _first_copies(rows: NDArray[np.float32], copies: int) -> NDArray[np.int64]:
    """Indices of rows, leaving out all but the first `copies` of equal ones."""
    contiguous = np.ascontiguousarray(rows) + np.float32(0.0)  # −0.0 becomes 0.0: equal values, equal bytes
    keys = contiguous.view(np.dtype((np.void, contiguous.shape[1] * contiguous.itemsize))).ravel()
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    if counts.size == 0 or counts.max() <= copies:
        return np.arange(len(rows), dtype=np.int64)
    order = np.argsort(inverse, kind="stable")
    rank = np.empty(len(rows), dtype=np.int64)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.flatnonzero(rank < copies).astype(np.int64)


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut `rows` into slices whose product with `columns` stays within `BLOCK_ELEMENTS`."""
    step = max(1, min(rows, BLOCK_ELEMENTS // max(1, columns)))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _blocked_unordered(vectors: NDArray[np.float32], k: int, on_block: OnBlock | None) -> TopPairs:
    rows_of = torch.from_numpy(vectors)
    best = _Best(vectors, vectors, k)
    for rows in row_blocks(len(vectors), len(vectors)):
        # Row i needs its columns j > i only: the block's own triangle, and everything right of it.
        similarities = rows_of[rows] @ rows_of[rows.start :].T
        triangle = similarities[:, : rows.stop - rows.start]
        triangle.masked_fill_(torch.ones_like(triangle, dtype=torch.bool).tril_(), -torch.inf)
        best.add(similarities, rows.start, rows.start)
        if on_block is not None:
            on_block(rows.stop, len(vectors))
    return best.pairs()


def _blocked_ordered(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32],
    anchor_rows: NDArray[np.int64],
    candidate_rows: NDArray[np.int64],
    k: int,
    on_block: OnBlock | None,
) -> TopPairs:
    left, right = torch.from_numpy(anchors), torch.from_numpy(candidates)
    _, own_anchor, own_candidate = np.intersect1d(
        anchor_rows, candidate_rows, assume_unique=True, return_indices=True
    )
    best = _Best(anchors, candidates, k)
    for rows in row_blocks(len(anchors), len(candidates)):
        similarities = left[rows] @ right.T
        here = (own_anchor >= rows.start) & (own_anchor < rows.stop)
        similarities[own_anchor[here] - rows.start, own_candidate[here]] = -torch.inf
        best.add(similarities, rows.start, 0)
        if on_block is not None:
            on_block(rows.stop, len(anchors))
    return best.pairs()


class _Best:
    """The k best pairs of the blocks seen so far, screened in float32; scored exactly only at the end."""

    def __init__(self, left: NDArray[np.float32], right: NDArray[np.float32], k: int) -> None:
        self._left, self._right, self._k = left, right, k
        longest = [float(np.linalg.norm(side, axis=1).max(initial=0.0)) for side in (left, right)]
        # |fl(x·y) − x·y| ≤ γ_d ‖x‖‖y‖ (Higham 2002, §3.1): for the screened pair and for the k-th best alike.
        self._margin: float = 2.0 * (left.shape[1] + 2) * 2.0**-24 * longest[0] * longest[1] * 1.01
        self._row_maxima = torch.empty(0)
        self._floor = -3.0  # below every cosine and above the −inf of pairs that are no negatives
        self._held = [
            _Screened(torch.empty(0), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        ]
        self._room = 2 * k + _SPARE_PAIRS

    def add(self, similarities: torch.Tensor, first_row: int, first_column: int) -> None:
        """Take in a block; pairs that are no negatives hold −inf."""
        maxima = similarities.amax(dim=1)
        # The k-th largest of all rows' maxima is a lower bound of the k-th best pair.
        self._row_maxima = torch.cat([self._row_maxima, maxima])
        self._row_maxima = self._row_maxima.topk(min(self._k, len(self._row_maxima))).values
        if len(self._row_maxima) == self._k:
            self._floor = max(self._floor, float(self._row_maxima[-1]))
        open_rows = torch.nonzero(maxima >= self._threshold).ravel()
        block = similarities[open_rows]
        row, column = torch.nonzero(block >= self._threshold, as_tuple=True)
        self._held.append(_Screened(block[row, column], open_rows[row] + first_row, column + first_column))
        if sum(len(part.value) for part in self._held) > self._room:
            self._drop_hopeless()

    def pairs(self) -> TopPairs:
        """Score what is held in float64 and return the k best."""
        self._drop_hopeless()
        return self._scored()

    @property
    def _threshold(self) -> float:
        return max(self._floor - self._margin, -3.0)

    def _drop_hopeless(self) -> None:
        """Keep the pairs within the rounding error of the k-th best; where too many tie, the k best of them."""
        held = _Screened(*(torch.cat(column) for column in zip(*self._held, strict=True)))
        if len(held.value) > self._k:
            self._floor = max(self._floor, float(held.value.topk(self._k, sorted=False).values.min()))
            near = held.value >= self._threshold
            held = _Screened(*(column[near] for column in held))
        self._held = [held]
        if len(held.value) > self._room:
            best = self._scored()
            self._held = [
                _Screened(
                    torch.from_numpy(best.similarity).float(),
                    torch.from_numpy(best.anchor),
                    torch.from_numpy(best.candidate),
                )
            ]

    def _scored(self) -> TopPairs:
        (held,) = self._held
        return _best(self._left, self._right, held.row.numpy(), held.column.numpy(), self._k)


class _Screened(NamedTuple):
    """Pairs with their float32 similarities."""

    value: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
