"""From what was measured on batches to the figures of one batch size, each with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate.closed_form import anchors_with_false_negative, false_negatives_per_anchor
from probe_service.estimate.evidence import Evidence
from probe_service.estimate.exact import EXACT, ExactFigures
from probe_service.estimate.intervals import (
    Interval,
    clopper_pearson,
    grouped_quantile,
    jackknife_ratio,
    mean_interval,
    pooled_interval,
    share_mean_interval,
)
from probe_service.estimate.sampling import SamplingPlan
from probe_service.schemas import (
    CONFIDENCE_LEVEL,
    CurvePoint,
    Estimate,
    GaussianSimilarity,
    GradientError,
    HardNegativeShares,
    Nulls,
    PairsAbove,
    SharePoint,
    Xi,
)

__all__ = ["BatchUnits", "Reference", "Setting", "SizeMeasurements", "curve_point", "share_point"]

Floats = NDArray[np.float64]
Measured = Mapping[str, Floats]


@dataclass(frozen=True)
class Reference:
    """What is drawn beside the curve, each from a few batches of its own.

    Args:
        noise_mean, noise_max: (b,) cosines of a batch's rows to Gaussian noise.
        noise_vectors: Noise vectors in each batch.
        gaussian_top_k_mean, isotropic_top_k_mean: (b,) `top_k_mean` of drawn vectors; NaN where a batch has too few pairs.
        gradient: By dtype, (b, 3): relative error of InfoNCE and of FlatNCE, share of zero losses; empty without positives.
    """

    noise_mean: Floats
    noise_max: Floats
    noise_vectors: int
    gaussian_top_k_mean: Floats
    isotropic_top_k_mean: Floats
    gradient: Mapping[str, Floats]


class BatchUnits(StrEnum):
    """What one row of the measured columns stands for."""

    BATCHES = "batches"
    """An independent random batch."""
    EPOCHS = "epochs"
    """The mean over an epoch's batches; epochs are independent, the batches of one are not."""
    EVERY_BATCH = "every batch"
    """The mean over all batches that there are: nothing is left to chance."""


@dataclass(frozen=True)
class SizeMeasurements:
    """What batches of one size gave.

    Args:
        whole: Columns from batches of all encoded rows (`similarity.BatchMeasurements` by field), one row a unit.
        pools: The same for each sub-pool; empty where none are used.
        pool_rows: Rows of each sub-pool.
        units: What a row stands for.
        batches: Batches in all of `whole`.
    """

    whole: Measured
    pools: Sequence[Measured]
    pool_rows: Sequence[NDArray[np.int64]]
    units: BatchUnits
    batches: int


@dataclass(frozen=True)
class Setting:
    """What the measured batches are batches of.

    Args:
        evidence: About the encoded rows.
        plan: How random batches are drawn from them.
        thresholds: Of the columns of `pairs_above`.
        ordered_pairs: Whether (i, j) and (j, i) are two pairs (anchor and positive differ).
        plain: Whether batches are random and an anchor's candidates are the other rows' positives and nothing else, so
            that partners can be counted in closed form.
        complete: Whether something is known about every candidate.
        devices: Devices that one batch is dealt to.
        inferred: Whether chains add pairs to the known ones.
        hard_negatives: Whether there are further candidates that are the rows' hard negatives.
    """

    evidence: Evidence
    plan: SamplingPlan
    thresholds: Sequence[float]
    ordered_pairs: bool
    plain: bool
    complete: bool
    devices: int
    inferred: bool
    hard_negatives: bool

    @cached_property
    def partners(self) -> NDArray[np.int64]:
        """(m,) known false negatives of each row among all others."""
        return self.evidence.false_negative_counts()


def curve_point(
    size: int,
    measured: SizeMeasurements,
    reference: Reference,
    setting: Setting,
    *,
    candidates_per_anchor: int,
    exact: ExactFigures | None = None,
    pairs_above: Floats | None = None,
) -> CurvePoint:
    """Estimate every figure of STATISTICS §1 at one batch size.

    Args:
        size: N.
        measured: What batches gave.
        reference: What is drawn beside the curve.
        setting: What the batches are batches of.
        candidates_per_anchor: Negatives in an anchor's softmax.
        exact: Figures without Monte Carlo error, used in place of the sampled ones.
        pairs_above: The same of the expected pairs above each threshold.

    Returns:
        The figures; those that need what the corpus lacks are null.
    """
    evidence, plan, complete = setting.evidence, setting.plan, setting.complete
    figures = _Figures(size, measured, setting)
    share = figures.share
    whole = measured.whole
    pairs = size * (size - 1) // (1 if setting.ordered_pairs else 2)
    ranks = whole["top_k"].shape[1]
    partners = setting.partners

    def cosine_mean(name: str, rank: int | None = None) -> Estimate:
        def column(m: Measured) -> Interval:
            values = m[name] if rank is None else m[name][:, rank]
            return mean_interval(values, CONFIDENCE_LEVEL).clipped(-1.0, 1.0)

        return figures.estimate(column)

    def top_mean(name: str) -> Estimate | None:
        if np.isnan(whole[name]).any():
            return None
        return figures.estimate(
            lambda m: mean_interval(m[name].mean(axis=1), CONFIDENCE_LEVEL).clipped(-1.0, 1.0)
        )

    def count(name: str) -> Estimate:
        limits = (0.0, float(candidates_per_anchor))
        return figures.estimate(lambda m: mean_interval(m[name], CONFIDENCE_LEVEL).clipped(*limits), limits)

    def update_share(name: str) -> Estimate | None:
        if not whole["update_weight"].sum() > 0:
            return None
        return figures.estimate(
            lambda m: jackknife_ratio(m[name], m["update_weight"], CONFIDENCE_LEVEL).clipped(0.0, 1.0),
            (0.0, 1.0),
        )

    def closed(form: Callable[[NDArray[np.int64], int], float], high: float) -> Estimate:
        value = form(partners, size)
        if plan.whole_corpus:
            return Estimate(value=value, low=value, high=value, method="closed form over the whole corpus")
        if not measured.pools:
            return figures.without_interval(value)
        in_pools = np.array([form(_scaled_partners(evidence, rows), size) for rows in measured.pool_rows])
        exact = Interval(value, value, value, "")
        return _estimate(
            pooled_interval(exact, in_pools, CONFIDENCE_LEVEL).clipped(0.0, high), "closed form, "
        )

    def exactly(
        value: float, sampled: Callable[[Measured], Interval], limits: tuple[float, float]
    ) -> Estimate:
        """A figure of all pairs: of the whole corpus it is the truth, of a sample of its rows the value alone."""
        if plan.whole_corpus:
            return Estimate(value=value, low=value, high=value, method=EXACT)
        return figures.around(value, sampled, limits)

    def exact_share(value: float, name: str) -> Estimate:
        return exactly(value, lambda m: share_mean_interval(m[name], CONFIDENCE_LEVEL), (0.0, 1.0))

    def exact_update(value: float, name: str) -> Estimate:
        return exactly(
            value, lambda m: jackknife_ratio(m[name], m["update_weight"], CONFIDENCE_LEVEL), (0.0, 1.0)
        )

    known_share = share("false_share") if exact is None else exact_share(exact.known, "false_share")
    if setting.plain:
        known_count = closed(false_negatives_per_anchor, float(size - 1))
        known_any = closed(anchors_with_false_negative, 1.0)
    else:
        known_count = count("false_count")
        known_any = share("false_any_share")
    known_update = update_share("false_update")
    worst_update = update_share("worst_update")
    if exact is not None and exact.known_update is not None and exact.worst_update is not None:
        known_update = exact_update(exact.known_update, "false_update")
        worst_update = exact_update(exact.worst_update, "worst_update")
    worst = None
    if not complete:
        worst = share("worst_share") if exact is None else exact_share(exact.worst, "worst_share")
    if not complete:
        assert worst is not None
        known_share = _bounded(known_share, worst)
        known_count = _bounded(known_count, count("worst_count"))
        known_any = _bounded(known_any, share("worst_any_share"))
        if known_update is not None and worst_update is not None:
            known_update = _bounded(known_update, worst_update)

    borrowed = float(whole["borrowed_share"].mean())
    return CurvePoint(
        batch_size=size,
        per_device_batch_size=size // setting.devices,
        candidates_per_anchor=candidates_per_anchor,
        num_batches=measured.batches,
        negative_pairs_per_batch=pairs,
        top_k=[cosine_mean("top_k", r) if r < pairs else None for r in range(ranks)],
        top_k_mean=top_mean("top_k"),
        hardest_negative=cosine_mean("hardest_negative")
        if exact is None
        else exactly(
            exact.hardest_negative,
            lambda m: mean_interval(m["hardest_negative"], CONFIDENCE_LEVEL),
            (-1.0, 1.0),
        ),
        pairs_above=[
            _pairs_above(
                figures,
                t,
                threshold,
                pairs,
                None if pairs_above is None else partial(exactly, float(pairs_above[t])),
            )
            for t, threshold in enumerate(setting.thresholds)
        ],
        false_negatives_per_anchor=known_count,
        anchors_with_false_negative=known_any,
        false_negative_softmax_share=known_share,
        false_negative_gradient_share=known_update,
        certain_share=share("certain_share"),
        inferred_share=share("inferred_share") if setting.inferred else None,
        worst_case=worst,
        borrowed_share=None if np.isnan(borrowed) else borrowed,
        hard_negatives=HardNegativeShares(
            own_push=share("own_push"),
            own_false=share("own_false"),
            other_push=share("other_push"),
            other_false=share("other_false"),
        )
        if setting.hard_negatives
        else None,
        gaussian_similarity=GaussianSimilarity(
            mean=_over_batches(reference.noise_mean),
            max=_over_batches(reference.noise_max),
            vectors_per_batch=reference.noise_vectors,
        ),
        xi=_xi(figures) if whole["log_xi"].shape[1] else None,
        effective_anchors=None
        if np.isnan(whole["effective_anchors_share"]).any()
        else figures.estimate(
            lambda m: mean_interval(m["effective_anchors_share"], CONFIDENCE_LEVEL).clipped(0.0, 1.0),
            (0.0, 1.0),
        ),
        effective_negatives=figures.estimate(
            lambda m: mean_interval(m["effective_negatives"], CONFIDENCE_LEVEL).clipped(
                1.0, float(candidates_per_anchor)
            ),
            (1.0, float(candidates_per_anchor)),
        ),
        gradient_error={
            dtype: GradientError(
                infonce=_over_batches(columns[:, 0], 0.0, np.inf),
                flatnce=_over_batches(columns[:, 1], 0.0, np.inf),
                zero_loss_share=_over_batches(columns[:, 2], 0.0, 1.0),
            )
            for dtype, columns in reference.gradient.items()
        }
        or None,
        nulls=Nulls(
            gaussian_matched=_null(reference.gaussian_top_k_mean),
            false_negatives_masked=top_mean("masked_top_k") if figures.anything_known else None,
            isotropic=_null(reference.isotropic_top_k_mean),
        ),
    )


def share_point(size: int, measured: SizeMeasurements, setting: Setting) -> SharePoint:
    """Estimate S, and its worst case, alone.

    Args:
        size: N.
        measured: What batches gave.
        setting: What the batches are batches of.
    """
    figures = _Figures(size, measured, setting)
    known = figures.share("false_share")
    if setting.complete:
        return SharePoint(batch_size=size, estimate=known, worst_case=None)
    worst = figures.share("worst_share")
    return SharePoint(batch_size=size, estimate=_bounded(known, worst), worst_case=worst)


class _Figures:
    """Makes an estimate of a figure in the way that the plan allows."""

    def __init__(self, size: int, measured: SizeMeasurements, setting: Setting) -> None:
        self._size, self._measured, self._plan = size, measured, setting.plan
        self.anything_known = bool(setting.partners.any()) or not setting.plain

    def share(self, name: str) -> Estimate:
        """The mean of a share."""
        if (
            self._plan.whole_corpus
            and not self.anything_known
            and name in ("false_share", "certain_share", "inferred_share")
        ):
            return Estimate(
                value=0.0, low=0.0, high=0.0, method="no row of the corpus has a known false negative"
            )
        return self.estimate(lambda m: share_mean_interval(m[name], CONFIDENCE_LEVEL), (0.0, 1.0))

    def estimate(
        self, figure: Callable[[Measured], Interval], limits: tuple[float, float] = (-1.0, 1.0)
    ) -> Estimate:
        columns = self._measured.whole
        units = self._measured.units
        if units is BatchUnits.EVERY_BATCH:
            # One row that is the whole truth; told twice, so that the formulas find no spread in it.
            value = figure({name: np.repeat(column, 2, axis=0) for name, column in columns.items()}).value
            return Estimate(
                value=value,
                low=value,
                high=value,
                method=f"all {self._measured.batches} batches that there are",
            )
        whole = figure(columns)
        if units is BatchUnits.EPOCHS:
            whole = replace(whole, method=whole.method.replace("batches", "epochs"))
        if self._plan.whole_corpus:
            return _estimate(whole)
        if not self._measured.pools:
            return self.without_interval(whole.value)
        pools = np.array([figure(pool).value for pool in self._measured.pools])
        return _estimate(pooled_interval(whole, pools, CONFIDENCE_LEVEL).clipped(*limits))

    def around(
        self, value: float, figure: Callable[[Measured], Interval], limits: tuple[float, float]
    ) -> Estimate:
        """A value that has no Monte Carlo error, with the spread of the sub-pools about it."""
        if not self._measured.pools:
            return self.without_interval(value)
        pools = np.array([figure(pool).value for pool in self._measured.pools])
        interval = pooled_interval(Interval(value, value, value, ""), pools, CONFIDENCE_LEVEL)
        return _estimate(interval.clipped(*limits), "all pairs of the encoded rows, ")

    def without_interval(self, value: float) -> Estimate:
        return Estimate(
            value=value,
            low=None,
            high=None,
            method=f"no interval: {self._plan.rows_encoded} of {self._plan.rows_usable} rows were encoded, which "
            f"supports intervals up to batches of {self._plan.largest_size_with_interval}",
        )


def _scaled_partners(evidence: Evidence, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return evidence.subset(rows).false_negative_counts()


def _estimate(interval: Interval, prefix: str = "") -> Estimate:
    low, high = min(interval.low, interval.value), max(interval.high, interval.value)
    return Estimate(value=interval.value, low=low, high=high, method=prefix + interval.method)


def _over_batches(values: Floats, low: float = -1.0, high: float = 1.0) -> Estimate:
    return _estimate(mean_interval(values, CONFIDENCE_LEVEL).clipped(low, high))


def _null(values: Floats) -> Estimate | None:
    return None if np.isnan(values).any() else _over_batches(values)


def _bounded(known: Estimate, worst: Estimate) -> Estimate:
    """A figure of which only bounds are known: the known pairs below, the worst case above."""
    if known.low is None or worst.high is None:
        return Estimate(value=known.value, low=None, high=None, method=f"lower bound; {known.method}")
    return Estimate(
        value=known.value,
        low=known.low,
        high=max(worst.high, known.value),
        method=f"lower bound from the known pairs ({known.method}); upper end: worst case ({worst.method})",
    )


def _pairs_above(
    figures: _Figures, column: int, threshold: float, pairs: int, exactly: Callable[..., Estimate] | None
) -> PairsAbove:
    def expected(m: Measured) -> Interval:
        return mean_interval(m["pairs_above"][:, column], CONFIDENCE_LEVEL).clipped(0.0, float(pairs))

    def any_pair(m: Measured) -> Interval:
        found = m["any_above"][:, column]
        if np.isin(found, (0.0, 1.0)).all():
            return clopper_pearson(int(found.sum()), len(found), CONFIDENCE_LEVEL)
        return share_mean_interval(found, CONFIDENCE_LEVEL)  # an epoch's share of its batches

    return PairsAbove(
        threshold=threshold,
        expected_pairs=(exactly or figures.estimate)(expected, (0.0, float(pairs))),
        at_least_one=figures.estimate(any_pair, (0.0, 1.0)),
    )


def _xi(figures: _Figures) -> Xi:
    def quantile(probability: float) -> Estimate:
        logs = figures.estimate(
            lambda m: grouped_quantile(m["log_xi"], probability, CONFIDENCE_LEVEL), (-np.inf, np.inf)
        )

        def xi(log_value: float | None) -> float | None:
            # exp(700) is near the largest float64; a larger ξ saturates.
            return None if log_value is None else float(np.exp(min(log_value, 700.0)))

        value = xi(logs.value)
        assert value is not None
        return Estimate(value=value, low=xi(logs.low), high=xi(logs.high), method=logs.method)

    return Xi(p10=quantile(0.1), p50=quantile(0.5), p90=quantile(0.9))
