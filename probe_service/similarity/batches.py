"""What the similarities of many random batches say, in one pass over each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.pairs import BLOCK_ELEMENTS, row_blocks

__all__ = [
    "BatchMeasurements",
    "KnownPairs",
    "batch_top_k",
    "measure_batches",
    "noise_similarity",
    "stack_size",
]

Floats = NDArray[np.float64]


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
class BatchMeasurements:
    """One number (or row) for each of b batches; shares are 0–1.

    Args:
        top_k: (b, k) the k largest similarities of negative pairs; NaN where there are fewer pairs.
        masked_top_k: (b, k) the same with the known false negatives left out.
        hardest_negative: (b,) mean over anchors of the largest similarity.
        pairs_above: (b, t) negative pairs with similarity ≥ each threshold.
        false_count: (b,) mean over anchors of the number of known false negatives.
        false_share: (b,) mean over anchors of Σ_j w_ij [known], w_ij = softmax of s_ij/T over the negatives.
        certain_share: (b,) the same for the certain tier alone.
        worst_count: (b,) as false_count, with the unjudged pairs of similarity ≥ s₀ counted too.
        worst_any_share: (b,) share of anchors with at least one of those.
        worst_share: (b,) as false_share, with those pairs counted too.
        update_weight: (b,) Σ_i v_i; NaN without positives.
        false_update: (b,) Σ_i v_i Σ_j w_ij [known].
        worst_update: (b,) the same in the worst case.
        effective_anchors_share: (b,) (Σv)² / (N Σv²).
        effective_negatives: (b,) mean over anchors of 1/Σ_j w_ij².
        log_xi: (b, N) log ξ_i, or (b, 0) without positives.
    """

    top_k: Floats
    masked_top_k: Floats
    hardest_negative: Floats
    pairs_above: Floats
    false_count: Floats
    false_share: Floats
    certain_share: Floats
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
    best = _TopValues(len(anchors), k)
    right = anchors if candidates is None else candidates
    for rows in _blocks(anchors):
        similarities = anchors[:, rows] @ right.transpose(1, 2)
        _leave_out_own(similarities, rows)
        best.add(similarities, rows, unordered=candidates is None)
    return best.values()


def noise_similarity(anchors: torch.Tensor, noise: torch.Tensor) -> tuple[float, float]:
    """Return the mean and the largest cosine of (N, d) unit rows to (M, d) noise vectors of any length."""
    noise = torch.nn.functional.normalize(noise, dim=1)
    total, largest = 0.0, -1.0
    for rows in row_blocks(len(anchors), len(noise)):
        similarities = anchors[rows] @ noise.T
        total += float(similarities.sum(dtype=torch.float64))
        largest = max(largest, float(similarities.max()))
    return total / (len(anchors) * len(noise)), min(1.0, largest)


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
) -> BatchMeasurements:
    """Measure the negatives of a stack of batches in one pass over their similarities.

    The naive equivalent for one batch, with S = anchors @ candidates.T and own positives left out::

        W = softmax(S / T, axis=1);  false_share = mean_i(sum_j(W * known));  …

    Only one block of similarities is held at a time; weights are computed relative to each row's largest similarity.

    Args:
        anchors: (b, N, d) float32 unit rows; b > 1 only where b·N² fits one block.
        candidates: (b, N, d) the positives, by position; None for sentences.
        temperature: T > 0.
        k: Ranks of `top_k`.
        thresholds: Of `pairs_above`.
        known: Known false negatives; None if none is known.
        certain: Those of the certain tier; None: the same as `known`.
        unjudged: (b, N) bool, rows whose pairs are unjudged unless known; None if every pair is judged.
        worst_case_similarity: s₀; None counts every unjudged pair.
        checkpoint: Called between blocks; may raise to abandon the work.

    Returns:
        The measurements of the b batches.
    """
    batches, size, _ = anchors.shape
    right = anchors if candidates is None else candidates
    top, masked_top = _TopValues(batches, k), _TopValues(batches, k)
    above = np.zeros((batches, len(thresholds)))
    columns: dict[str, list[Floats]] = {
        name: []
        for name in ("hardest", "false", "certain", "worst", "false_n", "worst_n", "log_mass", "own", "eff")
    }
    for rows in _blocks(anchors):
        checkpoint()
        similarities = anchors[:, rows] @ right.transpose(1, 2)
        own = _leave_out_own(similarities, rows)
        maxima = similarities.amax(dim=2)
        top.add(similarities, rows, unordered=candidates is None)
        for t, threshold in enumerate(thresholds):
            if float(maxima.max()) >= threshold:
                above[:, t] += (similarities >= threshold).sum(dim=(1, 2)).numpy()
        pairs = None if known is None else known(rows)
        here = None if pairs is None else _Here(pairs, rows)
        worst = _worst_mask(similarities, rows, unjudged, worst_case_similarity)
        if here is not None and here.any:
            masked = similarities.clone()
            masked[here.index] = -torch.inf
            masked_top.add(masked, rows, unordered=candidates is None)
            del masked
        else:
            masked_top.add(similarities, rows, unordered=candidates is None)
        weights = similarities.sub_(maxima[:, :, None]).div_(temperature).exp_()
        mass = weights.sum(dim=2, dtype=torch.float64)
        false_mass, false_n = _sum_known(weights, here)
        columns["hardest"].append(_array(maxima.clamp(max=1.0)))
        columns["log_mass"].append(_array(maxima.double() / temperature + mass.log()))
        columns["own"].append(_array(own))
        columns["false"].append(_array(false_mass / mass))
        columns["false_n"].append(_array(false_n))
        if certain is None:
            columns["certain"].append(columns["false"][-1])
        else:
            columns["certain"].append(_array(_sum_known(weights, _Here(certain(rows), rows))[0] / mass))
        if worst is None:
            columns["worst"].append(columns["false"][-1])
            columns["worst_n"].append(columns["false_n"][-1])
        else:
            if here is not None and here.any:
                worst[here.index] = True
            columns["worst_n"].append(_array(worst.sum(dim=2)))
            columns["worst"].append(_array((weights * worst).sum(dim=2, dtype=torch.float64) / mass))
        columns["eff"].append(_array(mass**2 / weights.square_().sum(dim=2, dtype=torch.float64)))
    row = {name: np.concatenate(parts, axis=1) for name, parts in columns.items()}
    if candidates is None:
        above /= 2  # each unordered pair was seen from both its rows
        weight = np.full((batches, size), np.nan)
        log_xi = np.empty((batches, 0))
    else:
        log_xi = row["log_mass"] - row["own"] / temperature
        weight = np.exp(-np.logaddexp(0.0, -log_xi))
    total = weight.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = total**2 / (size * (weight**2).sum(axis=1))
    return BatchMeasurements(
        top_k=top.values(),
        masked_top_k=masked_top.values(),
        hardest_negative=row["hardest"].mean(axis=1),
        pairs_above=above,
        false_count=row["false_n"].mean(axis=1),
        false_share=np.clip(row["false"], 0.0, 1.0).mean(axis=1),
        certain_share=np.clip(row["certain"], 0.0, 1.0).mean(axis=1),
        worst_count=row["worst_n"].mean(axis=1),
        worst_any_share=(row["worst_n"] > 0).mean(axis=1),
        worst_share=np.clip(row["worst"], 0.0, 1.0).mean(axis=1),
        update_weight=total,
        false_update=(weight * np.clip(row["false"], 0.0, 1.0)).sum(axis=1),
        worst_update=(weight * np.clip(row["worst"], 0.0, 1.0)).sum(axis=1),
        effective_anchors_share=effective,
        effective_negatives=row["eff"].mean(axis=1),
        log_xi=log_xi,
    )


def stack_size(size: int) -> int:
    """How many batches of `size` rows fit one block."""
    return max(1, min(BLOCK_ELEMENTS // 4 // (size * size), 16_384 // size))


def _blocks(anchors: torch.Tensor) -> list[slice]:
    batches, size, _ = anchors.shape
    if batches > 1:
        if batches * size * size > BLOCK_ELEMENTS:
            raise ValueError(
                f"{batches} batches of {size} rows do not fit one block; measure fewer at a time"
            )
        return [slice(0, size)]
    return list(row_blocks(size, size))


def _leave_out_own(similarities: torch.Tensor, rows: slice) -> torch.Tensor:
    """Set each anchor's own candidate to −inf and return what stood there, (b, rows)."""
    diagonal = torch.diagonal(similarities, offset=rows.start, dim1=1, dim2=2)
    own = diagonal.clone()
    diagonal.fill_(-torch.inf)
    return own


class _TopValues:
    """The k largest negative similarities of each batch, over its blocks."""

    def __init__(self, batches: int, k: int) -> None:
        self._k = k
        self._values = torch.empty((batches, 0))

    def add(self, similarities: torch.Tensor, rows: slice, *, unordered: bool) -> None:
        """Take in rows; what is left out holds −inf. Unordered pairs count at their lower position."""
        if unordered:
            right = similarities[:, :, rows.start :]
            below = torch.ones(right.shape[1:], dtype=torch.bool).tril_()
            right = right.masked_fill(below, -torch.inf)
        else:
            right = similarities
        # The k largest entries lie in the k rows with the largest maxima.
        best_rows = right.amax(dim=2).topk(min(self._k, right.shape[1]), dim=1).indices
        chosen = torch.gather(right, 1, best_rows[:, :, None].expand(-1, -1, right.shape[2])).flatten(1)
        found = chosen.topk(min(self._k, chosen.shape[1]), dim=1).values
        merged = torch.cat([self._values, found], dim=1)
        self._values = merged.topk(min(self._k, merged.shape[1]), dim=1).values

    def values(self) -> Floats:
        values = np.full((len(self._values), self._k), np.nan)
        values[:, : self._values.shape[1]] = self._values.clamp(max=1.0).numpy()
        values[np.isneginf(values)] = np.nan
        return values


class _Here:
    """Known pairs as an index into a block of similarities."""

    def __init__(self, pairs: Coordinates, rows: slice) -> None:
        self.index = (
            torch.from_numpy(pairs.batch),
            torch.from_numpy(pairs.anchor - rows.start),
            torch.from_numpy(pairs.candidate),
        )
        self.any = len(pairs.batch) > 0


def _sum_known(weights: torch.Tensor, here: _Here | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the weights of the known pairs, and their number, for each row."""
    batches, rows, _ = weights.shape
    mass = torch.zeros(batches * rows, dtype=torch.float64)
    count = torch.zeros(batches * rows, dtype=torch.float64)
    if here is not None and here.any:
        flat = here.index[0] * rows + here.index[1]
        mass.index_add_(0, flat, weights[here.index].double())
        count.index_add_(0, flat, torch.ones(len(flat), dtype=torch.float64))
    return mass.view(batches, rows), count.view(batches, rows)


def _worst_mask(
    similarities: torch.Tensor, rows: slice, unjudged: torch.Tensor | None, floor: float | None
) -> torch.Tensor | None:
    """Unjudged pairs that the worst case counts; None if every pair is judged."""
    if unjudged is None:
        return None
    mask = similarities >= (-2.0 if floor is None else floor)
    if not bool(unjudged.all()):
        mask &= unjudged[:, rows, None] | unjudged[:, None, :]
    return mask


def _array(tensor: torch.Tensor) -> Floats:
    return tensor.double().numpy()
