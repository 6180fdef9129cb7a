"""The k most similar negative pairs on a GPU, exactly: one Triton kernel that never writes the similarities.

The kernel multiplies tiles of bfloat16 rows on the tensor cores, of the upper triangle only where pairs are unordered, and
keeps of each tile the few pairs that may be among the k best; it counts all others into a histogram, if asked to. Those few
are scored again in float64. It runs on CUDA, and on a CPU where TRITON_INTERPRET=1 was set before triton was imported.

Why no pair is missed: with q(x) = bfloat16(x) and ε = ‖x − q(x)‖, measured for every row, the product of two rounded rows is
off by at most ε_i ‖y‖ + ε_j ‖x‖ + ε_i ε_j (Cauchy–Schwarz), and its sum over d terms by γ_d ‖q(x)‖ ‖q(y)‖ in whatever order it
is taken (Higham 2002, §3.1). That bound is at most a_i + a_j for an a of each row, its slack. So s̃ − a_i − a_j is a lower and
s̃ + a_i + a_j an upper bound of the true similarity, k lower bounds prove how good the k-th best pair is at least, and whatever
has an upper bound below that is out.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from probe_service.similarity.pairs import TopPairs

__all__ = [
    "HISTOGRAM_BINS",
    "TILINGS",
    "NearBest",
    "PairScreen",
    "Screened",
    "Tiling",
    "batch_top_k_on_device",
    "pairs_near_best",
    "top_pairs_on_device",
]

HISTOGRAM_BINS = 256
"""Equal bins over [−1, 1]. Finer ones would be narrower than what bfloat16 may move a similarity by."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_MOST_IN_TILE = 64
"""k up to which a tile itself looks for its k best; it takes as many passes over the tile."""
_SUM_ROUNDING = 2.0**-22
"""Of one addition: tensor cores keep two bits fewer than float32 when they align the terms of a sum."""
_FEWEST_SLOTS = 2**18
_MOST_SLOTS = 2**26
_SAMPLE_ROWS = 4096
_RESCORED_AT_ONCE = 2**25
_SCORED_AT_ONCE = 8192
_GROUP = 8
"""Rows of tiles that are worked on side by side, so that their vectors stay in the L2 cache."""


@dataclass(frozen=True)
class Tiling:
    """How the kernel cuts its work: tiles of rows × columns, `depth` dimensions at a time, by so many warps and stages.

    With `registers` to a thread at most, several tiles may share a multiprocessor; the rare pairs to keep then cost more.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    registers: int | None = None


TILINGS = (
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 256, 64, 8, 4),
    Tiling(128, 128, 64, 8, 3, 128),
    Tiling(128, 128, 64, 8, 4),
)
"""What `benchmarks/gpu.py` compares on large problems; the first is the default there."""
_HISTOGRAM_TILING = Tiling(128, 128, 64, 8, 3)
_SMALL_TILINGS = (Tiling(64, 64, 64, 4, 3), _HISTOGRAM_TILING)


@dataclass(frozen=True)
class NearBest:
    """Negative pairs that hold the k best: those, and what is as good as the last of them up to float64's rounding.

    Args:
        anchor: (r,) int64, r ≥ k where there are so many pairs.
        candidate: (r,) int64.
        histogram: (256,) int64, all negative pairs by similarity, in bins of equal width over [−1, 1], where asked for; one that
            bfloat16 moves over an edge, by .004 at most, is counted on its other side.
    """

    anchor: torch.Tensor
    candidate: torch.Tensor
    histogram: torch.Tensor | None


@dataclass(frozen=True)
class Screened:
    """What one launch found in a stack of b batches of N rows.

    Args:
        count: () int64, pairs that may be among the k best; only the first of them are held if there was too little room.
        row: (slots,) int32, batch · N + i of each.
        column: (slots,) int32, j.
        score: (slots,) float32, s̃.
        bounds: (b,) float32, proven lower bounds of the k-th best similarity of each batch.
        histogram: (256,) int64 or None.
    """

    count: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    score: torch.Tensor
    bounds: torch.Tensor
    histogram: torch.Tensor | None

    def take(self, kept: torch.Tensor | slice) -> Screened:
        """Keep some of the pairs."""
        row, column, score = self.row[kept], self.column[kept], self.score[kept]
        return replace(self, row=row, column=column, score=score)


def pairs_near_best(
    anchors: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    k: int,
    with_histogram: bool = False,
    tiling: Tiling | None = None,
) -> NearBest | None:
    """Return negative pairs of vectors on a GPU that hold the k most similar ones.

    Memory: the vectors in bfloat16, and 12 bytes for each pair that bfloat16 cannot rule out.

    Args:
        anchors: (N, d) float32, rows of about unit length.
        candidates: (N, d) float32, the positives by row; None for unordered pairs of the anchors.
        k: How many, at least 1.
        with_histogram: Count the similarities of all pairs as well.
        tiling: How to cut the work; None: by N.

    Returns:
        The pairs in no order; None where more than 2²⁶ cannot be ruled out, as among vectors that are nearly all equal.
    """
    if tiling is None and with_histogram:
        tiling = _HISTOGRAM_TILING
    screen = PairScreen(anchors[None], None if candidates is None else candidates[None], tiling)
    found = _complete(screen, k, with_histogram)
    if found is None:
        return None
    i, j = found.row.long(), found.column.long()
    if len(i) > k:
        exact = _exact(anchors, anchors if candidates is None else candidates, i, j)
        near = exact >= exact.topk(k, sorted=False).values.min() - anchors.shape[1] * 2.0**-50
        i, j = i[near], j[near]
    return NearBest(i, j, found.histogram)


def top_pairs_on_device(
    anchors: torch.Tensor, candidates: torch.Tensor | None = None, *, k: int
) -> TopPairs | None:
    """Return the k most similar negative pairs, as `top_pairs` does, of vectors that lie on a GPU.

    Args:
        anchors: (N, d) float32, rows of about unit length.
        candidates: (N, d) float32, the positives by row; None for unordered pairs of the anchors.
        k: How many, at least 1.

    Returns:
        At most k pairs; None as of `pairs_near_best`.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    found = pairs_near_best(anchors, candidates, k=k)
    if found is None:
        return None
    right = anchors if candidates is None else candidates
    rows_i, of_i = torch.unique(found.anchor, return_inverse=True)
    rows_j, of_j = torch.unique(found.candidate, return_inverse=True)
    left_rows, right_rows = anchors[rows_i].cpu().numpy(), right[rows_j].cpu().numpy()
    left_places, right_places = of_i.cpu().numpy(), of_j.cpu().numpy()
    similarity = np.empty(len(left_places))
    # On the host, where equal rows give equal sums: on a GPU those of the last piece may be taken in another order.
    for start in range(0, len(similarity), _SCORED_AT_ONCE):
        part = slice(start, start + _SCORED_AT_ONCE)
        similarity[part] = np.einsum(
            "nd,nd->n",
            left_rows[left_places[part]].astype(np.float64),
            right_rows[right_places[part]].astype(np.float64),
        )
    np.clip(similarity, -1.0, 1.0, out=similarity)
    anchor, candidate = found.anchor.cpu().numpy(), found.candidate.cpu().numpy()
    order = np.lexsort((candidate, anchor, -similarity))[:k]
    return TopPairs(similarity[order], anchor[order], candidate[order])


def batch_top_k_on_device(
    anchors: torch.Tensor, candidates: torch.Tensor | None, *, k: int
) -> NDArray[np.float64]:
    """Return the k largest negative similarities of each batch: `batch_top_k` for batches on a GPU, all in one launch.

    Args:
        anchors: (b, N, d) float32, rows of about unit length.
        candidates: (b, N, d), or None for unordered pairs of the anchors.
        k: How many.

    Returns:
        (b, k) float64, exact, descending, NaN where a batch has fewer pairs.

    Raises:
        OverflowError: If more than 2²⁶ pairs of one batch cannot be ruled out.
    """
    batches, size, _ = anchors.shape
    values = np.full((batches, k), np.nan)
    if k == 0 or batches == 0:
        return values
    right = anchors if candidates is None else candidates
    if k > _MOST_IN_TILE and batches > 1:
        parts = [
            batch_top_k_on_device(anchors[[row]], None if candidates is None else candidates[[row]], k=k)
            for row in range(batches)
        ]
        return np.concatenate(parts)
    found = _complete(PairScreen(anchors, candidates), k, with_histogram=False)
    if found is None:
        half = batches // 2
        if not half:
            raise OverflowError(f"more than {_MOST_SLOTS} pairs of a batch cannot be ruled out in bfloat16")
        both = (slice(0, half), slice(half, None))
        return np.concatenate(
            [
                batch_top_k_on_device(anchors[part], None if candidates is None else candidates[part], k=k)
                for part in both
            ]
        )
    i = found.row.long()
    exact = _exact(anchors.flatten(0, 1), right.flatten(0, 1), i, i // size * size + found.column)
    order = exact.argsort(descending=True)
    batch = (i[order] // size).cpu().numpy()
    by_batch = np.argsort(batch, kind="stable")
    exact_values, batch = exact[order].cpu().numpy()[by_batch], batch[by_batch]
    rank = np.arange(len(batch)) - np.searchsorted(batch, batch)
    kept = rank < k
    values[batch[kept], rank[kept]] = exact_values[kept]
    return values


class PairScreen:
    """A stack of batches as the kernel takes it: rounded to bfloat16, with the slack of every row.

    Args:
        anchors: (b, N, d) float32.
        candidates: (b, N, d), or None for unordered pairs of the anchors.
        tiling: How to cut the work; None: by N.
    """

    def __init__(
        self, anchors: torch.Tensor, candidates: torch.Tensor | None, tiling: Tiling | None = None
    ) -> None:
        self.batches, self.size, dimension = anchors.shape
        self.ordered = candidates is not None
        self.device = anchors.device
        if tiling is None:
            tiling = next((each for each in _SMALL_TILINGS if self.size <= 16 * each.rows), TILINGS[0])
        self._tiling = tiling
        sides = [
            _Rounded(side, tiling.depth)
            for side in ([anchors] if candidates is None else [anchors, candidates])
        ]
        self._left, self._right = sides[0].rows, sides[-1].rows
        longest = torch.stack([side.longest for side in sides]).max()
        widest = torch.stack([side.error.max() for side in sides]).max()
        rounding = dimension * _SUM_ROUNDING / (1 - dimension * _SUM_ROUNDING)
        # ε_i ε_j ≤ (ε_i + ε_j) max ε / 2; the last term is for the float32 sums that compare with a bound.
        shared = (rounding * (longest + widest) ** 2 + 2e-7 * longest**2) / 2
        self._left_slack, self._right_slack = (
            (each.error * (longest + widest / 2) + shared) * (1 + 1e-6) for each in (sides[0], sides[-1])
        )
        self._tile_row, self._tile_column = _tiles(
            self.size, tiling, ordered=self.ordered, device=anchors.device
        )

    @property
    def pairs(self) -> int:
        """Negative pairs of one batch."""
        return self.size * (self.size - 1) // (1 if self.ordered else 2)

    def run(self, k: int, bounds: torch.Tensor, slots: int, *, with_histogram: bool = False) -> Screened:
        """Launch the kernel once; does not wait for it.

        Args:
            k: How many pairs of each batch are wanted.
            bounds: (b,) float32, lower bounds of the k-th best similarity of each batch to begin with. For few pairs, tiles
                raise them as they go.
            slots: Room for so many pairs.
            with_histogram: Count similarities.
        """
        device, tiling, tiles = self.device, self._tiling, len(self._tile_row)
        keys = _keys(bounds)
        count = torch.zeros((), dtype=torch.int64, device=device)
        next_slot = torch.zeros((), dtype=torch.int32, device=device)
        row, column = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2))
        score = torch.empty(slots, dtype=torch.float32, device=device)
        histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device) if with_histogram else None
        if tiles and self.batches:
            with torch.cuda.device(device if device.type == "cuda" else -1):
                _screen_tiles[(self.batches * tiles,)](
                    self._left,
                    self._right,
                    self._left_slack,
                    self._right_slack,
                    self._tile_row,
                    self._tile_column,
                    keys,
                    count,
                    next_slot,
                    row,
                    column,
                    score,
                    count if histogram is None else histogram,
                    self.size,
                    min(k, _MOST_IN_TILE),
                    tiles,
                    slots,
                    self._left.shape[2],
                    ordered=self.ordered,
                    rows=tiling.rows,
                    columns=tiling.columns,
                    depth=tiling.depth,
                    in_tile=k <= _MOST_IN_TILE,
                    bins=HISTOGRAM_BINS if with_histogram else 0,
                    num_warps=tiling.warps,
                    num_stages=tiling.stages,
                    maxnreg=tiling.registers,
                )
        if histogram is not None:
            # Places of a tile that are no pairs were counted at the bottom.
            histogram[0] -= self.batches * (tiles * tiling.rows * tiling.columns - self.pairs)
        return Screened(count, row, column, score, _floats(keys), histogram)

    def lower_bounds(self, screened: Screened) -> torch.Tensor:
        """Proven lower bounds of the true similarity of what was found, (count,) float32."""
        return screened.score - self._slack(screened)

    def upper_bounds(self, screened: Screened) -> torch.Tensor:
        """Proven upper bounds."""
        return screened.score + self._slack(screened)

    def guessed_bound(self, k: int, *, generosity: float) -> float:
        """A similarity that about k pairs of a single batch exceed, by a sample of its rows; the more generous, the lower.

        With k pairs of the sample itself above it, it is a bound.
        """
        # Every so many-th row; all of them where there are few.
        step = max(1, self.size // _SAMPLE_ROWS)
        low = self._left[0, ::step].float() @ self._right[0, ::step].float().T
        low -= self._left_slack[0, ::step, None] + self._right_slack[0, None, ::step]
        left_out = torch.ones_like(low, dtype=torch.bool).tril_()
        low.masked_fill_(left_out.triu_() if self.ordered else left_out, -math.inf)
        sampled = len(low) * (len(low) - 1) // (1 if self.ordered else 2)
        expected = k * sampled / max(self.pairs, 1)
        rank = min(k, math.ceil(generosity * (expected + 4 * math.sqrt(expected) + 4)))
        if rank > sampled:
            return -math.inf
        return min(1.0, float(low.flatten().topk(rank, sorted=False).values.min()))

    def _slack(self, screened: Screened) -> torch.Tensor:
        row = screened.row.long()
        column = row // self.size * self.size + screened.column
        slack: torch.Tensor = self._left_slack.flatten()[row] + self._right_slack.flatten()[column]
        return slack


class _Rounded:
    """Rows (b, N, width) in bfloat16, with zeros up to a multiple of `depth`, and how far each is from the true one."""

    def __init__(self, rows: torch.Tensor, depth: int) -> None:
        dimension = rows.shape[2]
        rounded = rows.to(torch.bfloat16)
        # The difference has no rounding error: both have the same first bits. Its length has, and that of the row.
        above = 1 + (dimension + 4) * 2.0**-23
        self.error = torch.linalg.vector_norm(rows - rounded.float(), dim=2) * above
        self.longest = torch.linalg.vector_norm(rows, dim=2).max() * above
        # Triton's interpreter takes the bits of bfloat16 for whole numbers in products; float32 holds the same values.
        stored = rounded.float() if _INTERPRETED else rounded
        self.rows = torch.nn.functional.pad(stored, (0, -dimension % depth)).contiguous()


def _complete(screen: PairScreen, k: int, with_histogram: bool) -> Screened | None:
    """Every pair that may be among the k best of its batch, and few others; None if they are too many."""
    in_tile, generosity = k <= _MOST_IN_TILE, 1.0
    bounds = torch.full((screen.batches,), -math.inf, device=screen.device)
    if not in_tile:
        bounds.fill_(screen.guessed_bound(k, generosity=generosity))
    slots = max(_FEWEST_SLOTS, 64 * k * screen.batches if in_tile else 4 * k)
    slots = min(slots, screen.batches * screen.pairs, _MOST_SLOTS)
    while True:
        found = screen.run(k, bounds, slots, with_histogram=with_histogram)
        count = int(found.count)
        found, proven = found.take(slice(0, min(count, slots))), found.bounds
        if screen.batches == 1:
            # Of any k pairs the worst is no better than the k-th best of all.
            low = screen.lower_bounds(found)
            kth = low.topk(k, sorted=False).values.min() if len(low) >= k else low.new_tensor(-math.inf)
            kth = kth.clamp(max=1.0)
            proven = torch.maximum(kth, proven) if in_tile else kth[None]
        if count > slots:
            if count > _MOST_SLOTS:
                return None
            bounds, slots = torch.maximum(bounds, proven), count
        elif in_tile or bool((proven >= bounds).all()):
            return found.take(screen.upper_bounds(found) >= proven[found.row // screen.size])
        elif count >= k:
            bounds = proven  # the guess was too high, and this is not
        else:
            generosity *= 8.0
            bounds.fill_(screen.guessed_bound(k, generosity=generosity))


def _exact(left: torch.Tensor, right: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Products of rows i of `left` and rows j of `right` in float64, clamped to [−1, 1]: all above 1 are ties."""
    step = max(1, _RESCORED_AT_ONCE // left.shape[1])
    parts = [
        (left[i[start : start + step]].double() * right[j[start : start + step]].double()).sum(dim=1)
        for start in range(0, len(i), step)
    ]
    found = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=left.device)
    return found.clamp_(-1.0, 1.0)


def _tiles(
    size: int, tiling: Tiling, *, ordered: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column number of every tile that holds a pair, as (tiles,) int32, in the order of work."""
    row, column = (
        torch.arange(math.ceil(size / step), device=device) for step in (tiling.rows, tiling.columns)
    )
    first_row, last_column = row * tiling.rows, (column + 1) * tiling.columns - 1
    row, column = torch.nonzero((last_column > first_row[:, None]) | ordered, as_tuple=True)
    # Stable sorts, the last key first: by group of rows, then column, then row.
    order = torch.argsort(column, stable=True)
    order = order[torch.argsort(row[order] // _GROUP, stable=True)]
    return row[order].to(torch.int32), column[order].to(torch.int32)


def _keys(values: torch.Tensor) -> torch.Tensor:
    """Float32 numbers as int32 numbers of the same order, so that the kernel's integer maximum is theirs."""
    bits = values.to(torch.float32).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _floats(keys: torch.Tensor) -> torch.Tensor:
    """The numbers of `_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


_LOWEST = tl.constexpr(float("-inf"))
_HIGHEST = tl.constexpr(float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _key(value: tl.tensor) -> tl.tensor:
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _number(key: tl.tensor) -> tl.tensor:
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# Compiling takes seconds: not again for every number that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["size", "k", "tiles", "slots"])  # type: ignore[untyped-decorator]
def _screen_tiles(
    left: tl.tensor,
    right: tl.tensor,
    left_slack: tl.tensor,
    right_slack: tl.tensor,
    tile_row: tl.tensor,
    tile_column: tl.tensor,
    keys: tl.tensor,
    count: tl.tensor,
    next_slot: tl.tensor,
    found_row: tl.tensor,
    found_column: tl.tensor,
    score: tl.tensor,
    histogram: tl.tensor,
    size: tl.tensor,
    k: tl.tensor,
    tiles: tl.tensor,
    slots: tl.tensor,
    width: tl.tensor,
    ordered: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    in_tile: tl.constexpr,
    bins: tl.constexpr,
) -> None:
    """One tile of one batch: its similarities, of which those are kept that may be among the k best of the batch."""
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    first_row = tl.load(tile_row + program % tiles) * rows
    first_column = tl.load(tile_column + program % tiles) * columns
    row, column = first_row + tl.arange(0, rows), first_column + tl.arange(0, columns)
    # Beyond the last row stands the last one again: loads need no mask, and the pairs are left out below.
    held_row, held_column = tl.minimum(row, size - 1), tl.minimum(column, size - 1)
    of_depth = tl.arange(0, depth)
    left_rows = left + batch * size * width + held_row[:, None].to(tl.int64) * width + of_depth[None, :]
    right_rows = right + batch * size * width + held_column[None, :].to(tl.int64) * width + of_depth[:, None]
    similarity = tl.zeros((rows, columns), dtype=tl.float32)
    for start in range(0, width, depth):
        similarity = tl.dot(tl.load(left_rows + start), tl.load(right_rows + start), similarity)
    if ordered:
        is_pair = (row[:, None] != column[None, :]) & (row < size)[:, None] & (column < size)[None, :]
        similarity = tl.where(is_pair, similarity, _LOWEST)
    elif (first_column < first_row + rows) | (first_column + columns > size):
        similarity = tl.where(
            (row[:, None] < column[None, :]) & (column < size)[None, :], similarity, _LOWEST
        )
    if bins:
        position = tl.minimum(tl.maximum((similarity + 1.0) * (bins / 2), 0.0), bins - 1.0).to(tl.int32)
        counts = tl.histogram(tl.reshape(position, [rows * columns]), bins)
        tl.atomic_add(histogram + tl.arange(0, bins), counts.to(tl.int64), sem="relaxed")
    slack_of_row = tl.load(left_slack + batch * size + held_row)
    slack_of_column = tl.load(right_slack + batch * size + held_column)
    # Other tiles raise it meanwhile: not from the cache of this multiprocessor.
    bound = _number(tl.load(keys + batch, volatile=True))
    most = (
        tl.max(tl.max(similarity, axis=1), axis=0)
        + tl.max(slack_of_row, axis=0)
        + tl.max(slack_of_column, axis=0)
    )
    # Most tiles end here. A bound of −∞ takes every pair but no place that is none.
    if (most >= bound) & (most > _LOWEST):
        slack = slack_of_row[:, None] + slack_of_column[None, :]
        if in_tile:
            # Equal ones are passed over together, so that the k-th found is the k-th best or worse.
            lowest = similarity - slack
            kth = tl.max(tl.max(lowest, axis=1), axis=0)
            for _ in range(1, k):
                kth = tl.max(tl.max(tl.where(lowest < kth, lowest, _LOWEST), axis=1), axis=0)
            # What rounding puts above 1 counts as 1, and is a tie.
            bound = tl.maximum(bound, tl.minimum(kth, 1.0))
            tl.atomic_max(keys + batch, _key(bound), sem="relaxed")
        hit = (similarity + slack >= bound) & (similarity > _LOWEST)
        tl.atomic_add(count, tl.sum(tl.sum(hit.to(tl.int32), axis=1), axis=0).to(tl.int64), sem="relaxed")
        # May pass 2³¹ and begin again, but not before `count` has said that there is too little room.
        slot = tl.atomic_add(
            next_slot + tl.zeros((rows, columns), dtype=tl.int32),
            tl.full((rows, columns), 1, dtype=tl.int32),
            mask=hit,
            sem="relaxed",
        )
        hit = hit & (slot >= 0) & (slot < slots)
        of_stack = (batch * size).to(tl.int32) + row
        tl.store(found_row + slot, tl.broadcast_to(of_stack[:, None], (rows, columns)), mask=hit)
        tl.store(found_column + slot, tl.broadcast_to(column[None, :], (rows, columns)), mask=hit)
        tl.store(score + slot, similarity, mask=hit)
