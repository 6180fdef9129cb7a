"""The share of the push that does harm at other temperatures than the one that was asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from probe_service.charts.lines import (
    PLOT_HEIGHT,
    Across,
    Axes,
    Series,
    budget_layer,
    budget_series,
    describe,
    draw_lines,
)
from probe_service.charts.specification import (
    PALETTES,
    Datasets,
    Palette,
    Spec,
    Theme,
    Width,
    blend,
    finish,
    one_at_a_time,
)
from probe_service.schemas import Estimate, SharesByTemperature

__all__ = ["temperature_chart"]

MAX_SIZES = 6
"""Batch sizes with a line; with a worst case each has two, and all are named within PLOT_HEIGHT."""
TEMPERATURES = Across("temperature", "temperature T", "T", base=10, format=".3~g", falling=True)
"""Falling, because the lines part where T is small, and are named there."""
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@one_at_a_time
def temperature_chart(
    shares: SharesByTemperature,
    *,
    temperature: float,
    budget: float,
    theme: Theme,
    width: Width = "container",
) -> Spec:
    """Draw S over temperatures, one line for each batch size (at most six, the first and the last among them).

    Below some temperature nearly all push goes to the most similar negative, and S does not change any more: lines
    over N would lie on each other there, lines over T do not. Larger sizes have the stronger colour. Where pairs are
    unjudged each size has a dashed line for the worst case as well.

    Args:
        shares: S over sizes and temperatures.
        temperature: The report's T, drawn as an upright line.
        budget: Largest acceptable share, 0–1.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    import altair as alt

    palette = PALETTES[theme]
    series = _series(shares, palette)
    places = [*shares.temperatures, temperature]
    highest = max(budget, *(estimate.value for line in series for _, estimate in line.points))
    axes = Axes(
        places=places,
        ticks=[tick for tick in TICKS if min(places) <= tick <= max(places)],
        floor=0.0,
        # A tenth above the highest line, where the words at the upright line stand.
        ceiling=min(1.0, math.ceil(10 * highest + 1) / 10),
        width=width,
        across=TEMPERATURES,
    )
    datasets = Datasets()
    lines = draw_lines(
        datasets,
        series,
        axes,
        palette,
        value_title=["share of the push on negatives", "that hits same-meaning rows"],
        dataset="temperatures",
        labels_for=[*series, budget_series(budget, axes.last, palette)],
        point_size=16,
    )
    words = f"T = {temperature:g}"
    to_left = temperature**2 < axes.first * axes.last
    here = datasets.chart("temperature", [{"temperature": temperature, "label": f"{words} (this report)"}])
    upright = here.mark_rule(color=palette.limit, strokeWidth=2).encode(
        x=axes.x(), y=alt.value(0), y2=alt.value(PLOT_HEIGHT)
    )
    name = here.mark_text(
        align="right" if to_left else "left",
        baseline="top",
        dx=-6 if to_left else 6,
        fontSize=12,
        fontWeight="bold",
        color=palette.limit,
    ).encode(x=axes.x(), y=alt.value(6), text="label:N")
    description = describe("Share of the push that hits rows that mean the same.", series, TEMPERATURES)
    return finish(
        alt.layer(upright, budget_layer(datasets, budget, axes, palette), *lines, name),
        datasets,
        palette,
        width=width,
        height=PLOT_HEIGHT,
        description=f"{description} The budget is {budget:.2f}; this report is at {words}.",
    )


def _series(shares: SharesByTemperature, palette: Palette) -> list[Series]:
    solid, dashed = (1, 0), (6, 4)
    kinds: list[tuple[str, str, str, list[list[float]], tuple[float, float]]]
    kinds = [("share", "", " rows", shares.share, solid)]
    if shares.worst_case is not None:
        kinds = [
            ("worst_case", ", worst case", ", worst", shares.worst_case, dashed),
            ("share", ", known pairs", ", known", shares.share, solid),
        ]
    places = _drawn(len(shares.batch_sizes))
    return [
        Series(
            f"{key}_{shares.batch_sizes[at]}",
            f"N = {shares.batch_sizes[at]}{words}",
            f"{shares.batch_sizes[at]}{short_words}",
            blend(palette.pale, palette.strong, place / max(1, len(places) - 1)),
            _points(shares.temperatures, [row[at] for row in table]),
            dash=dash,
            line_width=2,
        )
        for place, at in enumerate(places)
        for key, words, short_words, table, dash in kinds
    ]


def _drawn(count: int) -> list[int]:
    """Places of the sizes with a line: all, or MAX_SIZES spread evenly from the first to the last."""
    if count <= MAX_SIZES:
        return list(range(count))
    return [round(step * (count - 1) / (MAX_SIZES - 1)) for step in range(MAX_SIZES)]


def _points(temperatures: Sequence[float], shares: Sequence[float]) -> tuple[tuple[float, Estimate], ...]:
    return tuple(
        (temperature, Estimate(value=share, low=None, high=None, method="exact over all pairs of the corpus"))
        for temperature, share in sorted(zip(temperatures, shares, strict=True), reverse=True)
    )
