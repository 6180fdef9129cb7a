"""What a trial found: its metric by batch size and loss, and what masking gains by what the probe predicted."""

from __future__ import annotations

import math
from typing import Any

from probe_service.charts.lines import PLOT_HEIGHT, Axes, Series, describe, draw_lines
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
from probe_service.schemas import TrialLossKind, TrialReport

__all__ = ["masking_chart", "trial_chart"]


@one_at_a_time
def trial_chart(
    report: TrialReport, *, theme: Theme, temperature: float | None = None, width: Width = "container"
) -> Spec:
    """Draw the metric by batch size, a line with its interval over the seeds for each loss.

    Args:
        report: Finished or not.
        theme: Light or dark background.
        temperature: One of the trial's; None: the smallest.
        width: Pixels, or ``container``.
    """
    import altair as alt

    palette = PALETTES[theme]
    if temperature is None:
        temperature = min((figure.temperature for figure in report.table), default=0.0)
    series = _by_loss(report, temperature, palette)
    values = [
        value
        for line in series
        for _, estimate in line.points
        for value in (estimate.value, estimate.low, estimate.high)
        if value is not None
    ]
    lowest, highest = min(values, default=0.0), max(values, default=1.0)
    floor, ceiling = max(-1.0, math.floor(lowest * 10) / 10), min(1.0, math.ceil(highest * 10) / 10)
    axis = Axes(
        places=sorted({place for line in series for place, _ in line.points}),
        floor=floor,
        ceiling=max(ceiling, floor + 0.1),
        width=width,
    )
    datasets = Datasets()
    layers = draw_lines(
        datasets, series, axis, palette, value_title=f"{report.metric} on held-out rows", dataset="scores"
    )
    opening = f"{report.metric} by batch size at T = {temperature:g}, mean and interval over the seeds."
    return finish(
        alt.layer(*layers),
        datasets,
        palette,
        width=width,
        height=PLOT_HEIGHT,
        description=describe(opening, series),
    )


@one_at_a_time
def masking_chart(report: TrialReport, *, theme: Theme, width: Width = "container") -> Spec:
    """Draw what masking the known false negatives gains above the share S that the probe predicts; a point a size.

    Args:
        report: Points without a predicted share are left out.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    import altair as alt

    palette = PALETTES[theme]
    rows: list[dict[str, Any]] = [
        {
            "batch_size": gain.batch_size,
            "label": f"N = {gain.batch_size}",
            "share": gain.predicted_share.value,
            "gain": gain.gain.value,
            "low": gain.gain.low,
            "high": gain.gain.high,
        }
        for gain in report.masking
        if gain.predicted_share is not None
    ]
    datasets = Datasets()
    points = datasets.chart("gains", rows)
    title = f"{report.metric} that masking gains"
    x = alt.X("share:Q").title("predicted share S(N)").scale(domain=[0, 1]).axis(grid=False)
    y = alt.Y("gain:Q").title(title)
    layers = [
        datasets.chart("nothing", [{"gain": 0.0}]).mark_rule(color=palette.muted).encode(y=y),
        points.transform_filter(alt.datum.low != None)  # noqa: E711  (a Vega expression)
        .mark_rule(color=palette.masked, strokeWidth=1.5)
        .encode(x=x, y=alt.Y("low:Q").title(title), y2="high:Q"),
        points.mark_text(align="left", dx=7, dy=-7, color=palette.muted, fontSize=11).encode(
            x=x, y=y, text="label:N"
        ),
        points.mark_point(filled=True, size=60, opacity=1, color=palette.masked).encode(
            x=x,
            y=y,
            tooltip=[
                alt.Tooltip("batch_size:Q", title="N"),
                alt.Tooltip("share:Q", title="predicted S", format=".3f"),
                alt.Tooltip("gain:Q", title="gain", format="+.4f"),
            ],
        ),
    ]
    said = [f"N = {row['batch_size']}: S {row['share']:.3f}, gain {row['gain']:+.3f}." for row in rows]
    description = " ".join([f"{report.metric} gained by masking, by predicted share S.", *said])
    return finish(
        alt.layer(*layers), datasets, palette, width=width, height=PLOT_HEIGHT, description=description
    )


def _by_loss(report: TrialReport, temperature: float, palette: Palette) -> list[Series]:
    """A line for each loss; those of one kind have its colour, and all but the first of them dashes."""
    colours = {
        TrialLossKind.INFONCE: palette.share,
        TrialLossKind.GS_INFONCE: palette.noise,
        TrialLossKind.GS_INFONCE_CONTROL: palette.isotropic,
        TrialLossKind.FLATNCE: palette.mean,
        TrialLossKind.ORACLE_MASKING: palette.masked,
    }
    series: list[Series] = []
    met: dict[TrialLossKind, int] = {}
    for loss in dict.fromkeys(figure.loss for figure in report.table):
        kind = TrialLossKind(loss.partition("_x")[0])
        before = met.get(kind, 0)
        met[kind] = before + 1
        points = [
            (figure.batch_size, figure.scores[report.metric])
            for figure in report.table
            if figure.loss == loss and figure.temperature == temperature
        ]
        if points:
            words = loss.replace("_", " ")
            dash = (1, 0) if not before else (2 + 2 * before, 3)
            series.append(Series(loss, words, words, colours[kind], tuple(sorted(points)), dash=dash))
    return series
