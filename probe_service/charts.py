"""Charts as Vega-Lite specifications, made once for the page, the HTML report, notebooks, SVG and PNG.

Every specification carries its values in its own ``datasets`` and loads nothing. Altair and vl-convert are
imported only inside the functions, so that the API process can import this module cheaply.
"""

from __future__ import annotations

import functools
import math
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from probe_service.errors import ServiceError
from probe_service.schemas import (
    AuditReport,
    BatchSizeLimit,
    CurvePoint,
    Estimate,
    Histogram,
    ProbeReport,
    SharePoint,
)
from probe_service.visible_text import visible_text

if TYPE_CHECKING:
    import altair as alt

__all__ = [
    "Spec",
    "Theme",
    "audit_chart",
    "figure",
    "histogram_chart",
    "render_png",
    "render_svg",
    "share_chart",
    "similarity_chart",
    "vega_bundle",
]

Spec = dict[str, Any]
"""A Vega-Lite specification as plain JSON values."""

Width = int | Literal["container"]
"""Pixels, or ``container``: as wide as the element that vega-embed draws into."""

PLOT_HEIGHT = 320
HISTOGRAM_HEIGHT = 200
STATIC_WIDTH = 760
LABEL_GAP = 14
"""Least distance in pixels between two labels at the right edge, at 11 px type."""
WIDE_FROM = 560
"""Width in pixels from which series carry their full names."""
FULL_LABEL_ROOM = 190
SHORT_LABEL_ROOM = 78
MAX_RANK_LINES = 6
MAX_BARS = 100
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", "DejaVu Sans", sans-serif'


class Theme(StrEnum):
    """Which background the chart is for."""

    LIGHT = "light"
    DARK = "dark"


@dataclass(frozen=True)
class Palette:
    """Colours of one theme: Okabe and Ito's, shifted to a contrast of 3:1 or more."""

    background: str
    ink: str
    muted: str
    grid: str
    rank: str
    mean: str
    masked: str
    matched: str
    isotropic: str
    noise: str
    share: str
    worst: str
    budget: str
    limit: str


PALETTES = {
    Theme.LIGHT: Palette(
        background="#ffffff",
        ink="#1b1f24",
        muted="#57606a",
        grid="#e4e7eb",
        rank="#0072b2",
        mean="#c44e00",
        masked="#00795a",
        matched="#a8487f",
        isotropic="#6e7781",
        noise="#8a6200",
        share="#0072b2",
        worst="#a8487f",
        budget="#c44e00",
        limit="#00795a",
    ),
    Theme.DARK: Palette(
        background="#14181d",
        ink="#e8ebee",
        muted="#a3adb8",
        grid="#2b323a",
        rank="#56b4e9",
        mean="#ff8a3d",
        masked="#2fc79a",
        matched="#e08dbd",
        isotropic="#9aa4ae",
        noise="#e6b422",
        share="#56b4e9",
        worst="#e08dbd",
        budget="#ff8a3d",
        limit="#2fc79a",
    ),
}


class _Datasets(dict[str, list[dict[str, Any]]]):
    """The values of one specification by name, kept out of Altair, which would copy them once per layer."""

    def chart(self, name: str, rows: list[dict[str, Any]]) -> alt.Chart:
        """Keep the rows and return a chart of them."""
        import altair as alt

        self[name] = rows
        return alt.Chart(alt.NamedData(name=name))


@dataclass(frozen=True)
class _Series:
    """One line: its estimates by batch size, how it is drawn, and what it is called."""

    key: str
    name: str
    short_name: str
    colour: str
    points: tuple[tuple[int, Estimate], ...]
    dash: tuple[float, ...] = (1, 0)
    line_width: float = 1.5
    band_opacity: float = 0.14
    barred: bool = True
    """Whether single points show their interval as a bar."""


_Arguments = ParamSpec("_Arguments")
_building = threading.Lock()


def _one_at_a_time(build: Callable[_Arguments, Spec]) -> Callable[_Arguments, Spec]:
    """Let one thread build at a time.

    ``alt.X(…).scale(…)`` goes through a descriptor that keeps its object on the class: with two threads at it, one
    chart gets the other's axis, without any error.
    """

    @functools.wraps(build)
    def alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Spec:
        with _building:
            return build(*args, **kwargs)

    return alone


@_one_at_a_time
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
    axis = _Axes(sizes=[point.batch_size for point in points], floor=floor, width=width)
    datasets = _Datasets()
    lines = _lines(datasets, series, axis, palette, value_title="cosine similarity", dataset="similarity")
    return _finish(
        alt.layer(*lines),
        datasets,
        palette,
        width=width,
        height=PLOT_HEIGHT,
        description=_describe("Cosine similarity by batch size.", series),
    )


@_one_at_a_time
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

    Where evidence is incomplete the worst case is drawn as well, and the band of S reaches up to it.

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


@_one_at_a_time
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
    series = _Series(
        "share",
        "share S(N), audited",
        "S(N)",
        palette.share,
        _present((share.batch_size, share.estimate) for share in shares),
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


@_one_at_a_time
def histogram_chart(
    histogram: Histogram,
    *,
    theme: Theme,
    worst_case_similarity: float | None = None,
    width: Width = "container",
) -> Spec:
    """Draw how many negative pairs there are at each similarity, known false negatives in front.

    The count axis is a square root: it starts at 0 and still shows the few similar pairs that matter. Both
    sets of bars start at 0 (stacked lengths would mean nothing on such an axis); known false negatives are
    part of all pairs.

    Args:
        histogram: Counts in equal bins; neighbouring bins are joined until at most 100 bars are left.
        theme: Light or dark background.
        worst_case_similarity: s₀, drawn as an upright line; None: no worst case.
        width: Pixels, or ``container``.
    """
    import altair as alt

    palette = PALETTES[theme]
    rows = _bars(histogram)
    names = ["all negative pairs", "known false negatives"]
    colours = [palette.isotropic, palette.mean]
    high = max((row["to"] for row in rows), default=1.0)
    # At least three tenths, so that a single bar has ticks beside it.
    low = min((*(row["from"] for row in rows), high - 0.3)) if rows else -1.0
    # The room above the tallest bar is for the words at the worst case's line.
    top = 1.3 * max((row["pairs"] for row in rows), default=1)
    datasets = _Datasets()
    bars = (
        datasets.chart("histogram", rows)
        .mark_rect(stroke=palette.background, strokeWidth=0.5)
        .encode(
            x=alt.X("from:Q")
            .title("cosine similarity")
            .scale(domain=[low, high], nice=False)
            .axis(
                format=".1f",
                grid=False,
                labelOverlap="greedy",
                labelSeparation=6,
                values=[step / 10 for step in range(-10, 11)],
            ),
            x2=alt.X2("to:Q"),
            y=alt.Y("pairs:Q")
            .title(["pairs per bar", "(square-root scale)"])
            .scale(type="sqrt", domain=[0, top], nice=False)
            .axis(format=",d", values=_count_ticks(top)),
            y2=alt.Y2(datum=0),
            color=alt.Color("kind:N")
            .scale(domain=names, range=colours)
            .legend(
                orient="top",
                columns=1,
                title=None,
                symbolType="square",
                symbolStrokeWidth=0,
            ),
            tooltip=[
                alt.Tooltip("kind:N", title="pairs"),
                alt.Tooltip("from:Q", title="similarity from", format=".3f"),
                alt.Tooltip("to:Q", title="to", format=".3f"),
                alt.Tooltip("pairs:Q", title="number", format=","),
            ],
        )
    )
    layers: list[alt.Chart] = [bars]
    if worst_case_similarity is not None and low < worst_case_similarity < high:
        to_left = worst_case_similarity > (low + high) / 2
        mark = datasets.chart("worst_case_similarity", [{"from": worst_case_similarity}])
        words = f"worst case counts from {worst_case_similarity:.2f}"
        layers += [
            mark.mark_rule(color=palette.worst, strokeWidth=1.5, strokeDash=[4, 3]).encode(x="from:Q"),
            mark.mark_text(
                align="right" if to_left else "left",
                dx=-5 if to_left else 5,
                baseline="top",
                color=palette.worst,
            ).encode(x="from:Q", y=alt.value(2), text=alt.value(words)),
        ]
    known = sum(row["pairs"] for row in rows if row["kind"] == "known false negatives")
    return _finish(
        alt.layer(*layers),
        datasets,
        palette,
        width=width,
        height=HISTOGRAM_HEIGHT,
        description=f"Histogram of the cosine similarities of {histogram.pairs_counted:,} negative pairs,"
        f" {known:,} of them known false negatives.",
    )


def figure(report: ProbeReport, *, theme: Theme, width: int = STATIC_WIDTH) -> Spec:
    """Stack the similarity and the share chart with titles: one picture of a report, for SVG and PNG.

    Args:
        report: A finished report.
        theme: Light or dark background.
        width: Width of each plot in pixels, without axes.
    """
    advice = report.advice
    charts = (
        (
            similarity_chart(report.curve, theme=theme, width=width),
            "How similar the hardest negatives of a batch are",
        ),
        (
            share_chart(
                report.curve,
                scan=report.scan,
                budget=advice.budget,
                n_max=advice.n_max,
                theme=theme,
                width=width,
            ),
            "How much of the push hits rows that mean the same",
        ),
    )
    datasets: dict[str, Any] = {}
    parts = []
    for spec, title in charts:
        datasets |= spec.pop("datasets")
        schema, config = spec.pop("$schema"), spec.pop("config")
        parts.append({**spec, "title": title})
    corpus = visible_text(report.corpus.name, limit=60)
    encoder = visible_text(report.encoder.name, limit=40)
    sampling = report.sampling
    return {
        "$schema": schema,
        "config": config,
        "description": " ".join(part["description"] for part in parts),
        "title": {
            "text": textwrap.wrap(visible_text(advice.headline, limit=300), width // 8),
            "subtitle": f"{corpus} · {report.corpus.rows_encoded:,} rows · {encoder} · "
            f"temperature {sampling.temperature:g} · {sampling.confidence_level:g} intervals",
            "fontSize": 16,
            "offset": 18,
            "frame": "bounds",
        },
        "vconcat": parts,
        "spacing": 30,
        # Each chart keeps its own colours and scales.
        "resolve": {
            "scale": dict.fromkeys(("color", "strokeDash", "strokeWidth", "fillOpacity"), "independent")
        },
        "datasets": datasets,
    }


@functools.cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script that sets ``window.vegaEmbed``; takes two seconds once."""
    import vl_convert

    # The stub misses that the snippet may be left out.
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return bundle


def render_svg(spec: Spec) -> str:
    """Render a specification to an SVG document, offline.

    Raises:
        ServiceError: ``chart_failed`` where the renderer refuses the specification.
    """
    import vl_convert

    try:
        svg: str = vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
    except ValueError as error:
        raise ServiceError("chart_failed", f"the chart could not be drawn: {error}") from error
    return svg


def render_png(spec: Spec, *, scale: float = 2) -> bytes:
    """Render a specification to a PNG image, offline.

    Args:
        spec: A specification.
        scale: Image pixels per pixel of the chart.

    Raises:
        ServiceError: ``chart_failed`` where the renderer refuses the specification.
    """
    import vl_convert

    try:
        png: bytes = vl_convert.vegalite_to_png(spec, scale=scale, allowed_base_urls=[])
    except ValueError as error:
        raise ServiceError("chart_failed", f"the chart could not be drawn: {error}") from error
    return png


def _shares(
    series: Sequence[_Series],
    marked: Sequence[_Series],
    *,
    ticks: Sequence[int],
    budget: float,
    n_max: BatchSizeLimit | None,
    palette: Palette,
    width: Width,
) -> Spec:
    """Lay shares of the push over the budget's line and the safe window; `marked` has the points."""
    import altair as alt

    axis = _Axes(
        sizes=sorted({*ticks, *(size for line in series for size, _ in line.points)}),
        ticks=ticks,
        floor=0.0,
        width=width,
    )
    budget_line = _Series(
        key="budget",
        name=f"budget {budget:.2f}",
        short_name=f"budget {budget:.2f}",
        colour=palette.budget,
        points=((axis.last, Estimate(value=budget, low=None, high=None, method="chosen")),),
    )
    datasets = _Datasets()
    layers: list[Any] = []
    if n_max is not None:
        layers += _limit_layers(datasets, n_max, axis, palette)
    rule = datasets.chart("budget", [{"budget": budget}])
    layers.append(
        rule.mark_rule(color=palette.budget, strokeWidth=1.5, strokeDash=[6, 3]).encode(
            y=alt.Y("budget:Q"), x=alt.value(0), x2=alt.value(axis.plot_end)
        )
    )
    layers.extend(
        _lines(
            datasets,
            series,
            axis,
            palette,
            value_title=["share of the push on negatives", "that hits same-meaning rows"],
            dataset="share",
            marked=marked,
            labels_for=[*series, budget_line],
        )
    )
    description = _describe("Share of the push that hits rows that mean the same, by batch size.", series)
    limit = "" if n_max is None else " " + _limit_label(n_max).replace("\n", " ") + "."
    return _finish(
        alt.layer(*layers),
        datasets,
        palette,
        width=width,
        height=PLOT_HEIGHT,
        description=f"{description} The budget is {budget:.2f}.{limit}",
    )


# ------------------------------------------------------------------------------------------------- the series


def _similarity_series(points: Sequence[CurvePoint], palette: Palette) -> list[_Series]:
    count = max((len(point.top_k) for point in points), default=0)
    series = [
        _Series(
            key=f"rank_{rank}",
            name=f"{_ordinal(rank)}largest similarity",
            short_name=f"{_ordinal(rank)}largest",
            colour=palette.rank,
            points=_present((point.batch_size, _at(point.top_k, rank - 1)) for point in points),
        )
        for rank in _drawn_ranks(count)
    ]
    dashed = (6, 4)
    dotted = (1.5, 3)
    noise = [(point.batch_size, point.gaussian_similarity) for point in points]
    series += [
        _Series(
            "false_negatives_masked",
            "known false negatives masked",
            "masked",
            palette.masked,
            _present((point.batch_size, point.nulls.false_negatives_masked) for point in points),
            dash=dashed,
        ),
        _Series(
            "gaussian_matched",
            "random, spread as the corpus",
            "same spread",
            palette.matched,
            _present((point.batch_size, point.nulls.gaussian_matched) for point in points),
            dash=dashed,
        ),
        _Series(
            "isotropic",
            "random directions",
            "directions",
            palette.isotropic,
            _present((point.batch_size, point.nulls.isotropic) for point in points),
            dash=dashed,
        ),
        _Series(
            "noise_max",
            "Gaussian noise, largest",
            "noise, max",
            palette.noise,
            _present((size, similarity.max) for size, similarity in noise),
            dash=dotted,
        ),
        _Series(
            "noise_mean",
            "Gaussian noise, mean",
            "noise, mean",
            palette.noise,
            _present((size, similarity.mean) for size, similarity in noise),
            dash=dotted,
        ),
        # Last, so that it is drawn over the others.
        _Series(
            "top_k_mean",
            f"mean of the {count} largest",
            f"mean of {count}",
            palette.mean,
            _present((point.batch_size, point.top_k_mean) for point in points),
            line_width=3,
            band_opacity=0.25,
        ),
    ]
    return [line for line in series if line.points]


def _share_series(
    points: Sequence[CurvePoint], scan: Sequence[SharePoint], palette: Palette
) -> list[_Series]:
    shares: Iterable[tuple[int, Estimate | None]]
    worst: Iterable[tuple[int, Estimate | None]]
    if scan:
        shares = [(point.batch_size, point.estimate) for point in scan]
        worst = [(point.batch_size, point.worst_case) for point in scan]
    else:
        shares = [(point.batch_size, point.false_negative_softmax_share) for point in points]
        worst = [(point.batch_size, point.worst_case) for point in points]
    worst_points = _present(worst)
    incomplete = bool(worst_points)
    series = [
        _Series(
            "worst_case",
            "worst case",
            "worst case",
            palette.worst,
            worst_points,
            dash=(6, 4),
            band_opacity=0.2,
        ),
        _Series(
            "share",
            "known pairs only (lower bound)" if incomplete else "share S(N)",
            "known only" if incomplete else "S(N)",
            palette.share,
            _present(shares),
            line_width=2.5,
            band_opacity=0.13 if incomplete else 0.25,
            # Up to the worst case the bar would be longer than it is informative; the band says it.
            barred=not incomplete or len(points) < 2,
        ),
    ]
    return [line for line in series if line.points]


def _present(pairs: Iterable[tuple[int, Estimate | None]]) -> tuple[tuple[int, Estimate], ...]:
    return tuple((size, estimate) for size, estimate in pairs if estimate is not None)


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


# ------------------------------------------------------------------------------------------------- the layers


class _Axes:
    """Where things are: the batch sizes along x, the values along y, and the room for names at the right."""

    def __init__(
        self, *, sizes: Sequence[int], floor: float, width: Width, ticks: Sequence[int] | None = None
    ) -> None:
        self.ticks = list(sizes if ticks is None else ticks)
        self.first, self.last = (min(sizes), max(sizes)) if sizes else (2, 2)
        # A single size gets a neighbourhood, so that its point stands in the middle.
        self.domain = [self.first / 2, self.last * 2] if self.first == self.last else [self.first, self.last]
        self.floor = floor
        self.wide: bool | None = None if width == "container" else width >= WIDE_FROM
        self.width = width

    def _by_width(self, wide: float, narrow: float) -> float | str:
        if self.wide is None:
            return f"(width >= {WIDE_FROM} ? {wide} : {narrow})"
        return wide if self.wide else narrow

    @property
    def plot_end(self) -> Any:
        """Where the lines end and their names begin, in pixels: a number or an expression."""
        return self._from_right(0)

    def _from_right(self, offset: float) -> Any:
        import altair as alt

        room = self._by_width(FULL_LABEL_ROOM - offset, SHORT_LABEL_ROOM - offset)
        return alt.ExprRef(f"width - {room}") if self.width == "container" else self.width - float(room)

    def x(self) -> alt.X:
        import altair as alt

        scale = alt.Scale(type="log", base=2, domain=self.domain, nice=False, range=[0, self.plot_end])
        axis = alt.Axis(
            values=self.ticks,
            format="d",
            grid=False,
            labelOverlap="greedy",
            labelSeparation=4,
            labelFlush=False,
        )
        return alt.X("batch_size:Q").scale(scale).axis(axis).title("batch size N (log scale)")

    def y(self, title: str | list[str]) -> alt.Y:
        import altair as alt

        return (
            alt.Y("value:Q")
            .scale(domain=[self.floor, 1.0], nice=False)
            .axis(format=".1f", values=[step / 10 for step in range(-10, 11, 2) if step / 10 >= self.floor])
            .title(title)
        )

    def label_rows(self, series: Sequence[_Series]) -> list[dict[str, Any]]:
        """Put every line's name beside its end, moved apart so that no two touch."""
        span = 1.0 - self.floor
        ends = sorted(
            ((line, *line.points[-1]) for line in series), key=lambda end: end[2].value, reverse=True
        )
        wanted = [(1.0 - end[2].value) / span * PLOT_HEIGHT for end in ends]
        placed = _spread(wanted, gap=LABEL_GAP, low=4, high=PLOT_HEIGHT - 4)
        return [
            {
                "batch_size": size,
                "value": estimate.value,
                "label_value": 1.0 - at / PLOT_HEIGHT * span,
                "series": line.key,
                "name": line.name,
                "short_name": line.short_name,
            }
            for (line, size, estimate), at in zip(ends, placed, strict=True)
        ]


def _spread(wanted: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move sorted positions apart to at least ``gap`` within [low, high], each as little as may be.

    Neighbours that collide form a block around their common mean; blocks that then collide are joined.
    """
    blocks: list[list[float]] = []
    for position in wanted:
        blocks.append([position])
        while (
            len(blocks) > 1
            and _span(blocks[-2], gap, low, high)[1] + gap > _span(blocks[-1], gap, low, high)[0]
        ):
            joined = blocks.pop()
            blocks[-1] += joined
    placed: list[float] = []
    for block in blocks:
        start, _ = _span(block, gap, low, high)
        placed += [start + gap * index for index in range(len(block))]
    return placed


def _span(block: Sequence[float], gap: float, low: float, high: float) -> tuple[float, float]:
    length = gap * (len(block) - 1)
    start = sum(block) / len(block) - length / 2
    start = max(low, min(start, high - length))
    return start, start + length


def _rows(series: Sequence[_Series]) -> list[dict[str, Any]]:
    return [
        {
            "batch_size": size,
            "series": line.key,
            "name": line.name,
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "interval": _interval(estimate),
            "barred": line.barred,
        }
        for line in series
        for size, estimate in line.points
    ]


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"none: {estimate.method}"
    return f"{estimate.low:.4f} to {estimate.high:.4f}"


def _lines(
    datasets: _Datasets,
    series: Sequence[_Series],
    axis: _Axes,
    palette: Palette,
    *,
    value_title: str | list[str],
    dataset: str,
    marked: Sequence[_Series] | None = None,
    labels_for: Sequence[_Series] | None = None,
) -> list[alt.Chart]:
    """Layer bands, lines, points with error bars, and names; ``marked`` are the points, if not all."""
    import altair as alt

    labels_for = series if labels_for is None else labels_for
    marked = series if marked is None else marked
    keys = [line.key for line in labels_for]
    colour = alt.Color("series:N").scale(domain=keys, range=[line.colour for line in labels_for]).legend(None)

    def drawn(channel: Any, values: Sequence[Any]) -> Any:
        # Ordinal only because Vega-Lite warns about sizes by name; the order is that of the names given.
        return channel("series:O").scale(domain=keys, range=list(values)).legend(None)

    x, y = axis.x(), axis.y(value_title)
    lines = datasets.chart(dataset, _rows(series))
    points = datasets.chart(f"{dataset}_points", _rows(marked))
    names = datasets.chart(f"{dataset}_names", axis.label_rows(labels_for))
    bounded = alt.datum.low != None  # noqa: E711  (a Vega expression)
    label_x: Any = axis._from_right(26)
    leader_x: Any = axis._from_right(23)
    name_field = "name" if axis.wide else "short_name"
    if axis.wide is None:
        names = names.transform_calculate(label=f"width >= {WIDE_FROM} ? datum.name : datum.short_name")
        name_field = "label"
    return [
        lines.transform_filter(bounded)
        .mark_area()
        .encode(
            x=x,
            y=alt.Y("low:Q").title(value_title),
            y2="high:Q",
            color=colour,
            detail="series:N",
            fillOpacity=drawn(alt.FillOpacity, [line.band_opacity for line in labels_for]),
        ),
        lines.mark_line(interpolate="linear").encode(
            x=x,
            y=y,
            color=colour,
            strokeDash=drawn(alt.StrokeDash, [line.dash for line in labels_for]),
            strokeWidth=drawn(alt.StrokeWidth, [line.line_width for line in labels_for]),
        ),
        points.transform_filter(bounded & alt.datum.barred)
        .mark_rule(strokeWidth=1.5, opacity=0.8)
        .encode(x=x, y=alt.Y("low:Q").title(value_title), y2="high:Q", color=colour),
        names.mark_rule(strokeWidth=0.75, opacity=0.5).encode(
            x=x, x2=alt.value(leader_x), y=y, y2="label_value:Q", color=colour
        ),
        names.mark_text(align="left", baseline="middle", fontSize=11).encode(
            x=alt.value(label_x),
            y=alt.Y("label_value:Q").title(value_title),
            text=f"{name_field}:N",
            color=colour,
        ),
        # Last, so that nothing lies between a point and the pointer.
        points.mark_point(
            filled=True, size=36, opacity=1, stroke=palette.background, strokeWidth=0.75
        ).encode(
            x=x,
            y=y,
            color=colour,
            tooltip=[
                alt.Tooltip("name:N", title="series"),
                alt.Tooltip("batch_size:Q", title="batch size N", format="d"),
                alt.Tooltip("value:Q", title="value", format=".4f"),
                alt.Tooltip("interval:N", title="interval"),
            ],
        ),
    ]


def _limit_layers(
    datasets: _Datasets, n_max: BatchSizeLimit, axis: _Axes, palette: Palette
) -> list[alt.Chart]:
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


def _count_ticks(top: float) -> list[int]:
    """0 and round counts, from the top down, that stand apart on a square-root axis."""
    ticks: list[int] = []
    exponent = math.floor(math.log10(max(top, 1)))
    for tick in (factor * 10**power for power in range(exponent, -1, -1) for factor in (5, 2, 1)):
        above = math.sqrt(ticks[-1]) if ticks else math.inf
        if tick <= top and above - math.sqrt(tick) >= 0.12 * math.sqrt(top) <= math.sqrt(tick):
            ticks.append(tick)
    return [0, *reversed(ticks)]


def _bars(histogram: Histogram) -> list[dict[str, Any]]:
    """Counts of the bins between the first and the last occupied one, joined evenly to at most MAX_BARS."""
    occupied = [index for index, count in enumerate(histogram.all_pairs) if count]
    if not occupied:
        return []
    first, last = occupied[0], occupied[-1]
    step = math.ceil((last - first + 1) / MAX_BARS)
    rows = []
    for kind, counts in (
        ("all negative pairs", histogram.all_pairs),
        ("known false negatives", histogram.known_false_negatives),
    ):
        for start in range(first, last + 1, step):
            end = min(start + step, len(counts))
            pairs = sum(counts[start:end])
            if pairs:
                rows.append(
                    {
                        "kind": kind,
                        "from": histogram.bin_edges[start],
                        "to": histogram.bin_edges[end],
                        "pairs": pairs,
                    }
                )
    return rows


# ------------------------------------------------------------------------------------------------- the finish


def _describe(opening: str, series: Sequence[_Series]) -> str:
    """Say in words what the chart shows, for those who cannot see it."""
    sentences = [opening]
    for line in series:
        (first_size, first), (last_size, last) = line.points[0], line.points[-1]
        if first_size == last_size:
            sentences.append(f"{line.name}: {first.value:.3f} at N = {first_size}.")
        else:
            sentences.append(
                f"{line.name}: {first.value:.3f} at N = {first_size} to {last.value:.3f} at N = {last_size}."
            )
    if not series:
        sentences.append("Nothing has been measured yet.")
    return " ".join(sentences)


def _finish(
    chart: Any,
    datasets: _Datasets,
    palette: Palette,
    *,
    width: Width,
    height: int,
    description: str,
) -> Spec:
    # Set here and not through Altair's methods, each of which would copy the whole chart.
    return {
        **chart.to_dict(),
        "width": width,
        "height": height,
        "description": description,
        "config": _config(palette),
        "datasets": dict(datasets),
    }


def _config(palette: Palette) -> dict[str, Any]:
    return {
        "background": palette.background,
        "font": FONT,
        "padding": {"left": 4, "right": 6, "top": 6, "bottom": 4},
        "view": {"stroke": None},
        # The description says what the chart shows; hundreds of single marks read out would not.
        "mark": {"aria": False},
        "axis": {
            "labelColor": palette.muted,
            "labelFontSize": 11,
            "titleColor": palette.ink,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "gridColor": palette.grid,
            "domainColor": palette.muted,
            "tickColor": palette.muted,
        },
        "legend": {"labelColor": palette.ink, "labelFontSize": 11, "labelLimit": 220, "offset": 6},
        "title": {
            "color": palette.ink,
            "subtitleColor": palette.muted,
            "anchor": "start",
            "frame": "group",
            "fontSize": 13,
            "offset": 10,
        },
    }
