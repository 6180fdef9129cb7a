"""What masking similar candidates does to S(N), without training: from the histograms of all pairs (STATISTICS §7).

A masked candidate keeps its place in the batch and receives no push: x = 0. The rest of the anchor's push is shared out
among its other candidates. An anchor all of whose candidates are masked pushes nothing, and counts neither above nor below
the line: S after masking is E[Σ_i share of anchor i on false negatives] / E[number of anchors that push], both over batches.
How many anchors push nothing is a figure of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from probe_service.estimate.exact import ExactShares, SizeScan
from probe_service.estimate.integral import (
    BlockPush,
    Counts,
    Floats,
    Layer,
    PushIntegral,
    Singles,
    inverse,
)

__all__ = ["Mask", "MaskAccumulator", "MaskEffect"]

_FIGURES = 7


@dataclass(frozen=True)
class Mask:
    """Which candidates an anchor does not push.

    With `relative_to_positive`, those with s_ij > s_ii⁺ − `value`; else those with s_ij ≥ `value`. Whole bins are masked, by
    their centres, so that the limit is off by up to half a bin (0.0005).

    Args:
        value: The margin, or the similarity.
        relative_to_positive: Which of the two; needs positives.
    """

    value: float
    relative_to_positive: bool

    def keeps(self, centres: Floats, own: Floats | None, anchors: int) -> NDArray[np.bool_]:
        """(r, bins) whether candidates in each bin stay."""
        if not self.relative_to_positive:
            return np.broadcast_to(centres < self.value, (anchors, len(centres)))
        if own is None:
            raise ValueError("a margin needs positives")
        # Copies of the positive are as similar as it, not more: without a margin the bin that both are in stays.
        same = (centres[1] - centres[0]) / 2 if self.value == 0 else 0.0
        kept: NDArray[np.bool_] = centres <= (own - self.value)[:, None] + same
        return kept


@dataclass(frozen=True)
class MaskEffect:
    """What one mask does, at N = 2, 3, …, L + 1; shares are 0–1.

    Args:
        mask: The mask.
        shares: S after masking, of the anchors that still push; 0 where none does.
        anchors_without_push: (L,) share of anchors all of whose candidates in a batch are masked.
        masked_candidates: Share of all candidates that are masked, the same at every N.
        true_push_lost: (L,) of the push on candidates that are not known to be false negatives, the share on masked ones.
        false_push_caught: (L,) of the push on known false negatives, the share on masked ones; NaN where there is none.
    """

    mask: Mask
    shares: ExactShares
    anchors_without_push: Floats
    masked_candidates: float
    true_push_lost: Floats
    false_push_caught: Floats

    @classmethod
    def from_sums(cls, mask: Mask, sums: Floats, *, rows: int) -> MaskEffect:
        """Finish the sums of all blocks of `MaskAccumulator`, added up.

        Args:
            mask: The mask.
            sums: (7, L) of this mask, see `MaskAccumulator.sums`.
            rows: n, anchors in all.
        """
        pushing, known, worst, lost, caught, false, masked = sums
        return cls(
            mask,
            ExactShares(_ratio(known, pushing, 0.0), _ratio(worst, pushing, 0.0), None, None),
            np.clip(1.0 - pushing / rows, 0.0, 1.0),
            float(masked[0] / rows / (rows - 1)),
            _ratio(lost, rows - false, 0.0),
            _ratio(caught, false, np.nan),
        )


class MaskAccumulator:
    """Adds up the effect of masks over blocks of anchors, for every integer N up to `largest`.

    Args:
        centres: (bins,) similarities of the histograms' bins.
        largest: Largest N.
        temperature: T.
        masks: The masks, each on its own.
    """

    def __init__(self, centres: Floats, *, largest: int, temperature: float, masks: Sequence[Mask]) -> None:
        self._centres, self._masks = centres, masks
        self._integral = PushIntegral(centres, temperature=temperature, largest=largest)
        self._scan = SizeScan(largest)
        self._sums = np.zeros((len(masks), _FIGURES, len(self._scan.sizes)))

    @property
    def sums(self) -> Floats:
        """(masks, 7, L) sums over the anchors so far, for each N from 2 on.

        P(pushes at all); that times the share on known false negatives after masking, and in the worst case; before masking:
        the push on masked candidates that are not known, on masked ones that are, and on all that are known; masked candidates.
        Sums of several accumulators add up.
        """
        return self._scan.at_every_size(self._sums)

    def add(
        self,
        candidates: Layer,
        known: Layer,
        worst: Layer | None,
        own: Floats | None,
    ) -> None:
        """Take in the histograms of a block of anchors, as `ShareAccumulator.add` does."""
        everything, marked = Counts.of(candidates), Counts.of(known)
        counted = None if worst is None else Counts.of(worst)
        before = self._integral.block(everything)
        masses = [before.mass(everything), before.mass(marked)]
        masked = [
            _Masked.of(
                mask.keeps(self._centres, own, len(everything.each)),
                everything,
                marked,
                counted,
                before,
                self._integral,
            )
            for mask in self._masks
        ]
        for each, sums in zip(masked, self._sums, strict=True):
            sums[6] += each.hidden.sum()
        masses += [mass for each in masked for mass in (each.total, each.false)]
        total, *layers = before.received(self._scan.sizes, masses)
        usual, *left = np.stack(layers) * inverse(total)
        for each, open_total, open_false, sums in zip(masked, left[::2], left[1::2], self._sums, strict=True):
            pushes, shares = each.after_masking(self._scan.sizes)
            sums[0] += pushes.sum(axis=1)
            sums[1:3] += (shares * pushes).sum(axis=2)
            sums[3] += (1.0 - open_total - usual + open_false).sum(axis=1)
            sums[4] += (usual - open_false).sum(axis=1)
            sums[5] += usual.sum(axis=1)


@dataclass(frozen=True)
class _Masked:
    """A block of r anchors, some of whose candidates are masked.

    Args:
        hidden: (r,) masked candidates.
        after: What the others receive.
        total, false, worst: (g, r) the summed push of all that stay, of known false negatives among them, and of those and
            what the worst case counts.
    """

    hidden: Floats
    after: BlockPush
    total: Singles
    false: Singles
    worst: Singles

    @classmethod
    def of(
        cls,
        kept: NDArray[np.bool_],
        candidates: Counts,
        known: Counts,
        worst: Counts | None,
        before: BlockPush,
        integral: PushIntegral,
    ) -> _Masked:
        """Mask all but the kept bins of these histograms, (r, bins) each."""
        left = Counts(candidates.histograms * kept)
        hidden = candidates.each - left.each
        false = before.mass(Counts(known.histograms * kept))
        return cls(
            hidden,
            integral.block(left, masked=hidden),
            before.mass(left),
            false,
            false if worst is None else before.mass(Counts(worst.histograms * kept)),
        )

    def after_masking(self, sizes: Sequence[float]) -> tuple[Floats, Floats]:
        """Return (sizes, r) P(an anchor pushes at all), and (2, sizes, r) its shares on known false negatives, and worst."""
        total, *false = self.after.received(sizes, [self.total, self.false, self.worst])
        candidates = self.after.candidates_each
        idle = np.stack([_all_drawn_from(self.hidden, candidates, size - 1) for size in sizes])
        return 1.0 - idle, np.stack(false) * inverse(total)


def _all_drawn_from(some: Floats, candidates: Floats, drawn: float) -> Floats:
    """P(all of `drawn` candidates are among `some` of them), C(some, drawn) / C(candidates, drawn)."""
    possible = some >= drawn
    log_share = np.full(len(some), -np.inf)
    few, all_ = some[possible], candidates[possible]
    log_share[possible] = (
        gammaln(few + 1) - gammaln(few - drawn + 1) - gammaln(all_ + 1) + gammaln(all_ - drawn + 1)
    )
    share: Floats = np.exp(np.minimum(log_share, 0.0))
    return share


def _ratio(part: Floats, whole: Floats, otherwise: float) -> Floats:
    positive = whole > 0
    return np.where(positive, np.clip(part / np.where(positive, whole, 1.0), 0.0, 1.0), otherwise)
