"""Which sources push on which, and how much of that does harm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probe_service.charts.specification import (
    PALETTES,
    Datasets,
    Spec,
    Theme,
    Width,
    blend,
    contrast,
    finish,
    one_at_a_time,
)
from probe_service.schemas import Harm
from probe_service.visible_text import visible_text

__all__ = ["source_chart"]

MAX_SOURCES = 16
"""Sources with a row of their own; the others, those with the least false push, are added up."""
MAX_SOURCES_WITH_WORDS = 8
"""Sources up to which a cell has room for its figure on a narrow screen."""
NAME_ROOM = 96
"""Pixels for a source's name beside the cells."""


@one_at_a_time
def source_chart(harm: Harm, *, theme: Theme, width: Width = "container") -> Spec:
    """Draw the false push by (anchor's source, candidate's source) as a heat map; all cells add up to S.

    Colour is the false push of the cell as a share of all push. The figure in the cell, where there are at most eight
    sources, is another one: the share of the cell's own push that is false, whatever the sources' sizes.

    Args:
        harm: S by source; more than sixteen sources are drawn as the fifteen with the most false push and the others.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    import altair as alt

    palette = PALETTES[theme]
    names, rows = _cells(harm)
    worst = max((row["false_push_share"] for row in rows), default=0.0)
    for row in rows:
        colour = blend(palette.wash, palette.harm, row["false_push_share"] / worst if worst else 0.0)
        row["inked"] = contrast(palette.ink, colour) >= contrast(palette.background, colour)
    with_words = len(names) <= MAX_SOURCES_WITH_WORDS
    figures = ["figure: the false share of this cell's own push"] if with_words else []
    datasets = Datasets()
    cells = datasets.chart("sources", rows)

    def channel(kind: Any, field: str, title: str, **axis: Any) -> Any:
        scale = alt.Scale(domain=names, padding=0)
        looks = alt.Axis(labelLimit=NAME_ROOM, domain=False, ticks=False, **axis)
        return kind(f"{field}:N").scale(scale).axis(looks).title(title)

    x = channel(alt.X, "candidate_source", "candidate's source", labelAngle=-40)
    y = channel(alt.Y, "anchor_source", "anchor's source")
    layers = [
        cells.mark_rect(stroke=palette.background, strokeWidth=2).encode(
            x=x,
            y=y,
            color=alt.Color("false_push_share:Q")
            .scale(domain=[0, worst or 1], range=[palette.wash, palette.harm], interpolate="rgb")
            .legend(
                orient="top",
                # Not a gradient: the renderer counts those up, and the same chart would be another picture each time.
                type="symbol",
                symbolType="square",
                symbolSize=150,
                symbolStrokeWidth=0,
                title=None,
                format=".2~g",
                tickCount=3,
            ),
            tooltip=[
                alt.Tooltip("anchor_source:N", title="anchors of"),
                alt.Tooltip("candidate_source:N", title="candidates of"),
                alt.Tooltip("false_push_share:Q", title="false push, of all push", format=".4f"),
                alt.Tooltip("push_share:Q", title="push, of all push", format=".4f"),
                alt.Tooltip("false_share:N", title="false, of this cell's push"),
            ],
        )
    ]
    if with_words:
        ink = alt.when("datum.inked").then(alt.value(palette.ink)).otherwise(alt.value(palette.background))
        words = cells.mark_text(fontSize=11, baseline="middle").encode(x=x, y=y, text="words:N", color=ink)
        layers.append(words)
    spec = finish(
        alt.layer(*layers),
        datasets,
        palette,
        width=width,
        height=len(names) * (36 if with_words else 22),
        description=_describe(harm, rows),
    )
    # A title, and not the legend's, because it may begin at the left of the names.
    title = {"text": ["colour: false push, of all push", *figures], "frame": "bounds"}
    return {**spec, "title": {**title, "fontSize": 11, "fontWeight": "normal"}}


def _cells(harm: Harm) -> tuple[list[str], list[dict[str, Any]]]:
    """The names along both axes, and one row a cell, those of small sources added up."""
    sources = list(dict.fromkeys(cell.anchor_source for cell in harm.sources))
    by_source = dict.fromkeys(sources, 0.0)
    for cell in harm.sources:
        by_source[cell.anchor_source] += cell.false_push_share
        by_source[cell.candidate_source] += cell.false_push_share
    own = set(sources)
    if len(sources) > MAX_SOURCES:
        own = set(sorted(sources, key=lambda source: -by_source[source])[: MAX_SOURCES - 1])
    kept = [source for source in sources if source in own]
    others = f"{len(sources) - len(kept)} others"
    # The axes know sources by their names, which may look alike once nothing in them can do harm.
    names = _distinct([*map(visible_text, kept), *([others] if len(kept) < len(sources) else [])])
    place = {source: kept.index(source) if source in own else len(kept) for source in sources}
    sums = {(a, c): [0.0, 0.0] for a in range(len(names)) for c in range(len(names))}
    for cell in harm.sources:
        total = sums[place[cell.anchor_source], place[cell.candidate_source]]
        total[0] += cell.push_share
        total[1] += cell.false_push_share
    return names, [
        {
            "anchor_source": names[a],
            "candidate_source": names[c],
            "push_share": push,
            "false_push_share": false,
            "false_share": f"{false / push:.4f}" if push else "no push",
            "words": f"{false / push:.2f}" if push else "–",
        }
        for (a, c), (push, false) in sums.items()
    ]


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that stood there before."""
    found: list[str] = []
    for name in names:
        number, other = 1, name
        while other in found:
            number += 1
            other = f"{name} ({number})"
        found.append(other)
    return found


def _describe(harm: Harm, rows: Sequence[dict[str, Any]]) -> str:
    """Say in words what the chart shows: the whole, and the three cells with the most false push."""
    worst = sorted(rows, key=lambda row: -row["false_push_share"])[:3]
    said = "; ".join(
        f"{row['false_push_share']:.4f} from anchors of {visible_text(row['anchor_source'], limit=40)} on candidates of"
        f" {visible_text(row['candidate_source'], limit=40)}"
        for row in worst
    )
    return f"False push by the sources of anchor and candidate at N = {harm.batch_size}, {harm.share:.4f} in all. Most: {said}."
