"""How many negative pairs there are at each similarity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from probe_service.charts.specification import PALETTES, Datasets, Spec, Theme, Width, finish, one_at_a_time
from probe_service.schemas import Histogram

if TYPE_CHECKING:
    import altair as alt

__all__ = ["histogram_chart"]

HISTOGRAM_HEIGHT = 200
MAX_BARS = 100


@one_at_a_time
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
    datasets = Datasets()
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
    return finish(
        alt.layer(*layers),
        datasets,
        palette,
        width=width,
        height=HISTOGRAM_HEIGHT,
        description=f"Histogram of the cosine similarities of {histogram.pairs_counted:,} negative pairs,"
        f" {known:,} of them known false negatives.",
    )


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
