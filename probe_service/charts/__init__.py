"""Charts as Vega-Lite specifications, made once for the page, the HTML report, notebooks, SVG and PNG.

Every specification carries its values in its own ``datasets`` and loads nothing. Altair and vl-convert are
imported only inside the functions, so that the API process can import this module cheaply.
"""

from __future__ import annotations

from probe_service.charts.curves import audit_chart, share_chart, similarity_chart
from probe_service.charts.histogram import histogram_chart
from probe_service.charts.pictures import render_png, render_svg, vega_bundle
from probe_service.charts.reports import ReportChart, figure, report_chart
from probe_service.charts.sources import source_chart
from probe_service.charts.specification import Spec, Theme
from probe_service.charts.temperature import temperature_chart
from probe_service.charts.trials import masking_chart, trial_chart

__all__ = [
    "ReportChart",
    "Spec",
    "Theme",
    "audit_chart",
    "figure",
    "histogram_chart",
    "masking_chart",
    "render_png",
    "render_svg",
    "report_chart",
    "share_chart",
    "similarity_chart",
    "source_chart",
    "temperature_chart",
    "trial_chart",
    "vega_bundle",
]
