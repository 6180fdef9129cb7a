"""What a probe measures once its rows are laid out, and the report that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from probe_service.advise import advise, worst_case_assumption
from probe_service.corpus import BatchSampler
from probe_service.describe import (
    describe_evidence,
    describe_harm,
    describe_sampling,
    describe_temperatures,
    warnings,
)
from probe_service.estimate import MatchedGaussian, borrowed_curve, curve_point, starvation_floor
from probe_service.measure import (
    MOST_BATCHES,
    Batches,
    Histograms,
    ListedCurve,
    References,
    Shares,
    SimilarPairs,
    Task,
)
from probe_service.remedies import Remedies, training_snippet
from probe_service.schemas import (
    BatchSizeLimit,
    CurvePoint,
    DropEffect,
    ProbeReport,
    ProbeRequest,
    RunInfo,
    StarvationFloor,
)
from probe_service.scratch import Scratch
from probe_service.snippets import drop_rows
from probe_service.workspace import Population, Workspace

__all__ = ["Measurement", "at_sizes", "make_report"]

SHOWN_PAIRS = 20


@dataclass(frozen=True)
class AtSize:
    """What gives one point of the curve.

    Args:
        batches: All figures, from batches.
        references: What is drawn beside them.
        listed: The similarity curve of large batches; None where `batches` gives it.
        shares: Of the same rows.
    """

    batches: Batches
    references: References
    listed: ListedCurve | None
    shares: Shares

    @property
    def tasks(self) -> list[Task]:
        """In the order in which they run."""
        return [task for task in (self.batches, self.references, self.listed) if task is not None]

    def point(self) -> CurvePoint:
        """The figures, once the tasks have run."""
        measured, shares, size = self.batches.result(), self.shares, self.batches.size
        if self.listed is not None:
            measured = replace(measured, whole={**measured.whole, **self.listed.result()})
        return curve_point(
            size,
            measured,
            self.references.result(),
            shares.setting,
            candidates_per_anchor=shares.softmaxes.candidates_per_anchor(size),
            exact=None if shares.all_pairs is None else shares.all_pairs.figures(size),
            pairs_above=None if shares.all_pairs is None else shares.all_pairs.pairs_above(size),
        )


def at_sizes(
    shares: Shares,
    sizes: Sequence[int],
    request: ProbeRequest,
    scratch: Scratch,
    most_batches: int = MOST_BATCHES,
) -> list[AtSize]:
    """Set out what gives the points of a curve.

    Args:
        shares: Of the rows.
        sizes: Batch sizes.
        request: What was asked.
        scratch: Where results go.
        most_batches: Behind each null and the noise series.
    """
    population = shares.population
    sides = [side for side in (population.anchors, population.positives) if side is not None]
    gaussians = [MatchedGaussian.fit(side) for side in sides]
    return [
        AtSize(
            shares.batches(size),
            References(
                population,
                gaussians,
                size,
                temperature=request.temperature,
                k=request.top_k,
                scratch=scratch,
                most_batches=most_batches,
            ),
            shares.listed_curve(size),
            shares,
        )
        for size in sizes
    ]


class Measurement:
    """The tasks of one probe.

    Args:
        work: The rows, laid out, and the floor.
        request: What was asked.
    """

    def __init__(self, work: Workspace, request: ProbeRequest) -> None:
        self.work, self.request = work, request
        self.borrowed = borrowed_curve(work.encoder_info.name, work.encoder_info.revision)
        population = work.population
        self.shares = self._shares_of(population, None, detailed=True)
        self.distinct: Shares | None = None
        if 2 <= len(work.distinct_rows) < len(population):
            self.distinct = self._shares_of(work.distinct_population, work.distinct_rows, detailed=False)
        self.pairs, self.histograms = SimilarPairs(work, request), Histograms(population, work.scratch)
        self.at_sizes = at_sizes(self.shares, work.sizes, request, work.scratch)

    @property
    def first(self) -> list[Task]:
        """All pairs and the list of the most similar ones: points of the curve and remedies need them."""
        return [task for task in (self.shares.all_pairs, self.shares.listing) if task is not None]

    @property
    def last(self) -> list[Task]:
        """What nothing of the curve waits for."""
        tasks = [task for task in self.shares.tasks(measured=self.work.sizes) if task not in self.first]
        tasks += [] if self.distinct is None else self.distinct.tasks()
        return [*tasks, self.pairs, self.histograms]

    @cached_property
    def remedies(self) -> Remedies:
        """What may be changed; to be asked for when `first` has run."""
        assumption = worst_case_assumption(self.work.floor["similarity"])
        return Remedies(self.work, self.request, self.shares, assumption)

    def _shares_of(
        self, population: Population, places: NDArray[np.int64] | None, *, detailed: bool
    ) -> Shares:
        work = self.work
        return Shares(
            population,
            work.sizes,
            self.request,
            lambda: work.training_rows(places),
            self.borrowed,
            work.scratch,
            detailed=detailed,
        )


def make_report(
    measured: Measurement, curve: list[CurvePoint], run: RunInfo, timings: dict[str, float]
) -> ProbeReport:
    """Put what was measured into a report.

    Args:
        measured: All of whose tasks have run.
        curve: A point for each size.
        run: Who ran it.
        timings: Seconds by phase.
    """
    work, request, shares = measured.work, measured.request, measured.shares
    evidence = describe_evidence(work, shares, measured.borrowed)
    assumption = worst_case_assumption(work.floor["similarity"])
    n_max = _limit(shares, request, assumption)
    advice = advise(
        curve,
        n_max,
        None if measured.distinct is None else _drop_effect(work, measured.distinct, request, assumption),
        work.corpus_info,
        evidence,
        budget=request.budget,
        complete=shares.setting.complete,
        assumption=assumption,
        remedies=measured.remedies.result(curve),
        starvation_floor=_starvation(curve, shares.population, request),
        snippet=_snippet(work, request, n_max),
    )
    keep = [*work.sizes, *([n_max.value, n_max.value + 1] if n_max.value else [])]
    return ProbeReport(
        run=run,
        request=request,
        corpus=work.corpus_info,
        encoder=work.encoder_info,
        evidence=evidence,
        sampling=describe_sampling(work, shares, request),
        curve=curve,
        scan=shares.scan.thinned(keep) if shares.scan else [],
        shares_by_temperature=describe_temperatures(shares),
        harm=describe_harm(work, shares),
        histogram=measured.histograms.result(),
        pairs=measured.pairs.result(SHOWN_PAIRS),
        pair_search=measured.pairs.search,
        advice=advice,
        warnings=warnings(work, shares, request),
        timings=timings,
    )


def _starvation(
    curve: list[CurvePoint], population: Population, request: ProbeRequest
) -> StarvationFloor | None:
    if any(point.gradient_error is None for point in curve):
        return None
    given = population.positives is not None
    own = population.own_similarity
    if population.positives is not None:
        own = np.einsum("nd,nd->n", population.anchors, population.positives)
    assert own is not None
    found = [point.gradient_error for point in curve if point.gradient_error is not None]
    return starvation_floor(
        [point.batch_size for point in curve],
        {dtype: [errors[dtype] for errors in found] for dtype in found[0]},
        dtype=request.training_dtype,
        temperature=request.temperature,
        positive_similarity=float(np.clip(own.mean(), -1.0, 1.0)),
        positives="given" if given else "dropout",
    )


def _snippet(work: Workspace, request: ProbeRequest, n_max: BatchSizeLimit) -> str | None:
    if n_max.per_device is None or n_max.per_device < 2:
        return None
    sampler = request.sampler
    return training_snippet(
        work,
        request,
        BatchSampler(
            sampler.kind,
            n_max.per_device,
            world_size=sampler.world_size,
            gather=sampler.gather,
            policy=sampler.policy,
            within_source=sampler.within_source,
        ),
    )


def _limit(shares: Shares, request: ProbeRequest, assumption: str) -> BatchSizeLimit:
    plan = shares.population.plan
    if shares.scan is None:
        return BatchSizeLimit(
            value=None,
            tested_up_to=0,
            exceeded=False,
            reason=f"{plan.rows_encoded} of {plan.rows_usable} rows were encoded: too few for any interval",
        )
    limit = shares.scan.limit(request.budget, assumption=assumption)
    if limit.value is None:
        return limit
    return limit.model_copy(update={"per_device": limit.value // shares.setting.devices})


def _drop_effect(work: Workspace, distinct: Shares, request: ProbeRequest, assumption: str) -> DropEffect:
    scan = distinct.scan
    return DropEffect(
        rows_to_drop=work.rows_to_drop,
        snippet=drop_rows(work.rows_to_drop, rows_read=work.corpus_info.rows_read),
        rows_remaining=len(distinct.population),
        n_max_after=None if scan is None else _limit(distinct, request, assumption),
        share_after=[] if scan is None else [scan.point(size) for size in work.sizes if size in scan.sizes],
    )
