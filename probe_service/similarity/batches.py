"""What the similarities of many random batches say, in one pass over each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.device import batch_top_k_by_device
from probe_service.similarity.pairs import BLOCK_ELEMENTS, largest_product, row_blocks, top_pairs
from probe_service.similarity.screen import Screen, int8_pays
from probe_service.similarity.threads import in_turn

__all__ = [
    "BatchMeasurements",
    "FurtherCandidates",
    "KnownPairs",
    "batch_top_k",
    "measure_batches",
    "noise_similarity",
    "stack_size",
]

Floats = NDArray[np.float64]

_LARGEST_SQUARE = 512
"""Batches up to this size are screened whole, each by one core …"""
_ROWS_TOGETHER = 8_192
"""… and so many rows are coded at once."""


class Coordinates(Protocol):
    """Pairs of a stack of batches, as three columns of positions."""

    @property
    def batch(self) -> NDArray[np.int64]: ...
    @property
    def anchor(self) -> NDArray[np.int64]: ...
    @property
    def candidate(self) -> NDArray[np.int64]: ...


KnownPairs = Callable[[slice], Coordinates]
"""Known false negatives of the anchors in a slice of positions, each once, the own positive left out."""


@dataclass(frozen=True)
class FurtherCandidates:
    """Terms of the softmax beside the in-batch candidates: hard negatives, or another direction of the loss.

    Args:
        left: (b, N, d) float32, what stands for row i in these terms.
        right: (b, N·r, d) float32; columns i·r … i·r + r − 1 belong to row i.
        own_count: Whether a row's own columns are terms (its hard negatives), or are left out (its own pair, itself).
        hard: Whether these are hard negatives, whose shares are kept apart.
        known: Known false negatives, by column of `right`.
        certain: Those of the certain tier; None: the same as `known`.
        inferred: Known and inferred ones; None: the same as `known`.
        left_unjudged: (b, N) and
        right_unjudged: (b, N·r) bool: a pair with either is unjudged unless known; None: every pair is judged.
    """

    left: torch.Tensor
    right: torch.Tensor
    own_count: bool
    hard: bool
    known: KnownPairs
    certain: KnownPairs | None
    inferred: KnownPairs | None
    left_unjudged: torch.Tensor | None
    right_unjudged: torch.Tensor | None


@dataclass(frozen=True)
class BatchMeasurements:
    """One number (or row) for each of b batches; shares are 0–1.

    The similarities (the first five) are those of the in-batch candidates, as in the paper's Figure 1; all else is over all
    terms of the softmax.

    Args:
        top_k: (b, k) the k largest similarities of negative pairs; NaN where there are fewer pairs.
        masked_top_k: (b, k) the same with the known false negatives left out.
        hardest_negative: (b,) mean over anchors of the largest similarity.
        pairs_above: (b, t) negative pairs with similarity ≥ each threshold; estimated where not all anchors were measured.
        any_above: (b, t) 1 where there is such a pair, else 0; NaN where not all anchors were measured.
        false_count: (b,) mean over anchors of the number of known false negatives.
        false_any_share: (b,) share of anchors with at least one known false negative.
        false_share: (b,) mean over anchors of Σ_j w_ij [known], w_ij = softmax of s_ij/T over the negatives.
        certain_share: (b,) the same for the certain tier alone.
        inferred_share: (b,) the same with the inferred pairs counted too.
        borrowed_share: (b,) the same with each unjudged pair counted by the borrowed p(s), but for own hard negatives, of
            which it says nothing; NaN without such a curve.
        own_push: (b,) mean over anchors of Σ_j w_ij over their own hard negatives …
        own_false: (b,) … and over the known false ones among them.
        other_push: (b,) the same over other rows' hard negatives …
        other_false: (b,) … and the known false ones among them.
        worst_count: (b,) as false_count, with the unjudged pairs of similarity ≥ s₀ counted too.
        worst_any_share: (b,) share of anchors with at least one of those.
        worst_share: (b,) as false_share, with those pairs counted too.
        update_weight: (b,) Σ_i v_i, v_i = ξ_i / (own_terms + ξ_i); NaN without positives.
        false_update: (b,) Σ_i v_i Σ_j w_ij [known].
        worst_update: (b,) the same in the worst case.
        effective_anchors_share: (b,) (Σv)² / (N Σv²).
        effective_negatives: (b,) mean over anchors of 1/Σ_j w_ij².
        log_xi: (b, A) log ξ_i of the A anchors measured, or (b, 0) without positives.
    """

    top_k: Floats
    masked_top_k: Floats
    hardest_negative: Floats
    pairs_above: Floats
    any_above: Floats
    false_count: Floats
    false_any_share: Floats
    false_share: Floats
    certain_share: Floats
    inferred_share: Floats
    borrowed_share: Floats
    own_push: Floats
    own_false: Floats
    other_push: Floats
    other_false: Floats
    worst_count: Floats
    worst_any_share: Floats
    worst_share: Floats
    update_weight: Floats
    false_update: Floats
    worst_update: Floats
    effective_anchors_share: Floats
    effective_negatives: Floats
    log_xi: Floats

    @classmethod
    def concatenate(cls, parts: Sequence[BatchMeasurements]) -> BatchMeasurements:
        """Put the batches of several measurements one after the other."""
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


def batch_top_k(anchors: torch.Tensor, candidates: torch.Tensor | None, *, k: int) -> Floats:
    """Return the k largest negative similarities of each batch.

    Args:
        anchors: (b, N, d) float32 unit rows.
        candidates: (b, N, d), or None for unordered pairs of the anchors.
        k: How many.

    Returns:
        (b, k), descending, NaN where a batch has fewer pairs.
    """
    if (by_device := batch_top_k_by_device(anchors, candidates, k)) is not None:
        return by_device
    size = anchors.shape[1]
    sides = [side.numpy() for side in (anchors, candidates) if side is not None]
    if size <= _LARGEST_SQUARE and k <= _LARGEST_SQUARE // 8 and int8_pays():
        share = -(-len(anchors) // (4 * torch.get_num_threads()))
        step = max(1, min(share, _ROWS_TOGETHER // size))
        parts = [slice(first, first + step) for first in range(0, len(anchors), step)]
        found = in_turn(lambda part: _best_of_squares([side[part] for side in sides], k), parts)
        best = np.concatenate([np.empty((0, k)), *found])
    else:
        best = np.full((len(anchors), k), -np.inf)
        for values, *vectors in zip(best, *sides, strict=True):
            similarities = top_pairs(*vectors, k=k).similarity
            values[: len(similarities)] = similarities
    best[np.isneginf(best)] = np.nan
    return np.clip(best, -1.0, 1.0, out=best)


def noise_similarity(anchors: torch.Tensor, noise: torch.Tensor) -> tuple[float, float]:
    """Return the mean and the largest cosine of (N, d) unit rows to (M, d) noise vectors of any length."""
    noise = torch.nn.functional.normalize(noise, dim=1)
    # The mean of all products is the product of the means.
    mean = anchors.mean(dim=0, dtype=torch.float64) @ noise.mean(dim=0, dtype=torch.float64)
    return float(mean), largest_product(anchors.numpy(), noise.numpy())


def measure_batches(
    anchors: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    temperature: float,
    k: int,
    thresholds: Sequence[float],
    known: KnownPairs | None,
    certain: KnownPairs | None,
    unjudged: torch.Tensor | None,
    worst_case_similarity: float | None,
    checkpoint: Callable[[], None],
    inferred: KnownPairs | None = None,
    borrowed: Floats | None = None,
    own_similarity: torch.Tensor | None = None,
    own_terms: int = 1,
    further: Sequence[FurtherCandidates] = (),
    num_anchors: int | None = None,
) -> BatchMeasurements:
    """Measure the negatives of a stack of batches in one pass over their similarities.

    The naive equivalent for one batch, with S = anchors @ candidates.T and own positives left out::

        W = softmax(S / T, axis=1);  false_share = mean_i(sum_j(W * known));  …

    Only one block of similarities is held at a time; weights are computed relative to each row's largest similarity.

    Args:
        anchors: (b, N, d) float32 unit rows; b > 1 only where b·N² fits one block.
        candidates: (b, N, d) the positives, by position; None for sentences.
        temperature: T > 0.
        k: Ranks of `top_k`; 0 leaves them out.
        thresholds: Of `pairs_above`.
        known: Known false negatives; None if none is known.
        certain: Those of the certain tier; None: the same as `known`.
        unjudged: (b, N) bool, rows whose pairs are unjudged unless known; None if every pair is judged.
        worst_case_similarity: s₀; None counts every unjudged pair.
        checkpoint: Called between blocks; may raise to abandon the work.
        inferred: Known and inferred false negatives; None: the same as `known`.
        borrowed: (c,) p(s) at c equally spaced similarities from −1 to 1; None: no such curve.
        own_similarity: (b, N) s_ii⁺ of sentences, from elsewhere; None: that of the given positives, if any.
        own_terms: How often the own pair stands in the softmax; the push on the negatives together is
            ξ_i / (own_terms + ξ_i).
        further: Terms of the softmax beside the in-batch candidates.
        num_anchors: A, how many anchors of each batch are measured, the first ones; None: all N. The batches must then be in
            random order. Means over anchors stay what they are, the most similar pairs cannot be told: `k` must be 0.

    Returns:
        The measurements of the b batches.
    """
    batches, size, _ = anchors.shape
    measured = size if num_anchors is None else min(size, num_anchors)
    if k and measured < size:
        raise ValueError("the most similar pairs of a batch need all its anchors")
    right = anchors if candidates is None else candidates
    columns_in_all = size + sum(block.right.shape[1] for block in further)
    unordered = candidates is None
    top, masked_top = _TopValues(batches, k), _TopValues(batches, k)
    above = np.zeros((batches, len(thresholds)))
    found: dict[str, list[Floats]] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        found.setdefault(name, []).append(_array(value))

    for rows in _blocks(batches, measured, columns_in_all):
        checkpoint()
        in_batch = anchors[:, rows] @ right.transpose(1, 2)
        own = _leave_out_own(in_batch, rows)
        hardest = in_batch.amax(dim=2)
        for t, threshold in enumerate(thresholds):
            if float(hardest.max()) >= threshold:
                above[:, t] += (in_batch >= threshold).sum(dim=(1, 2)).numpy()
        marked = _Marked(rows, known, certain, inferred, further, size)
        if k:
            pairs = _each_once(in_batch, rows) if unordered else in_batch
            top.add(pairs)
            masked = marked.known.within(size)
            masked_top.add(pairs if masked is None else _without(pairs, masked))
        similarities, own_hard, other_hard = _all_terms(in_batch, rows, further)
        open_pairs = _unjudged_pairs(similarities, rows, unjudged, further)
        worst = (
            None
            if open_pairs is None
            else open_pairs
            & (similarities >= (-2.0 if worst_case_similarity is None else worst_case_similarity))
        )
        chances = None
        if borrowed is not None and open_pairs is not None:
            chances = _chances(similarities, open_pairs & ~own_hard, borrowed)
        maxima = similarities.amax(dim=2) if further else hardest
        weights = similarities.sub_(maxima[:, :, None]).div_(temperature).exp_()
        mass = weights.sum(dim=2, dtype=torch.float64)
        false_mass, false_n = marked.known.sums(weights)
        keep("hardest", hardest.clamp(max=1.0))
        keep("log_mass", maxima.double() / temperature + mass.log())
        keep("own", own if own_similarity is None else own_similarity[:, rows])
        keep("false", false_mass / mass)
        keep("false_n", false_n)
        keep("certain", marked.certain.sums(weights)[0] / mass)
        keep("inferred", marked.inferred.sums(weights)[0] / mass)
        if further:
            for name, mask in (("own", own_hard), ("other", other_hard)):
                keep(f"{name}_push", (weights * mask).sum(dim=2, dtype=torch.float64) / mass)
                keep(f"{name}_false", marked.known.where(mask).sums(weights)[0] / mass)
        if worst is None:
            found.setdefault("worst", []).append(found["false"][-1])
            found.setdefault("worst_n", []).append(found["false_n"][-1])
        else:
            if marked.known.any:
                worst[marked.known.index] = True
            keep("worst_n", worst.sum(dim=2))
            keep("worst", (weights * worst).sum(dim=2, dtype=torch.float64) / mass)
        if chances is not None:
            if marked.known.any:
                chances[marked.known.index] = 1.0
            keep("borrowed", (weights * chances).sum(dim=2, dtype=torch.float64) / mass)
        elif borrowed is not None:
            found.setdefault("borrowed", []).append(found["false"][-1])
        keep("eff", mass**2 / weights.square_().sum(dim=2, dtype=torch.float64))
    row = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    above *= size / measured
    if candidates is None:
        above /= 2  # each unordered pair is seen from both its rows
    if candidates is None and own_similarity is None:
        weight = np.full((batches, measured), np.nan)
        log_xi = np.empty((batches, 0))
    else:
        log_xi = row["log_mass"] - row["own"] / temperature
        weight = np.exp(-np.logaddexp(0.0, np.log(own_terms) - log_xi))
    total = weight.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = total**2 / (measured * (weight**2).sum(axis=1))

    def mean_share(name: str, missing: float = 0.0) -> Floats:
        if name not in row:
            return np.full(batches, missing)
        mean: Floats = np.clip(row[name], 0.0, 1.0).mean(axis=1)
        return mean

    return BatchMeasurements(
        top_k=top.values(),
        masked_top_k=masked_top.values(),
        hardest_negative=row["hardest"].mean(axis=1),
        pairs_above=above,
        any_above=(above > 0).astype(np.float64) if measured == size else np.full_like(above, np.nan),
        false_count=row["false_n"].mean(axis=1),
        false_any_share=(row["false_n"] > 0).mean(axis=1),
        false_share=mean_share("false"),
        certain_share=mean_share("certain"),
        inferred_share=mean_share("inferred"),
        borrowed_share=mean_share("borrowed", np.nan),
        own_push=mean_share("own_push"),
        own_false=mean_share("own_false"),
        other_push=mean_share("other_push"),
        other_false=mean_share("other_false"),
        worst_count=row["worst_n"].mean(axis=1),
        worst_any_share=(row["worst_n"] > 0).mean(axis=1),
        worst_share=mean_share("worst"),
        update_weight=total,
        false_update=(weight * np.clip(row["false"], 0.0, 1.0)).sum(axis=1),
        worst_update=(weight * np.clip(row["worst"], 0.0, 1.0)).sum(axis=1),
        effective_anchors_share=effective,
        effective_negatives=row["eff"].mean(axis=1),
        log_xi=log_xi,
    )


def stack_size(size: int, candidates_per_row: int = 1, *, num_anchors: int | None = None) -> int:
    """How many batches of `size` rows fit one block, each row bringing so many candidates."""
    columns = size * candidates_per_row
    rows = size if num_anchors is None else num_anchors
    return max(1, min(BLOCK_ELEMENTS // 4 // (rows * columns), 16_384 // columns))


def _best_of_squares(sides: list[NDArray[np.float32]], k: int) -> Floats:
    """(b, k) largest negative similarities of each batch; −inf where there are fewer."""
    from probe_service.similarity import compiled

    batches, size, dimension = sides[0].shape
    left, right = (np.ascontiguousarray(side).reshape(-1, dimension) for side in (sides[0], sides[-1]))
    screen = Screen.of(left, right if len(sides) == 2 else left)
    codes = [side.view(batches, size, -1) for side in (screen.left_codes, screen.right_codes)]
    square = torch.empty((size, size), dtype=torch.int32)
    products, best = square.numpy(), np.empty((batches, k))
    for number, (rows, columns) in enumerate(zip(codes[0], codes[1].transpose(1, 2), strict=True)):
        torch._int_mm(rows, columns, out=square)
        compiled.best_of_square(
            products,
            screen.left_terms,
            screen.right_terms,
            left,
            right,
            number * size,
            len(sides) == 2,
            screen.longest,
            screen.rounding,
            best[number],
        )
    return best


def _blocks(batches: int, rows: int, columns: int) -> list[slice]:
    if batches > 1:
        if batches * rows * columns > BLOCK_ELEMENTS:
            raise ValueError(
                f"{batches} batches of {rows} × {columns} pairs do not fit one block; measure fewer at a time"
            )
        return [slice(0, rows)]
    return list(row_blocks(rows, columns))


def _leave_out_own(similarities: torch.Tensor, rows: slice) -> torch.Tensor:
    """Set each anchor's own candidate to −inf and return what stood there, (b, rows)."""
    diagonal = torch.diagonal(similarities, offset=rows.start, dim1=1, dim2=2)
    own = diagonal.clone()
    diagonal.fill_(-torch.inf)
    return own


def _each_once(similarities: torch.Tensor, rows: slice) -> torch.Tensor:
    """The similarities of unordered pairs at their lower position; −inf at the other."""
    below = torch.ones(similarities.shape[1:], dtype=torch.bool).tril_(rows.start)
    return similarities.masked_fill(below, -torch.inf)


def _without(similarities: torch.Tensor, masked: tuple[torch.Tensor, ...]) -> torch.Tensor:
    kept = similarities.clone()
    kept[masked] = -torch.inf
    return kept


class _TopValues:
    """The k largest negative similarities of each batch, over its blocks."""

    def __init__(self, batches: int, k: int) -> None:
        self._k = k
        self._values = torch.empty((batches, 0))

    def add(self, similarities: torch.Tensor) -> None:
        """Take in rows; what is left out holds −inf."""
        # The k largest entries lie in the k rows with the largest maxima.
        best_rows = similarities.amax(dim=2).topk(min(self._k, similarities.shape[1]), dim=1).indices
        columns = best_rows[:, :, None].expand(-1, -1, similarities.shape[2])
        chosen = torch.gather(similarities, 1, columns).flatten(1)
        found = chosen.topk(min(self._k, chosen.shape[1]), dim=1).values
        merged = torch.cat([self._values, found], dim=1)
        self._values = merged.topk(min(self._k, merged.shape[1]), dim=1).values

    def values(self) -> Floats:
        values = np.full((len(self._values), self._k), np.nan)
        values[:, : self._values.shape[1]] = self._values.clamp(max=1.0).numpy()
        values[np.isneginf(values)] = np.nan
        return values


class _Here:
    """Marked pairs as an index into a block of similarities."""

    def __init__(self, index: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        self.index = index
        self.any = len(index[0]) > 0

    @classmethod
    def join(cls, pairs: Sequence[tuple[Coordinates, int]], rows: slice) -> _Here:
        """Pairs of several blocks of columns, each with its first column."""
        return cls(
            (
                torch.from_numpy(np.concatenate([found.batch for found, _ in pairs])),
                torch.from_numpy(np.concatenate([found.anchor for found, _ in pairs]) - rows.start),
                torch.from_numpy(np.concatenate([found.candidate + first for found, first in pairs])),
            )
        )

    def within(self, columns: int) -> tuple[torch.Tensor, ...] | None:
        """The index of the pairs in the first columns; None if there are none."""
        here = self.index[2] < columns
        return tuple(part[here] for part in self.index) if bool(here.any()) else None

    def where(self, mask: torch.Tensor) -> _Here:
        """The pairs at places (row, column) of the mask."""
        here = mask[self.index[1:]]
        return _Here((self.index[0][here], self.index[1][here], self.index[2][here]))

    def sums(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the weights of the pairs, and their number, for each row."""
        batches, rows, _ = weights.shape
        mass = torch.zeros(batches * rows, dtype=torch.float64)
        count = torch.zeros(batches * rows, dtype=torch.float64)
        if self.any:
            flat = self.index[0] * rows + self.index[1]
            mass.index_add_(0, flat, weights[self.index].double())
            count.index_add_(0, flat, torch.ones(len(flat), dtype=torch.float64))
        return mass.view(batches, rows), count.view(batches, rows)


class _Marked:
    """The pairs of each tier among the terms of some rows."""

    def __init__(
        self,
        rows: slice,
        known: KnownPairs | None,
        certain: KnownPairs | None,
        inferred: KnownPairs | None,
        further: Sequence[FurtherCandidates],
        size: int,
    ) -> None:
        firsts = np.cumsum([size, *(block.right.shape[1] for block in further)]).tolist()

        def join(first: KnownPairs | None, others: list[KnownPairs]) -> _Here:
            found = [] if first is None else [(first(rows), 0)]
            found += [(other(rows), begin) for other, begin in zip(others, firsts, strict=False)]
            if not found:
                empty = torch.empty(0, dtype=torch.int64)
                return _Here((empty, empty, empty))
            return _Here.join(found, rows)

        self.known = join(known, [block.known for block in further])
        self.certain = self.inferred = self.known
        if certain is not None or any(block.certain is not None for block in further):
            self.certain = join(certain or known, [block.certain or block.known for block in further])
        if inferred is not None or any(block.inferred is not None for block in further):
            self.inferred = join(inferred or known, [block.inferred or block.known for block in further])


def _all_terms(
    in_batch: torch.Tensor, rows: slice, further: Sequence[FurtherCandidates]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Similarities of all terms, (b, rows, columns), and the places of own and of others' hard negatives, (rows, columns)."""
    size = in_batch.shape[2]
    none = torch.zeros((rows.stop - rows.start, size), dtype=torch.bool)
    parts, own_parts, other_parts = [in_batch], [none], [none]
    row = torch.arange(rows.start, rows.stop)
    for block in further:
        similarities = block.left[:, rows] @ block.right.transpose(1, 2)
        owner = torch.arange(block.right.shape[1]) // (block.right.shape[1] // size)
        own = owner[None, :] == row[:, None]
        if not block.own_count:
            similarities.masked_fill_(own, -torch.inf)
        parts.append(similarities)
        own_parts.append(own & block.own_count & block.hard)
        other_parts.append(~own & block.hard)
    if not further:
        return in_batch, none, none
    return torch.cat(parts, dim=2), torch.cat(own_parts, dim=1), torch.cat(other_parts, dim=1)


def _unjudged_pairs(
    similarities: torch.Tensor,
    rows: slice,
    unjudged: torch.Tensor | None,
    further: Sequence[FurtherCandidates],
) -> torch.Tensor | None:
    """Terms about which nothing is known unless they are marked, (b, rows, columns); None if every pair is judged."""
    if unjudged is None and all(block.right_unjudged is None for block in further):
        return None
    batches, count, _ = similarities.shape
    size = similarities.shape[2] - sum(block.right.shape[1] for block in further)
    sides = [(unjudged, unjudged, size)]
    sides += [(block.left_unjudged, block.right_unjudged, block.right.shape[1]) for block in further]
    parts = []
    for left, right, columns in sides:
        if left is None or right is None:
            parts.append(torch.zeros((batches, count, columns), dtype=torch.bool))
        else:
            parts.append(left[:, rows, None] | right[:, None, :])
    # What is left out of the softmax is no pair.
    return torch.cat(parts, dim=2) & (similarities > -torch.inf)


def _chances(similarities: torch.Tensor, open_pairs: torch.Tensor, borrowed: Floats) -> torch.Tensor:
    """p(s) of the unjudged pairs, 0 elsewhere."""
    table = torch.from_numpy(borrowed).float()
    place = similarities.clamp(-1.0, 1.0).add(1.0).mul_((len(table) - 1) / 2).round_().to(torch.int64)
    return table[place] * open_pairs


def _array(tensor: torch.Tensor) -> Floats:
    return tensor.double().numpy()
