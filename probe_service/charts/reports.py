"""The charts of a finished report: each by its name, and the two main ones as one picture."""

from __future__ import annotations

import textwrap
from enum import StrEnum
from typing import Any

from probe_service.charts.curves import share_chart, similarity_chart
from probe_service.charts.histogram import histogram_chart
from probe_service.charts.sources import source_chart
from probe_service.charts.specification import Spec, Theme, Width
from probe_service.charts.temperature import temperature_chart
from probe_service.schemas import ProbeReport
from probe_service.visible_text import visible_text

__all__ = ["ReportChart", "figure", "report_chart"]

STATIC_WIDTH = 760


class ReportChart(StrEnum):
    """A chart that a report may have."""

    SIMILARITY = "similarity"
    SHARE = "share"
    HISTOGRAM = "histogram"
    SOURCES = "sources"
    """Where rows come from several sources and S comes from all pairs."""
    TEMPERATURE = "temperature"
    """Where S comes from all pairs."""


def report_chart(
    chart: ReportChart, report: ProbeReport, *, theme: Theme, width: Width = "container"
) -> Spec | None:
    """Draw one chart of a report; None where the report has nothing for it to show.

    Args:
        chart: Which one.
        report: A finished report.
        theme: Light or dark background.
        width: Pixels, or ``container``.
    """
    advice = report.advice
    match chart:
        case ReportChart.SIMILARITY:
            return similarity_chart(report.curve, theme=theme, width=width)
        case ReportChart.SHARE:
            return share_chart(
                report.curve,
                scan=report.scan,
                budget=advice.budget,
                n_max=advice.n_max,
                theme=theme,
                width=width,
            )
        case ReportChart.HISTOGRAM:
            s0 = report.evidence.worst_case_similarity
            return histogram_chart(report.histogram, worst_case_similarity=s0, theme=theme, width=width)
        case ReportChart.SOURCES:
            if report.harm is None or len(report.harm.sources) < 2:
                return None
            return source_chart(report.harm, theme=theme, width=width)
        case ReportChart.TEMPERATURE:
            if report.shares_by_temperature is None:
                return None
            return temperature_chart(
                report.shares_by_temperature,
                temperature=report.sampling.temperature,
                budget=advice.budget,
                theme=theme,
                width=width,
            )


def figure(report: ProbeReport, *, theme: Theme, width: int = STATIC_WIDTH) -> Spec:
    """Stack the similarity and the share chart with titles: one picture of a report, for SVG and PNG.

    Args:
        report: A finished report.
        theme: Light or dark background.
        width: Width of each plot in pixels, without axes.
    """
    charts = (
        (ReportChart.SIMILARITY, "How similar the hardest negatives of a batch are"),
        (ReportChart.SHARE, "How much of the push hits rows that mean the same"),
    )
    datasets: dict[str, Any] = {}
    parts = []
    for chart, title in charts:
        spec = report_chart(chart, report, theme=theme, width=width)
        assert spec is not None
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
            "text": textwrap.wrap(visible_text(report.advice.headline, limit=300), width // 8),
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
            "scale": dict.fromkeys(
                ("color", "fill", "stroke", "strokeDash", "strokeWidth", "fillOpacity"), "independent"
            )
        },
        "datasets": datasets,
    }
