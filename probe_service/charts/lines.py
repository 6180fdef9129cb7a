"""Lines with intervals, each named at its end: what the charts of curves are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probe_service.charts.specification import Datasets, Palette, Width
from probe_service.schemas import Estimate

if TYPE_CHECKING:
    import altair as alt

__all__ = ["PLOT_HEIGHT", "Axes", "Series", "describe", "draw_lines", "present"]

PLOT_HEIGHT = 320
LABEL_GAP = 14
"""Least distance in pixels between two labels at the right edge, at 11 px type."""
WIDE_FROM = 560
"""Width in pixels from which series carry their full names."""
FULL_LABEL_ROOM = 190
SHORT_LABEL_ROOM = 78


@dataclass(frozen=True)
class Series:
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


def present(pairs: Iterable[tuple[int, Estimate | None]]) -> tuple[tuple[int, Estimate], ...]:
    """The points of a line: null estimates are left out, not drawn as 0."""
    return tuple((size, estimate) for size, estimate in pairs if estimate is not None)


class Axes:
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
        return self.from_right(0)

    def from_right(self, offset: float) -> Any:
        """So many pixels to the right of the lines' end: a number or an expression."""
        import altair as alt

        room = self._by_width(FULL_LABEL_ROOM - offset, SHORT_LABEL_ROOM - offset)
        return alt.ExprRef(f"width - {room}") if self.width == "container" else self.width - float(room)

    def x(self) -> alt.X:
        """The channel of the batch size."""
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
        """The channel of the value."""
        import altair as alt

        return (
            alt.Y("value:Q")
            .scale(domain=[self.floor, 1.0], nice=False)
            .axis(format=".1f", values=[step / 10 for step in range(-10, 11, 2) if step / 10 >= self.floor])
            .title(title)
        )

    def label_rows(self, series: Sequence[Series]) -> list[dict[str, Any]]:
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


def _rows(series: Sequence[Series]) -> list[dict[str, Any]]:
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


def describe(opening: str, series: Sequence[Series]) -> str:
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
