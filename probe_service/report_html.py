"""A report as one HTML page that is complete in itself: scripts, charts and figures inside, nothing loaded.

Texts of the corpus reach the page only through Jinja's escaping, and the page's own policy allows exactly its
three known blocks of script and style, by their hashes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probe_service.charts import (
    Spec,
    Theme,
    histogram_chart,
    render_svg,
    share_chart,
    similarity_chart,
    vega_bundle,
)
from probe_service.schemas import BatchSizeLimit, ColumnRoles, CurvePoint, Estimate, ProbeReport, Verdict
from probe_service.visible_text import visible_text

__all__ = ["render_report_html"]

_TEMPLATES = Path(__file__).parent / "templates"
_STATIC_WIDTH = 760
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SYMBOLS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}
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
    # Text from our own files and our own charts, which hold no text of the corpus.
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
    notes = _Notes()
    groups = _groups(report, notes)
    return environment.get_template("report.html.j2").render(
        **trusted,
        **_context(report),
        policy=_policy(scripts=(bundle, script), styles=(css,)),
        report=report,
        groups=groups,
        drop=_drop(report, notes),
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
    return {
        "similarity": similarity_chart(report.curve, theme=theme, width=width),
        "share": share_chart(
            report.curve,
            scan=report.scan,
            budget=report.advice.budget,
            n_max=report.advice.n_max,
            theme=theme,
            width=width,
        ),
        "histogram": histogram_chart(
            report.histogram,
            worst_case_similarity=report.evidence.worst_case_similarity,
            theme=theme,
            width=width,
        ),
    }


def _specs(report: ProbeReport, *, width: Any) -> dict[str, dict[str, Spec]]:
    return {theme.value: _charts(report, theme=theme, width=width) for theme in Theme}


# ------------------------------------------------------------------------------------------ what the page says


def _context(report: ProbeReport) -> dict[str, Any]:
    corpus, encoder = report.corpus, report.encoder
    duplicates, truncated = corpus.duplicates, corpus.truncated
    return {
        "limit": _limit(report.advice.n_max),
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
        "encoder_facts": _encoder_facts(report),
        "methods": _methods(report.curve),
        "timings": list(report.timings.items()),
        "versions": list(report.run.versions.items()),
    }


def _limit(n_max: BatchSizeLimit) -> dict[str, str]:
    return {
        "figure": _limit_figure(n_max),
        "name": "largest safe batch size (n_max)" if n_max.value is not None else "safe batch sizes",
        "reason": visible_text(n_max.reason),
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


def _drop(report: ProbeReport, notes: _Notes) -> dict[str, Any] | None:
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
        "rows": [
            {
                "size": point.batch_size,
                "before": _cell(before.get(point.batch_size), missing, notes),
                "after": _cell(point.estimate, missing, notes),
            }
            for point in effect.share_after
        ],
    }


# ------------------------------------------------------------------------------------------ the table of figures


@dataclass
class _Notes:
    """Notes under the table, each once, numbered from 1."""

    texts: list[str] = field(default_factory=list)

    def number(self, text: str) -> int:
        """The number of this note, which is added if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


@dataclass(frozen=True)
class _Cell:
    value: str
    interval: str | None
    note: int | None


@dataclass(frozen=True)
class _Row:
    name: str
    field: str
    cells: tuple[_Cell, ...]


@dataclass(frozen=True)
class _Group:
    name: str
    rows: tuple[_Row, ...]


_Get = Callable[[CurvePoint], Estimate | None]


def _groups(report: ProbeReport, notes: _Notes) -> list[_Group]:
    curve = report.curve
    top_k = report.sampling.top_k
    too_few = f"The batch has fewer negative pairs than the rank asks for (top k = {top_k})."
    no_evidence = "Nothing is known about which pairs mean the same."
    no_positive = "The rows have no positives whose similarity could be measured."
    judged = "Every pair is judged, so there is no worst case."
    no_mask = "No false-negative pair is known that could be masked, or too few pairs are left."

    def row(name: str, figure: str, get: _Get, missing: str) -> _Row:
        return _Row(name, figure, tuple(_cell(get(point), missing, notes) for point in curve))

    def rank(index: int) -> _Get:
        return lambda point: point.top_k[index] if index < len(point.top_k) else None

    def above(index: int, figure: str) -> _Get:
        def get(point: CurvePoint) -> Estimate | None:
            found: Estimate | None = getattr(point.pairs_above[index], figure)
            return found

        return get

    def quantile(name: str) -> _Get:
        def get(point: CurvePoint) -> Estimate | None:
            found: Estimate | None = None if point.xi is None else getattr(point.xi, name)
            return found

        return get

    def gradient(dtype: str, name: str) -> _Get:
        def get(point: CurvePoint) -> Estimate | None:
            errors = (point.gradient_error or {}).get(dtype)
            found: Estimate | None = None if errors is None else getattr(errors, name)
            return found

        return get

    ranks = max((len(point.top_k) for point in curve), default=0)
    thresholds = [item.threshold for item in curve[0].pairs_above] if curve else []
    dtypes = sorted({dtype for point in curve for dtype in point.gradient_error or {}})
    shown_ranks = range(ranks) if ranks <= 10 else (*range(9), ranks - 1)
    false_negatives = (
        row(
            "Share of the push on same-meaning rows, S(N)",
            "false_negative_softmax_share",
            lambda point: point.false_negative_softmax_share,
            no_evidence,
        ),
        row("The same in the worst case", "worst_case", lambda point: point.worst_case, judged),
        row(
            "Share of an InfoNCE update, G(N)",
            "false_negative_gradient_share",
            lambda point: point.false_negative_gradient_share,
            no_positive,
        ),
        row(
            "Same-meaning rows per anchor",
            "false_negatives_per_anchor",
            lambda point: point.false_negatives_per_anchor,
            no_evidence,
        ),
        row(
            "Share of anchors with at least one",
            "anchors_with_false_negative",
            lambda point: point.anchors_with_false_negative,
            no_evidence,
        ),
    )
    similarities = (
        row(
            f"Mean of the {top_k} largest similarities", "top_k_mean", lambda point: point.top_k_mean, too_few
        ),
        *(
            row(f"Similarity of rank {index + 1}", f"top_k[{index}]", rank(index), too_few)
            for index in shown_ranks
        ),
        row(
            "Largest similarity of an anchor, on average",
            "hardest_negative",
            lambda point: point.hardest_negative,
            too_few,
        ),
    )
    nulls = (
        row(
            "Known false negatives masked",
            "nulls.false_negatives_masked",
            lambda point: point.nulls.false_negatives_masked,
            no_mask,
        ),
        row(
            "Random vectors, spread as the corpus",
            "nulls.gaussian_matched",
            lambda point: point.nulls.gaussian_matched,
            too_few,
        ),
        row("Random directions", "nulls.isotropic", lambda point: point.nulls.isotropic, too_few),
        row(
            "Rows against Gaussian noise, mean",
            "gaussian_similarity.mean",
            lambda point: point.gaussian_similarity.mean,
            too_few,
        ),
        row(
            "Rows against Gaussian noise, largest",
            "gaussian_similarity.max",
            lambda point: point.gaussian_similarity.max,
            too_few,
        ),
    )
    pairs_above = tuple(
        row(
            f"{words} with similarity ≥ {threshold:g}",
            f"pairs_above[{threshold:g}].{figure}",
            above(index, figure),
            too_few,
        )
        for index, threshold in enumerate(thresholds)
        for figure, words in (("expected_pairs", "Pairs"), ("at_least_one", "P(at least one pair)"))
    )
    training = (
        row(
            "Negatives that count, per anchor",
            "effective_negatives",
            lambda point: point.effective_negatives,
            too_few,
        ),
        row(
            "Share of anchors that count",
            "effective_anchors",
            lambda point: point.effective_anchors,
            no_positive,
        ),
        *(
            row(f"ξ, {words}", f"xi.{name}", quantile(name), no_positive)
            for name, words in (("p10", "lowest tenth"), ("p50", "median"), ("p90", "highest tenth"))
        ),
        *(
            row(f"{words} in {dtype}", f"gradient_error.{dtype}.{name}", gradient(dtype, name), no_positive)
            for dtype in dtypes
            for name, words in (
                ("infonce", "Relative error of InfoNCE gradients"),
                ("flatnce", "Relative error of FlatNCE gradients"),
                ("zero_loss_share", "Share of anchors whose loss rounds to 0"),
            )
        ),
    )
    if not dtypes and curve:
        training = (*training, row("Error of gradients", "gradient_error", lambda _: None, no_positive))
    return [
        _Group("False negatives", false_negatives),
        _Group("Similarity of the hardest pairs", similarities),
        _Group("The same without false negatives, and noise", nulls),
        _Group("Very similar pairs in a batch", pairs_above),
        _Group("What training sees", training),
    ]


def _cell(estimate: Estimate | None, missing: str, notes: _Notes) -> _Cell:
    if estimate is None:
        return _Cell("—", None, notes.number(missing))
    if estimate.low is None or estimate.high is None:
        return _Cell(_number(estimate.value), None, notes.number(estimate.method))
    return _Cell(
        _number(estimate.value),
        f"{_number(estimate.low)} to {_number(estimate.high)}",
        None,
    )


def _number(value: float) -> str:
    """Three decimals below 10, fewer above, powers of ten below 0.00005; a true minus sign."""
    size = abs(value)
    if size == 0:
        text = "0"
    elif size < 0.00005:
        mantissa, exponent = f"{size:.1e}".split("e-")
        text = f"{mantissa}·10⁻{exponent.lstrip('0').translate(_SUPERSCRIPTS)}"
    elif size < 0.0005:
        text = f"{size:.4f}"
    elif size < 10:
        text = f"{size:.3f}"
    elif size < 100:
        text = f"{size:.1f}"
    else:
        text = f"{size:,.0f}"
    return f"−{text}" if value < 0 else text


def _methods(curve: Sequence[CurvePoint]) -> list[str]:
    found: dict[str, None] = {}
    for point in curve:
        for estimate in _estimates(point):
            found.setdefault(visible_text(estimate.method))
    return list(found)


def _estimates(noun: Any) -> Iterable[Estimate]:
    """Every estimate inside a noun, in the order of its fields."""
    if isinstance(noun, Estimate):
        yield noun
    elif isinstance(noun, list | tuple):
        for item in noun:
            yield from _estimates(item)
    elif isinstance(noun, dict):
        yield from _estimates(list(noun.values()))
    elif hasattr(type(noun), "model_fields"):
        yield from _estimates([getattr(noun, name) for name in type(noun).model_fields])
