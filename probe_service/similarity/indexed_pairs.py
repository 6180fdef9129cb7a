"""The most similar negative pairs of rows too many to compare each with each, through an index, and a check of what it misses.

FAISS's own range search is not used: on a GPU there is none, and a query with many rows near it has no bounded answer.
Instead each row's list of neighbours is made longer, until it reaches below the similarity that is asked for; the rest of
the crowd, which needs more than a thousand, is compared with every row. So no pair is lost because a list was full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.nearest import IndexKind, VectorIndex
from probe_service.similarity.pairs import BLOCK_ELEMENTS, TopPairs

__all__ = ["IndexedPairs", "RecallSample", "indexed_pairs"]

Vectors = NDArray[np.float32]
Floats = NDArray[np.float64]
Places = NDArray[np.int64]

LIST_LENGTHS = (17, 129, 1025)
"""Neighbours asked for at first, of the rows for which those are too few, and of those for which these are too few; one is
the row itself."""
SAMPLED_SHARE = 0.02
SAMPLED_AT_LEAST = 1_000

_ROWS_AT_ONCE = 8_192
_SPARE_PAIRS = 8_192
_TILE_ROWS = 256


@dataclass(frozen=True)
class RecallSample:
    """What the search found of what there is, for m of the different vectors, drawn at random.

    Args:
        nearest_found: (m,) bool, whether it found a negative as similar as the most similar one.
        pairs: (m,) int64, pairs of the vector that ought to be listed.
        found: (m,) int64, those of them that are.
    """

    nearest_found: NDArray[np.bool_]
    pairs: Places
    found: Places


@dataclass(frozen=True)
class IndexedPairs:
    """The most similar pairs that an index finds.

    Args:
        pairs: At most as many as were asked for, most similar first; ties by (anchor, candidate).
        truncated: Whether there are more that are similar enough.
        kind: Of the index.
        on_gpu: Where it was searched.
        sample: None where the index misses nothing.
    """

    pairs: TopPairs
    truncated: bool
    kind: IndexKind
    on_gpu: bool
    sample: RecallSample | None


def indexed_pairs(
    anchors: Vectors,
    candidates: Vectors | None = None,
    *,
    count: int,
    at_least: float = -1.0,
    kind: IndexKind | None = None,
    seed: int,
    checkpoint: Callable[[], None],
) -> IndexedPairs:
    """Find the most similar negative pairs: those of `top_pairs` that are similar enough, but for what the index misses.

    Equal vectors are one vector to the index, so that they do not fill each other's lists of neighbours; all pairs of
    their rows are in the answer. Similarities are computed in float64. Memory is that of the vectors, the index, and twice
    `count` pairs.

    Args:
        anchors: (n, d) float32 unit rows.
        candidates: (n, d), candidate i is the positive of anchor i. None: the anchors themselves, unordered pairs, each
            once.
        count: How many pairs at most, at least 1: the most similar ones.
        at_least: θ, smallest similarity of a pair.
        kind: Of the index; None: the one that suits n.
        seed: Of the index and of the sample.
        checkpoint: Called at least twice a second or so; may raise to abandon the search.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    if anchors.ndim != 2 or (candidates is not None and candidates.shape != anchors.shape):
        raise ValueError("anchors and candidates must be (n, d) of the same shape")
    rng = np.random.default_rng([seed, len(anchors)])
    left = _Distinct(anchors, checkpoint)
    right = left if candidates is None else _Distinct(candidates, checkpoint)
    index = VectorIndex(right.vectors, kind=kind, seed=seed, checkpoint=checkpoint)
    best = _Best(left, right, count + 1, at_least, checkpoint)
    nearest = _search(index, best, checkpoint)
    pairs = best.row_pairs()
    truncated = len(pairs.similarity) > count
    pairs = TopPairs(pairs.similarity[:count], pairs.anchor[:count], pairs.candidate[:count])
    sample = None
    if not index.exact:
        # Of pairs as similar as the last one that is listed, some may have been cut.
        level = np.nextafter(pairs.similarity[-1], 2.0) if truncated else at_least
        sample = _sample(best, nearest, float(level), rng, checkpoint)
    return IndexedPairs(pairs, truncated, index.kind, index.on_gpu, sample)


def _search(index: VectorIndex, best: _Best, checkpoint: Callable[[], None]) -> NDArray[np.float32]:
    """Offer all pairs that the lists of neighbours hold, and those of rows with too many.

    Returns:
        (u,) similarity of the most similar negative that was found for each different anchor.
    """
    open_rows = np.arange(len(best.left.vectors), dtype=np.int64)
    nearest = np.full(len(open_rows), -np.inf, dtype=np.float32)
    for length in LIST_LENGTHS:
        last = np.full(len(open_rows), -np.inf, dtype=np.float32)
        for found in index.nearest(best.left.vectors[open_rows], length):
            rows = open_rows[found.query]
            negative = (found.row >= 0) & (found.row != best.own[rows, None])
            similarity = np.where(negative, found.similarity, -np.inf)
            nearest[rows] = np.maximum(nearest[rows], similarity.max(axis=1))
            place, rank = np.nonzero(similarity >= best.threshold)
            best.offer(rows[place], found.row[place, rank])
            if found.row.shape[1] < index.rows:
                full = found.row[:, -1] >= 0
                last[found.query[full]] = found.similarity[full, -1]
        open_rows = open_rows[last >= best.threshold]
    for part, first, tile in _products(best, open_rows):
        row, column = np.nonzero(tile >= best.threshold)
        best.offer(open_rows[part][row], column + first)
        checkpoint()
    return nearest


def _products(best: _Best, anchors: Places) -> Iterator[tuple[slice, int, NDArray[np.float32]]]:
    """Similarities of some of the anchors with all candidates, by tiles; −∞ where a candidate is no negative.

    Yields:
        Places of the anchors, the first of the candidates, and the tile.
    """
    left, right = best.left.vectors, torch.from_numpy(best.right.vectors)
    for start in range(0, len(anchors), _TILE_ROWS):
        place = slice(start, min(len(anchors), start + _TILE_ROWS))
        rows, own = torch.from_numpy(left[anchors[place]]), best.own[anchors[place]]
        for first in range(0, len(right), BLOCK_ELEMENTS // _TILE_ROWS):
            tile = (rows @ right[first : first + BLOCK_ELEMENTS // _TILE_ROWS].T).numpy()
            here = np.flatnonzero((own >= first) & (own < first + tile.shape[1]))
            tile[here, own[here] - first] = -np.inf
            yield place, first, tile


def _sample(
    best: _Best,
    nearest: NDArray[np.float32],
    level: float,
    rng: np.random.Generator,
    checkpoint: Callable[[], None],
) -> RecallSample:
    """Compare some anchors with all candidates."""
    size = min(len(nearest), max(SAMPLED_AT_LEAST, int(SAMPLED_SHARE * len(nearest))))
    chosen = np.sort(rng.choice(len(nearest), size, replace=False))
    largest = np.full(size, -np.inf, dtype=np.float32)
    pairs, hits = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for place, first, similarity in _products(best, chosen):
        largest[place] = np.maximum(largest[place], similarity.max(axis=1))
        row, column = np.nonzero(similarity >= level - best.margin)
        keys = best.keys_of(chosen[place][row], column + first)
        enough = best.scores_of(keys) >= level
        row, keys = row[enough], keys[enough]
        pairs[place] += np.bincount(row, minlength=len(similarity))
        hits[place] += np.bincount(row[best.holds(keys)], minlength=len(similarity))
        checkpoint()
    # Both similarities are rounded.
    return RecallSample(nearest[chosen] >= largest - 2 * best.margin, pairs, hits)


class _Distinct:
    """The different vectors of some rows, numbered in the order in which they come, and the rows that have each."""

    def __init__(self, rows: Vectors, checkpoint: Callable[[], None]) -> None:
        numbers: dict[bytes, int] = {}
        self.number = np.empty(len(rows), dtype=np.int64)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            block = rows[start : start + _ROWS_AT_ONCE] + np.float32(
                0.0
            )  # −0.0 becomes 0.0: equal values, equal bytes
            for place, row in enumerate(block, start):
                key = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
                self.number[place] = numbers.setdefault(key, len(numbers))
            checkpoint()
        self.copies = np.bincount(self.number)
        self._rows: Places = np.argsort(self.number, kind="stable")
        self._start: Places = np.cumsum(self.copies) - self.copies
        self.first = self._rows[self._start]
        self.vectors = rows if len(numbers) == len(rows) else rows[self.first]

    def rows_of(self, vector: int) -> Places:
        """The rows that have a vector, ascending."""
        start = self._start[vector]
        return self._rows[start : start + self.copies[vector]]

    def second(self, vectors: Places) -> Places:
        """The second rows that have these vectors, of which each has two."""
        return self._rows[self._start[vectors] + 1]


class _Best:
    """The best pairs of different vectors that were offered so far, each once, scored in float64.

    A pair of vectors stands for all pairs of rows that have them. The best `count` pairs of rows lie in the best `count` pairs
    of vectors, if those are ranked by similarity and then by their first pair of rows.
    """

    def __init__(
        self, left: _Distinct, right: _Distinct, count: int, at_least: float, checkpoint: Callable[[], None]
    ) -> None:
        self.left, self.right = left, right
        self._unordered = left is right
        self._count, self._checkpoint = count, checkpoint
        self._floor = at_least
        longest = [float(np.linalg.norm(side.vectors, axis=1).max(initial=0.0)) for side in (left, right)]
        # |fl(x·y) − x·y| ≤ γ_d ‖x‖‖y‖ (Higham 2002, §3.1), whatever the order of additions.
        self.margin: float = (left.vectors.shape[1] + 2) * 2.0**-24 * longest[0] * longest[1] * 1.01
        self._keys, self._scores = np.empty(0, dtype=np.int64), np.empty(0)
        self._offered: list[Places] = []
        self._own_pairs = np.unique(left.number * len(right.vectors) + right.number, return_counts=True)
        # The one candidate of each anchor that is no negative: that of its only row, if no other row has it; else −1.
        self.own = right.number[left.first]
        self.own[(left.copies > 1) | (right.copies[self.own] > 1)] = -1
        if self._unordered:
            repeated = np.flatnonzero(left.copies > 1).astype(np.int64)
            self.offer(repeated, repeated)

    @property
    def threshold(self) -> float:
        """No pair whose float32 similarity is below it can be among the best."""
        return self._floor - self.margin

    def keys_of(self, anchor: Places, candidate: Places) -> Places:
        """One number for each pair of vectors; the same for both orders where pairs have none."""
        if self._unordered:
            anchor, candidate = np.minimum(anchor, candidate), np.maximum(anchor, candidate)
        return anchor * len(self.right.vectors) + candidate

    def offer(self, anchor: Places, candidate: Places) -> None:
        """Take pairs of vectors that are negatives; the same may come again."""
        self._offered.append(self.keys_of(anchor, candidate))
        if sum(map(len, self._offered)) > self._count + _SPARE_PAIRS:
            self._settle()

    def holds(self, keys: Places) -> NDArray[np.bool_]:
        """Which pairs are among the best."""
        return np.isin(keys, self._keys)

    def scores_of(self, keys: Places) -> Floats:
        """Cosines, clamped to [−1, 1], with the same order of additions for each."""
        anchor, candidate = np.divmod(keys, len(self.right.vectors))
        scores = np.empty(len(keys))
        for start in range(0, len(keys), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            rows = (self.left.vectors[anchor[part]], self.right.vectors[candidate[part]])
            scores[part] = np.einsum("nd,nd->n", rows[0].astype(np.float64), rows[1].astype(np.float64))
            self._checkpoint()
        return np.clip(scores, -1.0, 1.0)

    def row_pairs(self) -> TopPairs:
        """The best `count` pairs of rows."""
        self._settle()
        order, i, j = self._ranked(self._keys, self._scores)
        keys, scores = self._keys[order], self._scores[order]
        anchor, candidate = np.divmod(keys, len(self.right.vectors))
        pairs = self._pairs_of(anchor, candidate)
        before = np.cumsum(pairs) - pairs
        # Pairs of vectors that are equally similar share their places.
        tied_with = np.searchsorted(-scores, -scores, side="left")
        needed = before[tied_with] < self._count
        alone = needed & (pairs == 1)
        parts = [TopPairs(scores[alone], i[order][alone], j[order][alone])]
        held = int(alone.sum())
        for place in np.flatnonzero(needed & (pairs > 1)):
            rows = self._rows_of_pair(int(anchor[place]), int(candidate[place]))
            parts.append(TopPairs(np.full(len(rows[0]), scores[place]), *rows))
            held += len(rows[0])
            if held > 3 * self._count + _SPARE_PAIRS:
                parts, held = [self._first(parts)], self._count
                self._checkpoint()
        return self._first(parts)

    def _first(self, parts: list[TopPairs]) -> TopPairs:
        similarity, anchor, candidate = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("similarity", "anchor", "candidate")
        )
        order = np.lexsort((candidate, anchor, -similarity))[: self._count]
        return TopPairs(similarity[order], anchor[order], candidate[order])

    def _settle(self) -> None:
        """Score what was offered, and drop what is not among the best."""
        offered = np.setdiff1d(np.concatenate([np.empty(0, dtype=np.int64), *self._offered]), self._keys)
        self._offered = []
        scores = self.scores_of(offered)
        good = scores >= self._floor
        keys, scores = np.append(self._keys, offered[good]), np.append(self._scores, scores[good])
        if len(keys) >= self._count:
            self._floor = float(np.partition(scores, -self._count)[-self._count])
            better, tied = np.flatnonzero(scores > self._floor), np.flatnonzero(scores == self._floor)
            order, _, _ = self._ranked(keys[tied], scores[tied])
            kept = np.append(better, tied[order[: self._count - len(better)]])
            keys, scores = keys[kept], scores[kept]
        self._keys, self._scores = keys, scores
        self._checkpoint()

    def _ranked(self, keys: Places, scores: Floats) -> tuple[Places, Places, Places]:
        """Their order, and the first pair of rows of each."""
        anchor, candidate = np.divmod(keys, len(self.right.vectors))
        i, j = self.left.first[anchor], self.right.first[candidate]
        same = np.flatnonzero(i == j)  # no negative pair: the next one then
        later = self.right.copies[candidate[same]] > 1
        j[same[later]] = self.right.second(candidate[same[later]])
        i[same[~later]] = self.left.second(anchor[same[~later]])
        return np.lexsort((j, i, -scores)), i, j

    def _pairs_of(self, anchor: Places, candidate: Places) -> Places:
        """How many negative pairs of rows have these vectors."""
        own, counts = self._own_pairs
        keys = anchor * len(self.right.vectors) + candidate
        place = np.minimum(np.searchsorted(own, keys), len(own) - 1)
        negative: Places = np.multiply(self.left.copies[anchor], self.right.copies[candidate])
        negative -= np.where(own[place] == keys, counts[place], 0)
        if self._unordered:
            negative[anchor == candidate] //= 2
        return negative

    def _rows_of_pair(self, anchor: int, candidate: int) -> tuple[Places, Places]:
        """The negative pairs of rows that have two vectors, the first `count` of them."""
        left, right = self.left.rows_of(anchor), self.right.rows_of(candidate)
        if not self._unordered:
            left = left[: self._count // max(1, len(right) - 1) + 1]
            i, j = np.repeat(left, len(right)), np.tile(right, len(left))
            return i[i != j], j[i != j]
        found = [_ascending(left, right, self._count)]
        if anchor != candidate:
            found.append(_ascending(right, left, self._count))
        i, j = (np.concatenate(side) for side in zip(*found, strict=True))
        return i, j


def _ascending(left: Places, right: Places, most: int) -> tuple[Places, Places]:
    """The pairs with left < right, by left and then right, the first `most` of them."""
    start = np.searchsorted(right, left, side="right")
    length = len(right) - start
    needed = int(np.searchsorted(np.cumsum(length), most)) + 1
    left, start, length = left[:needed], start[:needed], length[:needed]
    step = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(left, length)[:most], right[np.repeat(start, length) + step][:most]
