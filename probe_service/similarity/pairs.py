"""The k most similar negative pairs of a batch, exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.device import pairs_by_device
from probe_service.similarity.screen import Screen, int8_pays, rounding_of_float32
from probe_service.similarity.threads import alone, in_turn

__all__ = ["BLOCK_ELEMENTS", "TopPairs", "largest_product", "row_blocks", "top_pairs"]

BLOCK_ELEMENTS = 4_000_000
"""Similarities held at once: 16 MB in float32."""

_TILE_ROWS = 512
_TILE_COLUMNS = 1_024
"""A tile of products stays in a core's cache."""
_CROWDED = 8
"""A tile is looked at in float32 where more than one in so many of its pairs may be among the best."""
_SPARE_PAIRS = 1_024
"""Pairs held beyond twice the k that are asked for, before the hopeless ones are dropped."""
_SAMPLED_ROWS = 512
_SAMPLED_PAIRS = 16
"""The floor guessed from a sample leaves so many more pairs in it than are expected, and six times their root."""

OnBlock = Callable[[int, int], None]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class TopPairs:
    """The most similar negative pairs, most similar first; ties by (anchor, candidate).

    Args:
        similarity: (r,) float64, cosines clamped to [−1, 1], r ≤ k.
        anchor: (r,) int64, row of the anchor.
        candidate: (r,) int64, row of the candidate.
    """

    similarity: NDArray[np.float64]
    anchor: Places
    candidate: Places


_NONE = TopPairs(np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def top_pairs(
    anchors: NDArray[np.float32],
    candidates: NDArray[np.float32] | None = None,
    *,
    k: int,
    impl: Literal["fastest", "blocked", "reference"] = "fastest",
    on_block: OnBlock | None = None,
) -> TopPairs:
    """Return the k most similar negative pairs.

    The naive equivalent, which `impl="reference"` is::

        s = anchors.astype(float64) @ (candidates or anchors).astype(float64).T
        pairs = [(-s[i, j], i, j) for i, j in (i < j if candidates is None else i != j)]
        sorted(pairs)[:k]

    Large searches run on a GPU where there is one that gives the right pairs in a trial (see `device`); the answer is the same.
    The blocked implementation never allocates the N×N matrix: its memory is the rows' codes of one byte a number, a few tiles
    and about twice the k pairs. It screens tiles of products in low precision, on all of torch's threads, looks in float64 at
    every pair that may reach the k-th best by the proven bound of the error (see `screen`), and so gives the naive one's
    answer, ties included. k may be millions.

    Args:
        anchors: (N, d) float32, rows of unit length.
        candidates: (N, d) float32; candidate i is the positive of anchor i. None: the anchors themselves, unordered
            pairs, each once.
        k: How many pairs, at least 1; fewer come back where there are fewer.
        impl: Which implementation.
        on_block: Called with (tiles done, tiles) after each tile of the blocked one; may raise to abandon the search.

    Returns:
        At most k pairs.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if anchors.ndim != 2 or (candidates is not None and candidates.shape != anchors.shape):
        raise ValueError("anchors and candidates must be (N, d) of the same shape")
    if impl == "reference":
        return _reference(anchors, candidates, k)
    if impl == "fastest" and (near := pairs_by_device(anchors, candidates, k)) is not None:
        return _sorted(_scores(anchors, anchors if candidates is None else candidates, *near), *near, k)
    # Only the first copies of a vector can be in the answer: a later copy has k twins that are as similar and earlier.
    # One more copy may be the row itself. Without this, a corpus of equal rows would tie everywhere.
    left, left_rows = alone(lambda: _first_copies(anchors, k + 1))
    right, right_rows = left, left_rows
    if candidates is not None:
        right, right_rows = alone(lambda: _first_copies(candidates, k + 1))
    found = _Search(left, right, left_rows, right_rows, k, ordered=candidates is not None).run(on_block)
    return TopPairs(found.similarity, left_rows[found.anchor], right_rows[found.candidate])


def largest_product(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Return the largest cosine of any row of one (N, d) with any row of another (M, d), both of unit length and not empty."""
    left_rows = np.arange(len(left), dtype=np.int64)
    right_rows = np.arange(len(left), len(left) + len(right), dtype=np.int64)  # no row is another one's own
    search = _Search(left, right, left_rows, right_rows, 1, ordered=True)
    return float(search.run(None).similarity[0])


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Cut `rows` into slices whose product with `columns` stays within `BLOCK_ELEMENTS`."""
    step = max(1, min(rows, BLOCK_ELEMENTS // max(1, columns)))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _reference(anchors: NDArray[np.float32], candidates: NDArray[np.float32] | None, k: int) -> TopPairs:
    n = len(anchors)
    own = np.eye(n, dtype=bool) if candidates is not None else np.tril(np.ones((n, n), dtype=bool))
    i, j = np.nonzero(~own)
    return _sorted(_scores(anchors, anchors if candidates is None else candidates, i, j), i, j, k)


def _scores(
    left: NDArray[np.float32], right: NDArray[np.float32], i: Places, j: Places
) -> NDArray[np.float64]:
    """Products of pairs of rows in float64, each with the same order of additions."""
    from probe_service.similarity import compiled

    found = np.empty(len(i), dtype=np.float64)
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    compiled.scores(left, right, np.ascontiguousarray(i), np.ascontiguousarray(j), found)
    return found


def _sorted(score: NDArray[np.float64], i: Places, j: Places, k: int) -> TopPairs:
    """The k best, most similar first, ties by (i, j)."""
    similarity = np.clip(score, -1.0, 1.0)
    if len(similarity) > k:
        near = similarity >= np.partition(similarity, len(similarity) - k)[len(similarity) - k]
        similarity, i, j = similarity[near], i[near], j[near]
    order = np.argsort(-similarity)
    # Few are ties; sorting those alone by rows is much the fastest.
    equal = np.diff(similarity[order]) == 0
    tied = np.zeros(len(order), dtype=bool)
    tied[1:] |= equal
    tied[:-1] |= equal
    among = order[tied]
    order[tied] = among[np.lexsort((j[among], i[among], -similarity[among]))]
    order = order[:k]
    return TopPairs(similarity[order], i[order], j[order])


def _first_copies(rows: NDArray[np.float32], copies: int) -> tuple[NDArray[np.float32], Places]:
    """Leave out all but the first `copies` of equal rows.

    Returns:
        The rows that stay, without gaps, and their indices.
    """
    rows = np.require(rows, requirements=["C", "W"])
    every = np.arange(len(rows), dtype=np.int64)
    if copies >= len(rows):
        return rows, every
    # Equal rows have equal sums; only where many sums are equal are rows compared.
    sums = torch.from_numpy(rows).sum(dim=1).numpy()
    _, inverse, counts = np.unique(sums, return_inverse=True, return_counts=True)
    suspect = np.flatnonzero(counts[inverse] > copies)
    if not len(suspect):
        return rows, every
    compared = rows[suspect] + np.float32(0.0)  # −0.0 becomes 0.0: equal values, equal bytes
    keys = compared.view(np.dtype((np.void, compared.shape[1] * compared.itemsize))).ravel()
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    rank = np.empty(len(suspect), dtype=np.int64)
    rank[order] = np.arange(len(suspect)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = np.delete(every, suspect[rank >= copies])
    return (rows, every) if len(kept) == len(every) else (rows[kept], kept)


class _Search:
    """One search for the k best pairs.

    Args:
        left, right: The vectors; the same array for unordered pairs.
        left_rows, right_rows: Their numbers, ascending: a row is no negative of the same number.
        k: How many.
        ordered: Whether (i, j) is another pair than (j, i).
    """

    def __init__(
        self,
        left: NDArray[np.float32],
        right: NDArray[np.float32],
        left_rows: Places,
        right_rows: Places,
        k: int,
        *,
        ordered: bool,
    ) -> None:
        self._left, self._right, self._ordered, self._k = left, right, ordered, k
        self._left_rows, self._right_rows = left_rows, right_rows
        self._buffers = threading.local()
        pairs = len(left) * (len(left) - 1) // 2
        if ordered:
            pairs = len(left) * len(right) - len(np.intersect1d(left_rows, right_rows, assume_unique=True))
        self._pairs = pairs

    def run(self, on_block: OnBlock | None) -> TopPairs:
        """Look at every tile."""
        if not self._pairs:
            return _NONE
        screen = alone(lambda: Screen.of(self._left, self._right)) if int8_pays() else None
        tiles = self._tiles()
        for floor in (alone(self._guessed_floor), -np.inf):
            best = _Best(self._k, floor)
            for done, _ in enumerate(in_turn(lambda tile: self._look(screen, best, *tile), tiles), 1):  # noqa: B023
                if on_block is not None:
                    on_block(done, len(tiles))
            found = best.pairs()
            # All pairs that reach the floor were found: if they are enough, they have the best among them.
            if len(found.similarity) == min(self._k, self._pairs):
                break
        return found

    def _tiles(self) -> list[tuple[slice, slice]]:
        """Rows and columns that have all pairs among them; for unordered pairs those beyond the diagonal."""
        rows, columns = len(self._left), len(self._right)
        # Half of the tiles on the diagonal is in vain: small ones for few rows.
        step = _TILE_ROWS if self._ordered else min(_TILE_ROWS, max(64, rows // 1024 * 64))
        found = []
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            # Cut from the end, so that most tiles have the same width.
            for last in range(columns, 0 if self._ordered else start, -_TILE_COLUMNS):
                first = max(last - _TILE_COLUMNS, 0 if self._ordered else start)
                found.append((slice(start, stop), slice(first, last)))
        return found

    def _guessed_floor(self) -> float:
        """A similarity that probably k pairs reach and few more; −inf where the sample cannot tell."""
        rng = np.random.default_rng(0)
        sides = [
            rng.choice(len(side), min(len(side), max(64, len(side) // 32), _SAMPLED_ROWS), replace=False)
            for side in (self._left, self._right)
        ]
        i, j = (
            side.ravel()
            for side in np.meshgrid(self._left_rows[sides[0]], self._right_rows[sides[1]], indexing="ij")
        )
        products = (self._left[sides[0]] @ self._right[sides[1]].T).ravel()[i != j]
        expected = len(products) * self._k / self._pairs
        rank = int(expected + 6.0 * expected**0.5) + _SAMPLED_PAIRS
        if rank >= len(products) // 4:
            return -np.inf
        value = float(np.partition(products, len(products) - rank)[len(products) - rank])
        return min(value, 1.0) - self._rounding

    def _look(self, screen: Screen | None, best: _Best, rows: slice, columns: slice) -> None:
        """Take in the pairs of a tile that may be among the best."""
        if screen is None or best.floor == -np.inf or not self._screened(screen, best, rows, columns):
            self._in_float32(best, rows, columns)

    def _screened(self, screen: Screen, best: _Best, rows: slice, columns: slice) -> bool:
        """Screen a tile in int8; False where that leaves too many pairs."""
        from probe_service.similarity import compiled

        if not hasattr(self._buffers, "products"):
            self._buffers.products = torch.empty(_TILE_ROWS * _TILE_COLUMNS, dtype=torch.int32)
        products = screen.products(rows, columns, self._buffers.products)
        most = products.size // _CROWDED
        score, row, column = np.empty(most), np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        found = compiled.search_tile(
            products,
            screen.left_terms,
            screen.right_terms,
            self._left_rows,
            self._right_rows,
            self._left,
            self._right,
            rows.start,
            columns.start,
            self._ordered,
            screen.longest,
            screen.rounding,
            best.floor,
            most,
            score,
            row,
            column,
        )
        if found >= 0:
            best.add(score[:found], row[:found], column[:found])
        return found >= 0

    def _in_float32(self, best: _Best, rows: slice, columns: slice) -> None:
        """Screen a tile in float32."""
        products = torch.from_numpy(self._left[rows]) @ torch.from_numpy(self._right[columns]).T
        near = products >= best.floor - self._rounding
        left, right = (
            torch.from_numpy(self._left_rows[rows])[:, None],
            torch.from_numpy(self._right_rows[columns])[None, :],
        )
        near &= left != right if self._ordered else left < right
        row, column = (places.numpy() for places in torch.nonzero(near, as_tuple=True))
        row, column = row + rows.start, column + columns.start
        score = _scores(self._left, self._right, row, column)
        reached = score >= best.floor
        best.add(score[reached], row[reached], column[reached])

    @cached_property
    def _rounding(self) -> float:
        return rounding_of_float32(self._left, self._right)


class _Best:
    """The k best pairs of those seen so far, by several threads.

    Args:
        k: How many.
        floor: Pairs below it are left out from the start.
    """

    def __init__(self, k: int, floor: float) -> None:
        self._k, self.floor = k, floor
        """A similarity that the k best reach, as far as is known; lower pairs need not be added."""
        self._lock = threading.Lock()
        self._held: list[TopPairs] = []
        self._count = 0

    def add(self, score: NDArray[np.float64], row: Places, column: Places) -> None:
        """Take in pairs, with their exact similarities."""
        if not len(score):
            return
        with self._lock:
            # Copied: what is given may be the beginning of something larger.
            self._held.append(TopPairs(np.clip(score, -1.0, 1.0), row.copy(), column.copy()))
            self._count += len(score)
            if self._count > 2 * self._k + _SPARE_PAIRS:
                self._drop_hopeless()

    def pairs(self) -> TopPairs:
        """The k best, in order."""
        held = self._joined()
        return _sorted(held.similarity, held.anchor, held.candidate, self._k)

    def _drop_hopeless(self) -> None:
        """Keep the pairs that reach the k-th best; where too many tie, the k best of them."""
        held = self._joined()
        least = float(np.partition(held.similarity, self._count - self._k)[self._count - self._k])
        # Similarities of −1 may have been clamped: what is as similar may have a product below.
        self.floor = max(self.floor, least if least > -1.0 else -np.inf)
        near = held.similarity >= least
        held = TopPairs(held.similarity[near], held.anchor[near], held.candidate[near])
        if len(held.similarity) > 2 * self._k:
            held = _sorted(held.similarity, held.anchor, held.candidate, self._k)
        self._held, self._count = [held], len(held.similarity)

    def _joined(self) -> TopPairs:
        if not self._held:
            return _NONE
        return TopPairs(
            *(
                np.concatenate([getattr(part, name) for part in self._held])
                for name in ("similarity", "anchor", "candidate")
            )
        )
