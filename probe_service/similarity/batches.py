"""What the similarities of many random batches say, in one pass over each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

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
Singles = NDArray[np.float32]
Places = NDArray[np.int64]

_COUNTS = ("false_n", "worst_n")
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
    checkpoint: Callable[[], None] = lambda: None,
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
    reached = np.zeros((batches, len(thresholds)), dtype=np.int64)
    found: dict[str, list[Floats]] = {}
    chances = np.array([] if borrowed is None else borrowed, dtype=np.float32)
    floor = -2.0 if worst_case_similarity is None else worst_case_similarity
    in_batch_tiers = known, certain, inferred

    for rows in _blocks(batches, measured, columns_in_all):
        checkpoint()
        in_batch = anchors[:, rows] @ right.transpose(1, 2)
        own = _leave_out_own(in_batch, rows)
        hardest = _row_maxima(in_batch, thresholds, reached)
        parts = [_Terms(in_batch, rows, in_batch_tiers, unjudged, unjudged)]
        if k:
            pairs = _each_once(in_batch, rows) if unordered else in_batch
            top.add(pairs)
            masked = parts[0].known
            masked_top.add(_without(pairs, masked.index) if masked.any else pairs)
        parts += [_Terms.further(block, rows) for block in further]
        maxima = np.max([hardest, *(_row_maxima(part.similarities) for part in parts[1:])], axis=0)
        sums = [part.sums(maxima, temperature, floor, chances) for part in parts]
        total = {name: np.sum([each[name] for each in sums], axis=0) for name in sums[0]}
        mass = total.pop("mass")
        columns = {name: sum_ / mass for name, sum_ in total.items() if name not in _COUNTS}
        columns |= {name: total[name] for name in _COUNTS}
        columns["eff"] = mass**2 / total["squares"]
        columns["log_mass"] = maxima.astype(np.float64) / temperature + np.log(mass)
        columns["hardest"] = np.minimum(hardest, 1.0).astype(np.float64)
        columns["own"] = (own if own_similarity is None else own_similarity[:, rows]).double().numpy()
        for name, column in columns.items():
            found.setdefault(name, []).append(column)
    row = {name: np.concatenate(parts, axis=1) for name, parts in found.items()}
    above = reached.astype(np.float64) * (size / measured)
    if candidates is None:
        above /= 2  # each unordered pair is seen from both its rows
    if candidates is None and own_similarity is None:
        weight = np.full((batches, measured), np.nan)
        log_xi = np.empty((batches, 0))
    else:
        log_xi = row["log_mass"] - row["own"] / temperature
        weight = np.exp(-np.logaddexp(0.0, np.log(own_terms) - log_xi))
    update_weight = weight.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = update_weight**2 / (measured * (weight**2).sum(axis=1))

    def mean_share(name: str) -> Floats:
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
        borrowed_share=mean_share("borrowed") if len(chances) else np.full(batches, np.nan),
        own_push=mean_share("own_push"),
        own_false=mean_share("own_false"),
        other_push=mean_share("other_push"),
        other_false=mean_share("other_false"),
        worst_count=row["worst_n"].mean(axis=1),
        worst_any_share=(row["worst_n"] > 0).mean(axis=1),
        worst_share=mean_share("worst"),
        update_weight=update_weight,
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


def _without(similarities: torch.Tensor, masked: tuple[Places, Places, Places]) -> torch.Tensor:
    kept = similarities.clone()
    kept[tuple(torch.from_numpy(part) for part in masked)] = -torch.inf
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


def _row_maxima(
    similarities: torch.Tensor, thresholds: Sequence[float] = (), reached: Places | None = None
) -> Singles:
    """Return the (b, rows) largest of (b, rows, c), and add to (b, thresholds) how many reach each threshold."""
    from probe_service.similarity import compiled

    batches, rows, columns = similarities.shape
    maxima = np.empty(batches * rows, dtype=np.float32)
    flat = similarities.numpy().reshape(-1, columns)
    if reached is None:
        reached = np.empty((batches, 0), dtype=np.int64)
    compiled.row_maxima(flat, np.array(thresholds, dtype=np.float32), maxima, reached)
    return maxima.reshape(batches, rows)


class _Here:
    """Marked pairs as an index into a block of similarities, (b, rows, c).

    Args:
        pairs: Finds the pairs of some anchors; None: there are none.
        rows: The anchors of the block.
    """

    def __init__(self, pairs: KnownPairs | None, rows: slice) -> None:
        none = np.empty(0, dtype=np.int64)
        self.index = none, none, none
        if pairs is not None:
            found = pairs(rows)
            self.index = found.batch, found.anchor - rows.start, found.candidate
        self.any = len(self.index[0]) > 0

    def sums(self, values: NDArray[Any], shape: tuple[int, int]) -> Floats:
        """(b, rows) sums of (p,) one value for each pair."""
        place = self.index[0] * shape[1] + self.index[1]
        sums = np.bincount(place, values, minlength=shape[0] * shape[1])
        return sums.astype(np.float64).reshape(shape)


class _Terms:
    """Some terms of the softmax of the anchors of a block.

    Args:
        similarities: (b, rows, c), −inf where there is no term.
        rows: The anchors.
        tiers: The pairs among them that are known; certain, or None: the same; known or inferred, or None: the same.
        left_unjudged, right_unjudged: (b, N) and (b, c), see `FurtherCandidates`.
        own_hard: (b, r, rows) view of `similarities`, the anchors' own hard negatives; None where these terms are no hard
            negatives.
    """

    def __init__(
        self,
        similarities: torch.Tensor,
        rows: slice,
        tiers: tuple[KnownPairs | None, KnownPairs | None, KnownPairs | None],
        left_unjudged: torch.Tensor | None,
        right_unjudged: torch.Tensor | None,
        own_hard: torch.Tensor | None = None,
    ) -> None:
        self.similarities, self._rows, self._own_hard = similarities, rows, own_hard
        known, certain, inferred = tiers
        self.known = _Here(known, rows)
        self._certain = self.known if certain is None else _Here(certain, rows)
        self._inferred = self.known if inferred is None else _Here(inferred, rows)
        batches, count = similarities.shape[:2]
        if left_unjudged is None or right_unjudged is None:
            self._row_open, self._column_open = np.zeros((batches, count), bool), np.zeros((batches, 0), bool)
        else:
            self._row_open = np.ascontiguousarray(left_unjudged[:, rows].numpy())
            self._column_open = np.ascontiguousarray(right_unjudged.numpy())

    @classmethod
    def further(cls, block: FurtherCandidates, rows: slice) -> _Terms:
        """The terms of some anchors in a block of further candidates."""
        similarities = block.left[:, rows] @ block.right.transpose(1, 2)
        size = block.left.shape[1]
        each_row = similarities.view(*similarities.shape[:2], size, -1)
        own = torch.diagonal(each_row, offset=rows.start, dim1=1, dim2=2)
        if not block.own_count:
            own.fill_(-torch.inf)
        tiers = block.known, block.certain, block.inferred
        return cls(
            similarities, rows, tiers, block.left_unjudged, block.right_unjudged, own if block.hard else None
        )

    def sums(self, maxima: Singles, temperature: float, floor: float, chances: Singles) -> dict[str, Floats]:
        """Put the weights exp((s − maximum) / T) in the place of the similarities, and return (b, rows) sums of them.

        Args:
            maxima: (b, rows) at least the largest similarity of each anchor.
            temperature: T.
            floor: s₀, or anything below all similarities.
            chances: (c,) p(s), see `measure_batches`; (0,): none.
        """
        from probe_service.similarity import compiled

        terms = self.similarities.numpy()
        shape = terms.shape[0], terms.shape[1]
        similarity = terms[self.known.index]
        own_chances = None if self._own_hard is None else self._chances_of_own(chances)
        found = np.empty((5, shape[0] * shape[1]))
        compiled.softmax_sums(
            terms.reshape(-1, terms.shape[2]),
            maxima.ravel(),
            np.float32(temperature),
            self._row_open.ravel(),
            self._column_open,
            np.float32(floor),
            chances,
            found,
        )
        names = "mass", "squares", "worst", "worst_n", "borrowed"
        sums = dict(zip(names, found.reshape(5, *shape), strict=True))
        weight = terms[self.known.index].astype(np.float64)
        sums["false"], sums["false_n"] = (
            self.known.sums(weight, shape),
            self.known.sums(np.ones(len(weight)), shape),
        )
        for name, tier in (("certain", self._certain), ("inferred", self._inferred)):
            sums[name] = sums["false"] if tier is self.known else tier.sums(terms[tier.index], shape)
        # Known pairs are counted as such, whatever they count as where they are open.
        is_open = self._open_pairs(*self.known.index)
        newly = ~(is_open & (similarity >= np.float32(floor)))
        sums["worst"] += self.known.sums(weight * newly, shape)
        sums["worst_n"] += self.known.sums(newly, shape)
        chance = _look_up(chances, similarity) * is_open
        sums |= dict.fromkeys(("own_push", "own_false", "other_push", "other_false"), np.zeros(shape))
        if self._own_hard is not None and own_chances is not None:
            own_weights = self._own_hard.double().numpy()
            # The borrowed curve says nothing of them.
            sums["borrowed"] -= (own_weights * own_chances).sum(axis=1)
            is_own = self.known.index[2] // len(own_weights[0]) == self.known.index[1] + self._rows.start
            chance[is_own] = 0.0
            sums["own_push"] = own_weights.sum(axis=1)
            sums["own_false"] = self.known.sums(weight * is_own, shape)
            sums["other_push"] = sums["mass"] - sums["own_push"]
            sums["other_false"] = self.known.sums(weight * ~is_own, shape)
        sums["borrowed"] += self.known.sums(weight * (1.0 - chance), shape)
        return sums

    def _open_pairs(self, batch: Places, row: Places, column: Places) -> NDArray[np.bool_]:
        """Whether pairs of these anchors are unjudged unless known."""
        if not self._column_open.shape[1]:
            return np.zeros(np.broadcast_shapes(batch.shape, row.shape, column.shape), dtype=bool)
        found: NDArray[np.bool_] = self._row_open[batch, row] | self._column_open[batch, column]
        return found

    def _chances_of_own(self, chances: Singles) -> Singles:
        """(b, r, rows) p(s) of the anchors' own hard negatives, 0 where they are judged."""
        assert self._own_hard is not None
        own = self._own_hard.numpy()
        batches, each, count = own.shape
        column = (np.arange(count) + self._rows.start) * each + np.arange(each)[:, None]
        is_open = self._open_pairs(np.arange(batches)[:, None, None], np.arange(count), column)
        found: Singles = _look_up(chances, own) * is_open
        return found


def _look_up(chances: Singles, similarities: Singles) -> Singles:
    """p(s) from a table from −1 to 1; 0 without one."""
    if not len(chances):
        return np.zeros_like(similarities)
    place = np.rint((np.clip(similarities, -1.0, 1.0) + np.float32(1.0)) * np.float32((len(chances) - 1) / 2))
    found: Singles = chances[place.astype(np.int64)]
    return found
