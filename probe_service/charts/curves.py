"""The two curves over batch sizes: the hardest similarities, and the share of the push that does harm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from probe_service.charts.lines import (
    PLOT_HEIGHT,
    Axes,
    Series,
    budget_layer,
    budget_series,
    describe,
    draw_lines,
    present,
)
from probe_service.charts.specification import (
    PALETTES,
    Datasets,
    Palette,
    Spec,
    Theme,
    Width,
    finish,
    one_at_a_time,
)
from probe_service.schemas import AuditReport, BatchSizeLimit, CurvePoint, Estimate, SharePoint

if TYPE_CHECKING:
    import altair as alt

__all__ = ["audit_chart", "share_chart", "similarity_chart"]

MAX_RANK_LINES = 6


@one_at_a_time
def similarity_chart(curve: Sequence[CurvePoint], *, theme: Theme, width: Width = "container") -> Spec:
    """Draw the hardest similarities of a batch by its size: Figure 1 of the GS-InfoNCE paper, with nulls.

    One line with its interval for each rank 1…k (at most six, the first and the last among them), their mean,
    the three nulls (dashed) and the cosines to Gaussian noise (dotted). Every line is named at its end.

    Args:
        curve: Any number of batch sizes, also one or none; that of a running job may be partial.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    import altair as alt

    palette = PALETTES[theme]
    points = sorted(curve, key=lambda point: point.batch_size)
    series = _similarity_series(points, palette)
    lows = [_low(estimate) for line in series for _, estimate in line.points]
    # Noise may be slightly below 0, and opposite vectors far below; the axis shows what there is, never less.
    floor = min(0.0, math.floor(min(lows, default=0.0) * 10 + 1e-9) / 10)
    if min(lows, default=0.0) > -0.05:
        floor = max(floor, -0.05)
    axis = Axes(places=[point.batch_size for point in points], floor=floor, width=width)
    datasets = Datasets()
    lines = draw_lines(datasets, series, axis, palette, value_title="cosine similarity", dataset="similarity")
    return finish(
        alt.layer(*lines),
        datasets,
        palette,
        width=width,
        height=PLOT_HEIGHT,
        description=describe("Cosine similarity by batch size.", series),
    )


@one_at_a_time
def share_chart(
    curve: Sequence[CurvePoint],
    *,
    scan: Sequence[SharePoint] = (),
    budget: float,
    n_max: BatchSizeLimit | None = None,
    theme: Theme,
    width: Width = "container",
) -> Spec:
    """Draw S(N), the share of the push that hits same-meaning rows, with the budget and the safe window.

    Where evidence is incomplete the worst case is drawn as well, and the band of S reaches up to it. What chains of
    known links add is a line of its own; a curve of p(s) learnt elsewhere makes a dotted scenario of rings, without
    interval.

    Args:
        curve: The sizes asked for, drawn as points with their intervals.
        scan: S at many sizes, drawn as the line; if empty (a running job), the line joins the points.
        budget: Largest acceptable share, 0–1.
        n_max: The limit, drawn as an upright line with the window below it shaded; None: not known yet.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    palette = PALETTES[theme]
    points = sorted(curve, key=lambda point: point.batch_size)
    first = min((point.batch_size for point in points), default=0)
    return _shares(
        _share_series(points, sorted(scan, key=lambda point: point.batch_size), palette),
        _share_series(points, (), palette),
        ticks=sorted({*(point.batch_size for point in points), *_powers_of_two(scan, below=first)}),
        budget=budget,
        n_max=n_max,
        palette=palette,
        width=width,
    )


@one_at_a_time
def audit_chart(report: AuditReport, *, budget: float, theme: Theme, width: Width = "container") -> Spec:
    """Draw S(N) as the labels of an audit have it, with its intervals, the budget and the safe window.

    Args:
        report: Sizes without an estimate are left out.
        budget: Largest acceptable share, 0–1.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    palette = PALETTES[theme]
    shares = sorted(report.shares, key=lambda share: share.batch_size)
    series = Series(
        "share",
        "share S(N), audited",
        "S(N)",
        palette.share,
        present((share.batch_size, share.estimate) for share in shares),
        line_width=2.5,
        band_opacity=0.25,
    )
    drawn = [series] if series.points else []
    return _shares(
        drawn,
        drawn,
        ticks=[share.batch_size for share in shares],
        budget=budget,
        n_max=report.n_max,
        palette=palette,
        width=width,
    )


def _shares(
    series: Sequence[Series],
    marked: Sequence[Series],
    *,
    ticks: Sequence[int],
    budget: float,
    n_max: BatchSizeLimit | None,
    palette: Palette,
    width: Width,
) -> Spec:
    """Lay shares of the push over the budget's line and the safe window; `marked` has the points."""
    import altair as alt

    axis = Axes(
        places=sorted({*ticks, *(size for line in series for size, _ in line.points)}),
        ticks=ticks,
        floor=0.0,
        width=width,
    )
    datasets = Datasets()
    layers: list[Any] = []
    if n_max is not None:
        layers += _limit_layers(datasets, n_max, axis, palette)
    layers.append(budget_layer(datasets, budget, axis, palette))
    layers.extend(
        draw_lines(
            datasets,
            series,
            axis,
            palette,
            value_title=["share of the push on negatives", "that hits same-meaning rows"],
            dataset="share",
            marked=marked,
            labels_for=[*series, budget_series(budget, axis.last, palette)],
        )
    )
    description = describe("Share of the push that hits rows that mean the same, by batch size.", series)
    limit = "" if n_max is None else " " + _limit_label(n_max).replace("\n", " ") + "."
    return finish(
        alt.layer(*layers),
        datasets,
        palette,
        width=width,
        height=PLOT_HEIGHT,
        description=f"{description} The budget is {budget:.2f}.{limit}",
    )


def _similarity_series(points: Sequence[CurvePoint], palette: Palette) -> list[Series]:
    count = max((len(point.top_k) for point in points), default=0)
    series = [
        Series(
            key=f"rank_{rank}",
            name=f"{_ordinal(rank)}largest similarity",
            short_name=f"{_ordinal(rank)}largest",
            colour=palette.rank,
            points=present((point.batch_size, _at(point.top_k, rank - 1)) for point in points),
        )
        for rank in _drawn_ranks(count)
    ]
    dashed = (6, 4)
    dotted = (1.5, 3)
    noise = [(point.batch_size, point.gaussian_similarity) for point in points]
    series += [
        Series(
            "false_negatives_masked",
            "known false negatives masked",
            "masked",
            palette.masked,
            present((point.batch_size, point.nulls.false_negatives_masked) for point in points),
            dash=dashed,
        ),
        Series(
            "gaussian_matched",
            "random, spread as the corpus",
            "same spread",
            palette.matched,
            present((point.batch_size, point.nulls.gaussian_matched) for point in points),
            dash=dashed,
        ),
        Series(
            "isotropic",
            "random directions",
            "directions",
            palette.isotropic,
            present((point.batch_size, point.nulls.isotropic) for point in points),
            dash=dashed,
        ),
        Series(
            "noise_max",
            "Gaussian noise, largest",
            "noise, max",
            palette.noise,
            present((size, similarity.max) for size, similarity in noise),
            dash=dotted,
        ),
        Series(
            "noise_mean",
            "Gaussian noise, mean",
            "noise, mean",
            palette.noise,
            present((size, similarity.mean) for size, similarity in noise),
            dash=dotted,
        ),
        # Last, so that it is drawn over the others.
        Series(
            "top_k_mean",
            f"mean of the {count} largest",
            f"mean of {count}",
            palette.mean,
            present((point.batch_size, point.top_k_mean) for point in points),
            line_width=3,
            band_opacity=0.25,
        ),
    ]
    return [line for line in series if line.points]


def _share_series(points: Sequence[CurvePoint], scan: Sequence[SharePoint], palette: Palette) -> list[Series]:
    shares: Iterable[tuple[int, Estimate | None]]
    worst: Iterable[tuple[int, Estimate | None]]
    if scan:
        shares = [(point.batch_size, point.estimate) for point in scan]
        worst = [(point.batch_size, point.worst_case) for point in scan]
    else:
        shares = [(point.batch_size, point.false_negative_softmax_share) for point in points]
        worst = [(point.batch_size, point.worst_case) for point in points]
    worst_points = present(worst)
    incomplete = bool(worst_points)
    series = [
        Series(
            "worst_case",
            "worst case",
            "worst case",
            palette.worst,
            worst_points,
            dash=(6, 4),
            band_opacity=0.2,
        ),
        Series(
            "borrowed",
            "scenario: p(s) learnt elsewhere",
            "scenario",
            palette.scenario,
            present((point.batch_size, _scenario(point.borrowed_share)) for point in points),
            dash=(1.5, 3),
            hollow=True,
        ),
        Series(
            "inferred",
            "with chains of known links",
            "with chains",
            palette.inferred,
            present((point.batch_size, point.inferred_share) for point in points),
            dash=(10, 3),
        ),
        Series(
            "share",
            "known pairs only (lower bound)" if incomplete else "share S(N)",
            "known only" if incomplete else "S(N)",
            palette.share,
            present(shares),
            line_width=2.5,
            band_opacity=0.13 if incomplete else 0.25,
            # Up to the worst case the bar would be longer than it is informative; the band says it.
            barred=not incomplete or len(points) < 2,
        ),
    ]
    return [line for line in series if line.points]


def _scenario(share: float | None) -> Estimate | None:
    return (
        None
        if share is None
        else Estimate(value=share, low=None, high=None, method="a scenario, no estimate")
    )


def _at(values: Sequence[Estimate | None], index: int) -> Estimate | None:
    return values[index] if index < len(values) else None


def _powers_of_two(scan: Sequence[SharePoint], *, below: int) -> list[int]:
    """Round sizes for the part of the axis that only the scan covers."""
    first = min((point.batch_size for point in scan), default=below)
    return [size for size in (2**power for power in range(1, 32)) if first <= size < below]


def _drawn_ranks(count: int) -> list[int]:
    """Ranks 1…count, thinned to powers of an even ratio where there are more than can be told apart."""
    if count <= MAX_RANK_LINES:
        return list(range(1, count + 1))
    return sorted({round(count ** (step / (MAX_RANK_LINES - 1))) for step in range(MAX_RANK_LINES)})


def _ordinal(rank: int) -> str:
    if rank == 1:
        return ""
    suffix = "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{suffix} "


def _low(estimate: Estimate) -> float:
    return estimate.value if estimate.low is None else estimate.low


def _limit_layers(datasets: Datasets, n_max: BatchSizeLimit, axis: Axes, palette: Palette) -> list[alt.Chart]:
    """The safe window as a shaded area, its end as an upright line, and the limit in words."""
    import altair as alt

    label = _limit_label(n_max)
    if n_max.value is None:
        words = datasets.chart("n_max", [{"label": label}]).mark_text(
            align="left",
            baseline="top",
            fontSize=12,
            fontWeight="bold",
            lineBreak="\n",
            color=palette.budget,
        )
        return [words.encode(x=alt.value(6), y=alt.value(PLOT_HEIGHT - 36), text="label:N")]
    end = min(max(n_max.value, axis.first), axis.last)
    limit = datasets.chart(
        "n_max", [{"from": axis.domain[0], "batch_size": end, "n_max": n_max.value, "label": label}]
    )
    top, bottom = alt.value(0), alt.value(PLOT_HEIGHT)
    window = limit.mark_rect(color=palette.limit, opacity=0.1)
    layers = [window.encode(x=axis.x(), x2="from:Q", y=top, y2=bottom)]
    if n_max.exceeded:
        layers.append(
            limit.mark_rule(color=palette.limit, strokeWidth=2).encode(x=axis.x(), y=top, y2=bottom)
        )
    to_right = end <= math.sqrt(axis.domain[0] * axis.domain[1])
    layers.append(
        limit.mark_text(
            align="left" if to_right else "right",
            baseline="top",
            dx=6 if to_right else -6,
            fontSize=12,
            fontWeight="bold",
            lineBreak="\n",
            color=palette.limit,
        ).encode(x=axis.x(), y=alt.value(6), text="label:N")
    )
    return layers


def _limit_label(n_max: BatchSizeLimit) -> str:
    if n_max.value is None:
        return "no batch size\nis shown to be safe"
    if not n_max.exceeded:
        return f"n_max ≥ {n_max.value}\n(largest tested)"
    return f"n_max = {n_max.value}"
