"""Specifications to pictures, offline, and the script that draws them in a page."""

from __future__ import annotations

import functools

from probe_service.charts.specification import Spec
from probe_service.errors import ServiceError

__all__ = ["render_png", "render_svg", "vega_bundle"]


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
