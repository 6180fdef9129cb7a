"""Specifications to pictures, offline, and the script that draws them in a page."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

from probe_service.charts.curves import share_chart, similarity_chart
from probe_service.charts.specification import Spec, Theme
from probe_service.errors import ServiceError
from probe_service.schemas import ProbeReport
from probe_service.visible_text import visible_text

__all__ = ["figure", "render_png", "render_svg", "vega_bundle"]

STATIC_WIDTH = 760


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
