"""What all charts share: the two themes, values that stand once in the specification, and its frame."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

if TYPE_CHECKING:
    import altair as alt

__all__ = [
    "PALETTES",
    "Datasets",
    "Palette",
    "Spec",
    "Theme",
    "Width",
    "blend",
    "contrast",
    "finish",
    "one_at_a_time",
]

Spec = dict[str, Any]
"""A Vega-Lite specification as plain JSON values."""

Width = int | Literal["container"]
"""Pixels, or ``container``: as wide as the element that vega-embed draws into."""

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
    inferred: str
    scenario: str
    budget: str
    limit: str
    pale: str
    """Of a small batch; `strong` of a large one."""
    strong: str
    wash: str
    """Of no harm; `harm` of the most."""
    harm: str


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
        inferred="#8a6200",
        scenario="#6e7781",
        budget="#c44e00",
        limit="#00795a",
        pale="#4292c6",
        strong="#08306b",
        wash="#f1f3f5",
        harm="#b84700",
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
        inferred="#e6b422",
        scenario="#9aa4ae",
        budget="#ff8a3d",
        limit="#2fc79a",
        pale="#3d7fb5",
        strong="#d6ebff",
        wash="#20262d",
        harm="#ff8a3d",
    ),
}


class Datasets(dict[str, list[dict[str, Any]]]):
    """The values of one specification by name, kept out of Altair, which would copy them once per layer."""

    def chart(self, name: str, rows: list[dict[str, Any]]) -> alt.Chart:
        """Keep the rows and return a chart of them."""
        import altair as alt

        self[name] = rows
        return alt.Chart(alt.NamedData(name=name))


_Arguments = ParamSpec("_Arguments")
_building = threading.Lock()


def one_at_a_time(build: Callable[_Arguments, Spec]) -> Callable[_Arguments, Spec]:
    """Let one thread build at a time.

    ``alt.X(…).scale(…)`` goes through a descriptor that keeps its object on the class: with two threads at it, one
    chart gets the other's axis, without any error.
    """

    @functools.wraps(build)
    def alone(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Spec:
        with _building:
            return build(*args, **kwargs)

    return alone


def blend(first: str, second: str, share: float) -> str:
    """The colour that lies `share` (0–1) of the way from one ``#rrggbb`` to another, as Vega's scales blend them."""
    ends = zip(_channels(first), _channels(second), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in ends)


def contrast(one: str, other: str) -> float:
    """WCAG's contrast of two ``#rrggbb``, 1–21."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    shares = [channel / 255 for channel in _channels(colour)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def finish(
    chart: Any,
    datasets: Datasets,
    palette: Palette,
    *,
    width: Width,
    height: int,
    description: str,
) -> Spec:
    """Make the chart a specification: its size, its words, its look, and the values in their one place."""
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
