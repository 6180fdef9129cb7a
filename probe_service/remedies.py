"""What may be changed, each with what it does to S, and code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from probe_service.corpus import BatchSampler
from probe_service.errors import RequestError
from probe_service.estimate import EXACT, TEMPERATURES, ExactShares, MaskEffect, exact_scan, share_point
from probe_service.measure import AllPairs, AllPairsInDetail, Batches, EpochDraws, Shares, Task
from probe_service.schemas import (
    BatchSizeLimit,
    ColumnRoles,
    CurvePoint,
    Estimate,
    ProbeRequest,
    Remedy,
    RemedyKind,
    SamplerKind,
    SamplerOptions,
)
from probe_service.snippets import drop_rows, group_aware, masking_loss, training_arguments
from probe_service.workspace import Workspace

__all__ = ["Remedies", "training_snippet"]

MOST_ROWS_TO_DROP = 1000
SHARE_OF_ROWS_TO_DROP = 0.01


class Remedies:
    """Remedies that are tried at one batch size, where all pairs say what a batch does.

    Args:
        work: The rows.
        request: What was asked.
        shares: S of all encoded rows, whose pass over all pairs has run.
        assumption: What upper limits rest on where evidence is incomplete.
    """

    def __init__(self, work: Workspace, request: ProbeRequest, shares: Shares, assumption: str) -> None:
        self._work, self._request, self._shares, self._assumption = work, request, shares, assumption
        detail = shares.all_pairs
        self._detail = detail if isinstance(detail, AllPairsInDetail) else None
        self._size = None if self._detail is None else self._detail.deciding_size
        self._harmful: list[int] = []
        self._no_duplicates: Batches | None = None
        self._without_harmful: AllPairs | None = None
        population = shares.population
        if self._detail is None or self._size is None:
            return
        if not population.evidence.false_negative_counts().any():
            return
        rows = work.training_rows() if work.corpus.anchors is not None else None
        if rows is not None and any(rows.shared_texts):
            draws = EpochDraws(self._waiting_sampler, lambda: rows, population.plan)
            self._no_duplicates = shares.batches(
                self._size, name="no-duplicates", draws=draws, shares_alone=True
            )
        count = min(MOST_ROWS_TO_DROP, int(len(population) * SHARE_OF_ROWS_TO_DROP))
        self._harmful = sorted(row.row for row in self._detail.harmful_rows(count))
        if not self._harmful:
            return
        kept = np.setdiff1d(np.arange(len(population)), self._harmful)
        # A pass of its own: the list says which rows to try, not what dropping them gains.
        self._without_harmful = AllPairs(
            population.subset("without-harmful", kept, request.seed),
            [self._size],
            self._detail.largest,
            temperature=request.temperature,
            scratch=work.scratch,
        )

    @property
    def _waiting_sampler(self) -> SamplerOptions:
        """That of the request, with equal texts kept out of each device's batch."""
        return self._request.sampler.model_copy(update={"kind": SamplerKind.NO_DUPLICATES})

    def tasks(self) -> list[Task]:
        """What is measured for them alone."""
        found: list[Task] = []
        if self._no_duplicates is not None:
            found.append(self._no_duplicates)
        if self._without_harmful is not None:
            found.append(self._without_harmful)
        return found

    def result(self, curve: Sequence[CurvePoint]) -> list[Remedy]:
        """The remedies, those first that need no other loss.

        Args:
            curve: The figures as they are.
        """
        before = next((point for point in curve if point.batch_size == self._size), None)
        if before is None or before.false_negative_softmax_share is None:
            return []
        common = _Common(
            before.batch_size,
            before.false_negative_softmax_share,
            complete=self._shares.setting.complete,
            whole_corpus=self._shares.setting.plan.whole_corpus,
        )
        return [
            *self._waiting(common),
            *self._grouping(common),
            *self._dropping(common),
            *self._masking(common),
            *self._temperature(common),
            *_other_losses(common, before),
        ]

    def _waiting(self, common: _Common) -> list[Remedy]:
        if self._no_duplicates is None or not self._no_duplicates.exist:
            return []  # nothing to keep apart, or so few different texts that no batch can be filled
        setting = replace(self._shares.setting, plain=False)
        after = share_point(common.size, self._no_duplicates.result(), setting).estimate
        return [
            common.remedy(
                RemedyKind.NO_DUPLICATES,
                "Keep equal texts out of one batch",
                after,
                effect=f"With the sampler no_duplicates {common.change(after)}",
                snippet=training_snippet(
                    self._work, self._request, BatchSampler.of(self._waiting_sampler, common.size)
                ),
            )
        ]

    def _grouping(self, common: _Common) -> list[Remedy]:
        columns = self._work.corpus_info.columns
        if columns.group is None or self._work.corpus.anchors is None:
            return []
        after = None
        effect = "With a group-aware sampler no known false negative is left in a batch"
        if common.complete:
            how = "by construction: rows of one group, or with equal texts, never meet"
            after = Estimate(value=0.0, low=0.0, high=0.0, method=how)
            effect += f": {common.change(after)}"
        else:
            effect += "; those among rows without a group stay."
        return [
            common.remedy(
                RemedyKind.GROUP_AWARE,
                "Never put two rows of one group into a batch",
                after,
                effect=effect,
                snippet=group_aware(
                    BatchSampler.of(self._waiting_sampler, common.size),
                    temperature=self._request.temperature,
                    text_columns=_text_columns(columns),
                    group_column=columns.group,
                ),
            )
        ]

    def _dropping(self, common: _Common) -> list[Remedy]:
        if self._without_harmful is None:
            return []
        shares = self._without_harmful.shares
        after = common.share_after(shares)
        numbers = self._work.row_numbers(np.array(self._harmful, dtype=np.int64))
        rows = "row that brings" if len(numbers) == 1 else f"{len(numbers)} rows that bring"
        return [
            common.remedy(
                RemedyKind.DROP_HARMFUL_ROWS,
                f"Drop the {rows} most of the harm",
                after,
                n_max_after=self._limit(shares),
                effect=f"Without {len(numbers)} of {len(self._work.anchors)} rows {common.change(after)}",
                rows=numbers,
                snippet=drop_rows(numbers, rows_read=self._work.corpus_info.rows_read),
            )
        ]

    def _masking(self, common: _Common) -> list[Remedy]:
        if self._detail is None:
            return []
        return [self._mask(common, effect) for effect in self._detail.mask_effects()]

    def _mask(self, common: _Common, effect: MaskEffect) -> Remedy:
        at, value = common.size - 2, effect.mask.value
        after = common.share_after(effect.shares)
        lost, caught = float(effect.true_push_lost[at]), float(effect.false_push_caught[at])
        what = (
            f"more similar than the positive less {value:g}"
            if effect.mask.relative_to_positive
            else f"of similarity {value:g} or more"
        )
        said = [f"Leaving out candidates {what}: {common.change(after)}"]
        if not np.isnan(caught):
            said.append(
                f"It takes away {caught:.0%} of the push on known false negatives and {lost:.1%} of the other push."
            )
        idle = float(effect.anchors_without_push[at])
        if idle > 0.001:
            said.append(f"{idle:.1%} of the anchors push nothing any more.")
        return common.remedy(
            RemedyKind.MASK,
            f"Mask candidates {what}",
            after,
            n_max_after=self._limit(effect.shares),
            effect=" ".join(said),
            true_push_lost=lost,
            snippet=self._masking_snippet(value) if effect.mask.relative_to_positive else None,
        )

    def _limit(self, shares: ExactShares) -> BatchSizeLimit | None:
        """n_max; None where the shares are those of a sample, whose error they do not hold."""
        setting = self._shares.setting
        if not setting.plan.whole_corpus:
            return None
        return exact_scan(shares, complete=setting.complete).limit(
            self._request.budget, assumption=self._assumption
        )

    def _masking_snippet(self, margin: float) -> str | None:
        encoder = self._work.encoder_info
        if self._work.corpus.vectors is not None or encoder.name.startswith("openai:"):
            return None
        try:
            return masking_loss(
                margin,
                guide=encoder.name,
                temperature=self._request.temperature,
                gather=self._request.sampler.gather,
            )
        except RequestError:
            return None  # a guide that a plain load would pool wrongly

    def _temperature(self, common: _Common) -> list[Remedy]:
        """The lowest temperature above the present one that keeps within the budget, where the present one does not."""
        high = common.share.high
        if self._detail is None or high is None or high <= self._request.budget:
            return []
        known, worst = self._detail.by_temperature[:, :, self._detail.sizes.index(common.size)]
        upper = known if common.complete else np.maximum(known, worst)
        for temperature, value, limit in zip(TEMPERATURES, known, upper, strict=True):
            if temperature > self._request.temperature and limit <= self._request.budget:
                after = common.bounds(float(value), float(limit))
                effect = (
                    f"At T = {temperature:.3g} {common.change(after)} A higher temperature also spreads the push over easier "
                    "negatives; what that costs, a trial tells."
                )
                title = f"Train at a temperature of {temperature:.3g}"
                return [common.remedy(RemedyKind.TEMPERATURE, title, after, effect=effect)]
        return []


@dataclass(frozen=True)
class _Common:
    """What all remedies of one batch size share."""

    size: int
    share: Estimate
    complete: bool
    whole_corpus: bool

    def remedy(
        self,
        kind: RemedyKind,
        title: str,
        after: Estimate | None,
        *,
        effect: str,
        n_max_after: BatchSizeLimit | None = None,
        true_push_lost: float | None = None,
        rows: Sequence[int] = (),
        snippet: str | None = None,
    ) -> Remedy:
        return Remedy(
            kind=kind,
            title=title,
            batch_size=self.size,
            share_before=self.share,
            share_after=after,
            n_max_after=n_max_after,
            effect=effect,
            true_push_lost=true_push_lost,
            rows=list(rows),
            snippet=snippet,
        )

    def share_after(self, shares: ExactShares) -> Estimate:
        """S from all pairs: a value, or a lower bound and the worst case above it."""
        return self.bounds(float(shares.known[self.size - 2]), float(shares.worst[self.size - 2]))

    def bounds(self, known: float, worst: float) -> Estimate:
        """S from all pairs: a value, or a lower bound and the worst case above it."""
        if not self.whole_corpus:
            return Estimate(
                value=known, low=None, high=None, method="no interval: all pairs of a sample of the rows"
            )
        if self.complete:
            return Estimate(value=known, low=known, high=known, method=EXACT)
        return Estimate(
            value=known, low=known, high=max(known, worst), method=f"{EXACT}; upper end: worst case"
        )

    def change(self, after: Estimate) -> str:
        """From … to …, as the rest of a sentence."""
        ends = (after.low, after.high, self.share.low, self.share.high)
        if self.complete or None in ends:
            of_known = "" if self.complete else " of the known pairs"
            drawn = (
                f" (between {after.low:.3f} and {after.high:.3f})"
                if self.complete
                and after.low is not None
                and after.high is not None
                and after.low < after.high
                else ""
            )
            return f"S{of_known} at {self.size} rows goes from {self.share.value:.3f} to {after.value:.3f}{drawn}."
        low, high, low_before, high_before = (f"{end:.3f}" for end in ends)
        return (
            f"S at {self.size} rows lies between {low} and {high} instead of {low_before} and {high_before}."
        )


def _other_losses(common: _Common, point: CurvePoint) -> list[Remedy]:
    updates = point.false_negative_gradient_share
    flat = "FlatNCE weighs all anchors alike, so that the share of its update on false negatives is S"
    if updates is not None:
        flat += f", {common.share.value:.3f}, where that of InfoNCE is G, {updates.value:.3f}"
    return [
        common.remedy(RemedyKind.FLATNCE, "FlatNCE in place of InfoNCE", None, effect=flat + "."),
        common.remedy(
            RemedyKind.GS_INFONCE,
            "GS-InfoNCE",
            None,
            effect="Gaussian noise among the negatives leaves S as it is: no effect on the largest safe batch. What it does to "
            "the trained model, a trial tells.",
        ),
    ]


def training_snippet(work: Workspace, request: ProbeRequest, sampler: BatchSampler) -> str | None:
    """Training arguments and loss that draw batches so; None where the corpus has no texts."""
    if work.corpus.anchors is None:
        return None
    columns = work.corpus_info.columns
    return training_arguments(
        sampler,
        temperature=request.temperature,
        text_columns=_text_columns(columns),
        source_column=columns.source or "source",
    )


def _text_columns(columns: ColumnRoles) -> list[str]:
    if columns.anchor is None or columns.positive is None:
        return [columns.text or columns.anchor or "text"]
    return [columns.anchor, columns.positive, *columns.negatives]
