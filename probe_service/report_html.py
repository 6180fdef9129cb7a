"""A report as one HTML page that is complete in itself: scripts, charts and figures inside, nothing loaded.

Texts of the corpus reach the page only through Jinja's escaping, and the page's own policy allows exactly its
three known blocks of script and style, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe_service.charts import ReportChart, Spec, Theme, render_svg, report_chart, vega_bundle
from probe_service.report_figures import Cell, Notes, figure_cell, figure_groups, interval_methods
from probe_service.schemas import (
    BatchSizeLimit,
    Chains,
    ColumnRoles,
    Direction,
    Harm,
    PartitionMode,
    ProbeReport,
    Remedy,
    SamplerKind,
    SamplerShortfall,
    SamplingInfo,
    StarvationFloor,
    Verdict,
)
from probe_service.visible_text import visible_text

__all__ = ["render_report_html"]

_TEMPLATES = Path(__file__).parent / "templates"
_STATIC_WIDTH = 760
_SYMBOLS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}
_MOST_CELLS = 50
"""Cells (source, source) in the table; the chart has all."""
_SAMPLERS = {
    SamplerKind.RANDOM: "a new random order each epoch, cut into batches",
    SamplerKind.SEQUENTIAL: "the file's order, cut into the same batches in every epoch",
    SamplerKind.NO_DUPLICATES: "a random order in which a row waits while one of its texts is in the batch",
    SamplerKind.GROUPED: "each device's batch from one source",
}
_DIRECTIONS = {
    Direction.QUERY_TO_DOC: "each anchor with every document",
    Direction.QUERY_TO_QUERY: "each anchor with every other anchor",
    Direction.DOC_TO_QUERY: "each positive with every anchor",
    Direction.DOC_TO_DOC: "each positive with every document of another row",
}
_SHORTFALLS = {
    "rows_left_out": "rows left out",
    "rows_repeated": "places of rows that repeat",
    "remainder_rows": "of the rest that fills no batch",
    "rows_delayed": "rows that waited",
    "short_batches": "batches that are short",
    "batches_expected": "batches announced",
    "batches_resampled": "of them with repeated rows",
    "batches_missing": "of them missing",
    "batches_not_dealt": "batches too few for all devices",
    "small_sources": "sources without a full batch",
}
_REASONS = {
    "blank": "blank",
    "null": "null",
    "not_a_string": "not a string",
    "zero_vector": "encoded as zeros",
    "non_finite_vector": "encoded as numbers that are not finite",
}


def render_report_html(report: ProbeReport) -> str:
    """Return the report as a self-contained HTML document, for light and dark screens, narrow and wide, and paper.

    Works from a file without network. Charts are interactive where scripts run; the same charts stand in the page
    as SVG for readers without scripts and for print.

    Args:
        report: A finished report; its texts may be anything.

    Raises:
        ServiceError: ``chart_failed`` where a chart cannot be drawn.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible_text
    environment.filters["breakable"] = lambda name: Markup("_<wbr>").join(name.split("_"))
    css, script = _asset("report.css"), _asset("report.js")
    # Inside a page, a script ends at the first thing that looks like its end.
    bundle = vega_bundle().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    # Our own files and our own charts; of the corpus the charts hold the names of sources, as text that is escaped.
    trusted = {
        "css": Markup(css),  # noqa: S704
        "script": Markup(script),  # noqa: S704
        "bundle": Markup(bundle),  # noqa: S704
        "specs": Markup(_json_for_script(_specs(report, width="container"))),  # noqa: S704
        "charts": {
            name: {"svg": Markup(render_svg(spec)), "description": spec["description"]}  # noqa: S704
            for name, spec in _charts(report, theme=Theme.LIGHT, width=_STATIC_WIDTH).items()
        },
    }
    notes = Notes()
    # In the order in which the page shows them, so that the numbers of notes rise.
    change = {
        "drop": _drop(report, notes),
        "remedies": [_remedy(each, notes) for each in report.advice.remedies],
    }
    groups = figure_groups(report, notes)
    return environment.get_template("report.html.j2").render(
        **trusted,
        **_context(report),
        snippet=_code(report.advice.snippet),
        policy=_policy(scripts=(bundle, script), styles=(css,)),
        report=report,
        groups=groups,
        **change,
        notes=notes.texts,
        symbols=_SYMBOLS,
    )


# ------------------------------------------------------------------------------------------ scripts and charts


@functools.cache
def _asset(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(scripts)}",
            f"style-src {_hashes(styles)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hashes(texts: Iterable[str]) -> str:
    digests = (hashlib.sha256(text.encode("utf-8")).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)


def _json_for_script(value: object) -> str:
    """JSON that no HTML parser can mistake for markup: < > & and the line separators are escaped."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _charts(report: ProbeReport, *, theme: Theme, width: Any) -> dict[str, Spec]:
    found = {chart.value: report_chart(chart, report, theme=theme, width=width) for chart in ReportChart}
    return {name: spec for name, spec in found.items() if spec is not None}


def _specs(report: ProbeReport, *, width: Any) -> dict[str, dict[str, Spec]]:
    return {theme.value: _charts(report, theme=theme, width=width) for theme in Theme}


# ------------------------------------------------------------------------------------------ what the page says


def _context(report: ProbeReport) -> dict[str, Any]:
    corpus, encoder = report.corpus, report.encoder
    duplicates, truncated = corpus.duplicates, corpus.truncated
    return {
        "limit": _limit(report),
        "incomplete": any(point.worst_case is not None for point in report.curve),
        "unjudged": _unjudged(report.evidence.unjudged_pair_share),
        "assumptions": _assumptions(report.advice.n_max, report.advice.verdicts),
        "corpus": corpus.model_copy(update={"name": visible_text(corpus.name, limit=200)}),
        "encoder": {"name": visible_text(encoder.name)},
        "columns": _columns(corpus.columns),
        "sources": [(visible_text(name), count) for name, count in (corpus.sources or {}).items()],
        "excluded": [
            {
                "count": excluded.count,
                "reason": _REASONS[excluded.reason],
                "listing": _Listing.of(excluded.rows, excluded.count),
            }
            for excluded in corpus.excluded
            if excluded.count
        ],
        "duplicates": _Listing.of(duplicates.rows, duplicates.normalized),
        "truncated": _Listing.of(truncated.rows, truncated.count) if truncated else None,
        "collisions": _Listing.of(truncated.collision_rows, truncated.collisions) if truncated else None,
        "pairs": [
            {
                "rank": pair.rank,
                "similarity": pair.similarity,
                "row": pair.row,
                "other_row": pair.other_row,
                "text": None if pair.text is None else visible_text(pair.text),
                "other_text": None if pair.other_text is None else visible_text(pair.other_text),
                "source": None if pair.source is None else visible_text(pair.source),
                "other_source": None if pair.other_source is None else visible_text(pair.other_source),
                "known": {True: "yes", False: "no", None: "not judged"}[pair.known_false_negative],
            }
            for pair in report.pairs[:20]
        ],
        "chains": _chains(report.evidence.chains),
        "harm": None if report.harm is None else _harm(report.harm),
        "starvation": _starvation(report.advice.starvation_floor),
        "sampler": _sampler(report),
        "shortfall": _shortfall(report.sampling),
        "encoder_facts": _encoder_facts(report),
        "methods": interval_methods(report.curve),
        "timings": list(report.timings.items()),
        "versions": list(report.run.versions.items()),
    }


def _limit(report: ProbeReport) -> dict[str, Any]:
    n_max = report.advice.n_max
    return {
        "figure": _limit_figure(n_max),
        "name": "largest safe batch size (n_max)" if n_max.value is not None else "safe batch sizes",
        "reason": visible_text(n_max.reason),
        "per_device": n_max.per_device if report.request.sampler.world_size > 1 else None,
    }


def _limit_figure(n_max: BatchSizeLimit | None) -> str:
    if n_max is None:
        return "—"
    if n_max.value is None:
        return "none"
    return f"{n_max.value:,}" if n_max.exceeded else f"≥ {n_max.value:,}"


def _unjudged(share: float) -> str:
    if share in (0.0, 1.0):
        return "none: every pair is judged" if share == 0.0 else "all of them"
    # A share that rounds to 0 or to 1 is neither.
    words = "less than 0.001" if share < 0.0005 else "more than 0.999" if share >= 0.9995 else f"{share:.3f}"
    return f"{words} of all pairs"


def _assumptions(n_max: BatchSizeLimit, verdicts: Sequence[Verdict]) -> list[str]:
    stated = (n_max.assumption, *(verdict.assumption for verdict in verdicts))
    return list(dict.fromkeys(visible_text(text) for text in stated if text))


def _columns(roles: ColumnRoles) -> list[tuple[str, str]]:
    named = [
        (role, column)
        for role, columns in roles.model_dump().items()
        for column in ([columns] if isinstance(columns, str) else columns or ())
    ]
    return [(role, visible_text(column)) for role, column in named]


def _chains(chains: Chains | None) -> dict[str, Any] | None:
    if chains is None:
        return None
    return {
        "components": chains.components,
        "pairs": chains.inferred_pairs,
        "largest": chains.largest_component_rows,
        "listing": _Listing.of(chains.largest_component, chains.largest_component_rows),
    }


def _by_source(harm: Harm) -> bool:
    return len(harm.sources) > 1


def _harm(harm: Harm) -> dict[str, Any]:
    worst = sorted(harm.sources, key=lambda cell: -cell.false_push_share) if _by_source(harm) else []
    return {
        "batch_size": harm.batch_size,
        "share": harm.share,
        "rows_with_half": harm.rows_with_half,
        "unlisted": max(0, len(worst) - _MOST_CELLS),
        "cells": [
            {
                "anchor": visible_text(cell.anchor_source),
                "candidate": visible_text(cell.candidate_source),
                "push": cell.push_share,
                "false": cell.false_push_share,
                "rate": f"{cell.false_push_share / cell.push_share:.3f}" if cell.push_share else "no push",
            }
            for cell in worst[:_MOST_CELLS]
        ],
        "rows": [
            {
                "row": row.row,
                "text": None if row.text is None else visible_text(row.text),
                "source": None if row.source is None else visible_text(row.source),
                "as_anchor": row.as_anchor,
                "as_candidate": row.as_candidate,
            }
            for row in harm.rows
        ],
    }


def _starvation(floor: StarvationFloor | None) -> list[tuple[str, str]]:
    if floor is None:
        return []
    if floor.batch_size is None:
        found = f"none: even {floor.tested_up_to:,} rows, the largest size measured, starve"
    elif floor.batch_size == floor.tested_from:
        found = (
            f"no size starves, of those measured from {floor.tested_from:,} to {floor.tested_up_to:,} rows"
        )
    else:
        found = f"{floor.batch_size:,} rows; smaller batches starve"
    positives = "the rows' positives" if floor.positives == "given" else "two passes with dropout"
    return [
        ("Smallest batch", found),
        (
            "Holds for",
            f"a loss in {floor.dtype} at T = {floor.temperature:g}, and a mean similarity of {positives} of"
            f" {floor.positive_similarity:.2f}; a relative error of the gradient of at most {floor.largest_error:g}",
        ),
    ]


def _sampler(report: ProbeReport) -> list[tuple[str, str]]:
    """How batches are put together and what the loss compares in them."""
    sampler, loss, curve = report.request.sampler, report.request.loss, report.curve
    drawn = _SAMPLERS[sampler.kind]
    if sampler.kind is SamplerKind.GROUPED:
        drawn += f"; sources {sampler.policy.value.replace('_', ' ')}, within a source {sampler.within_source.value}"
    facts = [("Sampler", f"{sampler.kind.value}: {drawn}")]
    if sampler.world_size > 1:
        together = "compares the rows of all" if sampler.gather else "compares those of each alone"
        sizes = _by_size((point.batch_size, point.per_device_batch_size) for point in curve)
        facts.append(("Devices", f"{sampler.world_size}; the loss {together}; rows of one device: {sizes}"))
    directions = " and ".join(_DIRECTIONS[direction] for direction in loss.directions)
    apart = loss.partition_mode is PartitionMode.PER_DIRECTION and len(loss.directions) > 1
    facts.append(("The loss compares", f"{directions}{', each in a softmax of its own' if apart else ''}"))
    facts.append(
        (
            "Negatives of an anchor",
            _by_size((point.batch_size, point.candidates_per_anchor) for point in curve),
        )
    )
    return facts


def _by_size(counts: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{count:,} at N = {size}" for size, count in counts)


def _shortfall(sampling: SamplingInfo) -> dict[str, Any] | None:
    """What an epoch leaves undone: a column for each kind of shortfall that occurs."""
    names = {
        name: words
        for name, words in _SHORTFALLS.items()
        if any(getattr(each, name) for each in sampling.shortfall)
    }
    if not sampling.shortfall:
        return None
    return {
        "names": list(names.values()),
        "rows": [
            {"size": each.batch_size, "counts": [_count(each, name) for name in names]}
            for each in sampling.shortfall
        ],
        "whole": sampling.shortfall[0].rows,
    }


def _count(shortfall: SamplerShortfall, name: str) -> str:
    found: int | list[str] = getattr(shortfall, name)
    if isinstance(found, int):
        return f"{found:,}"
    return ", ".join(map(visible_text, found)) or "none"


def _encoder_facts(report: ProbeReport) -> list[tuple[str, str]]:
    encoder = report.encoder
    pinned = "pinned" if encoder.revision_pinned else "not pinned"
    facts: list[tuple[str, str | None]] = [
        ("Name", encoder.name),
        ("Weights from", encoder.location),
        ("Revision", f"{encoder.revision} ({pinned})" if encoder.revision else f"unknown ({pinned})"),
        ("SHA-256 of the weights", encoder.weights_sha256 or "not known"),
        ("Check at load", encoder.check),
        ("Pooling", encoder.pooling),
        (
            "Vectors",
            f"{encoder.dimension} wide, {encoder.dtype}, {'unit length' if encoder.normalized else 'as is'}",
        ),
        (
            "Maximum length",
            "no limit known" if encoder.max_length is None else f"{encoder.max_length} tokens",
        ),
        ("Prompt", encoder.prompt or "none"),
        ("Ran by", f"{encoder.backend} on {encoder.device}"),
        ("Fingerprint", encoder.fingerprint),
    ]
    return [(name, visible_text(value)) for name, value in facts if value is not None]


@dataclass(frozen=True)
class _Listing:
    """Row numbers, and how many more there are than are listed."""

    numbers: tuple[int, ...]
    unlisted: int

    @classmethod
    def of(cls, rows: Sequence[int], count: int) -> _Listing:
        return cls(numbers=tuple(rows[:1000]), unlisted=max(0, count - min(len(rows), 1000)))

    @property
    def text(self) -> str:
        return ", ".join(map(str, self.numbers))


def _remedy(remedy: Remedy, notes: Notes) -> dict[str, Any]:
    after = remedy.n_max_after
    return {
        "title": visible_text(remedy.title),
        "effect": visible_text(remedy.effect),
        "size": remedy.batch_size,
        "before": figure_cell(remedy.share_before, "", notes),
        "after": figure_cell(
            remedy.share_after, "It leaves S as it is, or S was not measured; its sentence says which.", notes
        ),
        "n_max": Cell(
            _limit_figure(after), None, None if after else notes.number("Only S at one size was measured.")
        ),
        "lost": "none" if remedy.true_push_lost is None else f"{remedy.true_push_lost:.3f}",
        "listing": _Listing.of(remedy.rows, len(remedy.rows)),
        "snippet": _code(remedy.snippet),
    }


def _code(snippet: str | None) -> str | None:
    """Code line by line as it can be shown: a control character in a column's name stands in it as an escape already."""
    return snippet and "\n".join(visible_text(line) for line in snippet.splitlines())


def _drop(report: ProbeReport, notes: Notes) -> dict[str, Any] | None:
    effect = report.advice.drop_duplicates
    if effect is None or not effect.rows_to_drop:
        return None
    before = {point.batch_size: point.false_negative_softmax_share for point in report.curve}
    missing = "S is not known before rows are dropped."
    return {
        "count": len(effect.rows_to_drop),
        "remaining": effect.rows_remaining,
        "listing": _Listing.of(effect.rows_to_drop, len(effect.rows_to_drop)),
        "before": _limit_figure(report.advice.n_max),
        "after": _limit_figure(effect.n_max_after),
        "snippet": _code(effect.snippet),
        "rows": [
            {
                "size": point.batch_size,
                "before": figure_cell(before.get(point.batch_size), missing, notes),
                "after": figure_cell(point.estimate, missing, notes),
            }
            for point in effect.share_after
        ],
    }
