"""Lines with intervals, each named at its end: what the charts of curves are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probe_service.charts.specification import Datasets, Palette, Width
from probe_service.schemas import Estimate

if TYPE_CHECKING:
    import altair as alt

__all__ = [
    "BATCH_SIZES",
    "PLOT_HEIGHT",
    "Across",
    "Axes",
    "Series",
    "budget_layer",
    "budget_series",
    "describe",
    "draw_lines",
    "present",
]

PLOT_HEIGHT = 320
LABEL_GAP = 14
"""Least distance in pixels between two labels at the right edge, at 11 px type."""
WIDE_FROM = 560
"""Width in pixels from which series carry their full names."""
FULL_LABEL_ROOM = 190
SHORT_LABEL_ROOM = 78


@dataclass(frozen=True)
class Across:
    """What the points of the lines lie above, on a log scale."""

    field: str
    title: str
    symbol: str
    base: int
    format: str
    falling: bool = False
    """Whether x runs from the largest to the smallest."""


BATCH_SIZES = Across("batch_size", "batch size N", "N", base=2, format="d")


@dataclass(frozen=True)
class Series:
    """One line: its estimates by batch size (or what else runs along x), how it is drawn, and what it is called."""

    key: str
    name: str
    short_name: str
    colour: str
    points: tuple[tuple[float, Estimate], ...]
    dash: tuple[float, ...] = (1, 0)
    line_width: float = 1.5
    band_opacity: float = 0.14
    barred: bool = True
    """Whether single points show their interval as a bar."""
    hollow: bool = False
    """Whether single points are rings: of what is no measurement."""


def present(pairs: Iterable[tuple[float, Estimate | None]]) -> tuple[tuple[float, Estimate], ...]:
    """The points of a line: null estimates are left out, not drawn as 0."""
    return tuple((place, estimate) for place, estimate in pairs if estimate is not None)


def budget_series(budget: float, at: float, palette: Palette) -> Series:
    """A line of one point, for the name at the end of the budget's rule."""
    name = f"budget {budget:.2f}"
    chosen = Estimate(value=budget, low=None, high=None, method="chosen")
    return Series("budget", name, name, palette.budget, ((at, chosen),))


def budget_layer(datasets: Datasets, budget: float, axes: Axes, palette: Palette) -> alt.Chart:
    """The budget as a level, dashed rule."""
    import altair as alt

    rule = datasets.chart("budget", [{"budget": budget}]).mark_rule(
        color=palette.budget, strokeWidth=1.5, strokeDash=[6, 3]
    )
    drawn: alt.Chart = rule.encode(y=alt.Y("budget:Q"), x=alt.value(0), x2=alt.value(axes.plot_end))
    return drawn


class Axes:
    """Where things are: the batch sizes along x, the values along y, and the room for names at the right."""

    def __init__(
        self,
        *,
        places: Sequence[float],
        floor: float,
        width: Width,
        ticks: Sequence[float] | None = None,
        across: Across = BATCH_SIZES,
        ceiling: float = 1.0,
    ) -> None:
        self.across = across
        self.ticks = list(places if ticks is None else ticks)
        self.first: float = min(places, default=2)
        self.last: float = max(places, default=2)
        # A single place gets a neighbourhood, so that its point stands in the middle.
        self.domain = [self.first / 2, self.last * 2] if self.first == self.last else [self.first, self.last]
        if across.falling:
            self.first, self.last = self.last, self.first
            self.domain.reverse()
        self.floor, self.ceiling = floor, ceiling
        self.wide: bool | None = None if width == "container" else width >= WIDE_FROM
        self.width = width

    def _by_width(self, wide: float, narrow: float) -> float | str:
        if self.wide is None:
            return f"(width >= {WIDE_FROM} ? {wide} : {narrow})"
        return wide if self.wide else narrow

    @property
    def plot_end(self) -> Any:
        """Where the lines end and their names begin, in pixels: a number or an expression."""
        return self.from_right(0)

    def from_right(self, offset: float) -> Any:
        """So many pixels to the right of the lines' end: a number or an expression."""
        import altair as alt

        room = self._by_width(FULL_LABEL_ROOM - offset, SHORT_LABEL_ROOM - offset)
        return alt.ExprRef(f"width - {room}") if self.width == "container" else self.width - float(room)

    def x(self) -> alt.X:
        """The channel of what runs along x."""
        import altair as alt

        scale = alt.Scale(
            type="log", base=self.across.base, domain=self.domain, nice=False, range=[0, self.plot_end]
        )
        axis = alt.Axis(
            values=self.ticks,
            format=self.across.format,
            grid=False,
            labelOverlap="greedy",
            labelSeparation=4,
            labelFlush=False,
        )
        return (
            alt.X(f"{self.across.field}:Q").scale(scale).axis(axis).title(f"{self.across.title} (log scale)")
        )

    def y(self, title: str | list[str], field: str = "value") -> alt.Y:
        """The channel of the value, or of an end of its interval."""
        import altair as alt

        step = 2 if self.ceiling - self.floor > 0.5 else 1
        ticks = [tenth / 10 for tenth in range(-10, 11, step) if self.floor <= tenth / 10 <= self.ceiling]
        return (
            alt.Y(f"{field}:Q")
            .scale(domain=[self.floor, self.ceiling], nice=False)
            .axis(format=".1f", values=ticks)
            .title(title)
        )

    def label_rows(self, series: Sequence[Series]) -> list[dict[str, Any]]:
        """Put every line's name beside its end, moved apart so that no two touch."""
        span = self.ceiling - self.floor
        ends = sorted(
            ((line, *line.points[-1]) for line in series), key=lambda end: end[2].value, reverse=True
        )
        wanted = [(self.ceiling - end[2].value) / span * PLOT_HEIGHT for end in ends]
        placed = _spread(wanted, gap=LABEL_GAP, low=4, high=PLOT_HEIGHT - 4)
        return [
            {
                self.across.field: place,
                "value": estimate.value,
                "label_value": self.ceiling - at / PLOT_HEIGHT * span,
                "series": line.key,
                "name": line.name,
                "short_name": line.short_name,
            }
            for (line, place, estimate), at in zip(ends, placed, strict=True)
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


def _rows(series: Sequence[Series], across: Across) -> list[dict[str, Any]]:
    return [
        {
            across.field: place,
            "series": line.key,
            "name": line.name,
            "value": estimate.value,
            "low": estimate.low,
            "high": estimate.high,
            "interval": _interval(estimate),
            "barred": line.barred,
        }
        for line in series
        for place, estimate in line.points
    ]


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return f"none: {estimate.method}"
    return f"{estimate.low:.4f} to {estimate.high:.4f}"


def draw_lines(
    datasets: Datasets,
    series: Sequence[Series],
    axis: Axes,
    palette: Palette,
    *,
    value_title: str | list[str],
    dataset: str,
    marked: Sequence[Series] | None = None,
    labels_for: Sequence[Series] | None = None,
    point_size: float = 36,
) -> list[alt.Chart]:
    """Layer bands, lines, points with error bars, and names; ``marked`` are the points, if not all."""
    import altair as alt

    labels_for = series if labels_for is None else labels_for
    marked = series if marked is None else marked
    keys, ground = [line.key for line in labels_for], palette.background
    colour = alt.Color("series:N").scale(domain=keys, range=[line.colour for line in labels_for]).legend(None)

    def drawn(channel: Any, values: Sequence[Any]) -> Any:
        # Ordinal only because Vega-Lite warns about sizes by name; the order is that of the names given.
        return channel("series:O").scale(domain=keys, range=list(values)).legend(None)

    x, y = axis.x(), axis.y(value_title)
    lines = datasets.chart(dataset, _rows(series, axis.across))
    points = datasets.chart(f"{dataset}_points", _rows(marked, axis.across))
    names = datasets.chart(f"{dataset}_names", axis.label_rows(labels_for))
    bounded = alt.datum.low != None  # noqa: E711  (a Vega expression)
    label_x: Any = axis.from_right(26)
    leader_x: Any = axis.from_right(23)
    name_field = "name" if axis.wide else "short_name"
    if axis.wide is None:
        names = names.transform_calculate(label=f"width >= {WIDE_FROM} ? datum.name : datum.short_name")
        name_field = "label"
    return [
        lines.transform_filter(bounded)
        .mark_area()
        .encode(
            x=x,
            y=axis.y(value_title, "low"),
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
        .encode(x=x, y=axis.y(value_title, "low"), y2="high:Q", color=colour),
        names.mark_rule(strokeWidth=0.75, opacity=0.5).encode(
            x=x, x2=alt.value(leader_x), y=y, y2="label_value:Q", color=colour
        ),
        names.mark_text(align="left", baseline="middle", fontSize=11).encode(
            x=alt.value(label_x),
            y=axis.y(value_title, "label_value"),
            text=f"{name_field}:N",
            color=colour,
        ),
        # Last, so that nothing lies between a point and the pointer.
        points.mark_point(size=point_size, opacity=1, strokeWidth=point_size / 36).encode(
            x=x,
            y=y,
            fill=drawn(alt.Fill, [ground if line.hollow else line.colour for line in labels_for]),
            stroke=drawn(alt.Stroke, [line.colour if line.hollow else ground for line in labels_for]),
            tooltip=[
                alt.Tooltip("name:N", title="series"),
                alt.Tooltip(f"{axis.across.field}:Q", title=axis.across.title, format=axis.across.format),
                alt.Tooltip("value:Q", title="value", format=".4f"),
                alt.Tooltip("interval:N", title="interval"),
            ],
        ),
    ]


def describe(opening: str, series: Sequence[Series], across: Across = BATCH_SIZES) -> str:
    """Say in words what the chart shows, for those who cannot see it."""
    sentences = [opening]
    # Python's format leaves off what Vega's needs a tilde for: zeros at the end.
    place_format = across.format.replace("~", "")
    for line in series:
        ends = dict.fromkeys((line.points[0], line.points[-1]))
        said = [
            f"{estimate.value:.3f} at {across.symbol} = {place:{place_format}}" for place, estimate in ends
        ]
        sentences.append(f"{line.name}: {' to '.join(said)}.")
    if not series:
        sentences.append("Nothing has been measured yet.")
    return " ".join(sentences)
