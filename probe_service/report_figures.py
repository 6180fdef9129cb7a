"""The table of every figure by batch size, and how a figure is written: value, interval, and a note at every dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from probe_service.schemas import CurvePoint, Estimate, ProbeReport
from probe_service.visible_text import visible_text

__all__ = ["Cell", "Notes", "figure_cell", "figure_groups", "interval_methods"]

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass
class Notes:
    """Notes under the table, each once, numbered from 1."""

    texts: list[str] = field(default_factory=list)

    def number(self, text: str) -> int:
        """The number of this note, which is added if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


@dataclass(frozen=True)
class Cell:
    """One figure in words, its interval, and the number of the note that says why it has none."""

    value: str
    interval: str | None
    note: int | None


@dataclass(frozen=True)
class _Row:
    name: str
    field: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Group:
    """Rows of the table under one heading."""

    name: str
    rows: tuple[_Row, ...]


_Get = Callable[[CurvePoint], Estimate | None]


def figure_groups(report: ProbeReport, notes: Notes) -> list[Group]:
    """Every figure of the curve, a row each, with a cell for each batch size.

    Args:
        report: A finished report.
        notes: Takes the reasons why figures or intervals are missing.
    """
    curve = report.curve
    top_k = report.sampling.top_k
    too_few = f"The batch has fewer negative pairs than the rank asks for (top k = {top_k})."
    no_evidence = "Nothing is known about which pairs mean the same."
    no_positive = "The rows have no positives whose similarity could be measured."
    judged = "Every pair is judged, so there is no worst case."
    no_mask = "No false-negative pair is known that could be masked, or too few pairs are left."

    def row(name: str, figure: str, get: _Get, missing: str) -> _Row:
        return _Row(name, figure, tuple(figure_cell(get(point), missing, notes) for point in curve))

    def row_if_any(name: str, figure: str, get: _Get) -> tuple[_Row, ...]:
        known = any(get(point) is not None for point in curve)
        return (row(name, figure, get, "It is not known at this size."),) if known else ()

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

    def scenario(point: CurvePoint) -> Estimate | None:
        if point.borrowed_share is None:
            return None
        how = f"S if every unjudged pair were as pairs are in: {report.evidence.borrowed_source}. It decides nothing."
        return Estimate(value=point.borrowed_share, low=None, high=None, method=how)

    def hard(name: str) -> _Get:
        def get(point: CurvePoint) -> Estimate | None:
            found: Estimate | None = (
                None if point.hard_negatives is None else getattr(point.hard_negatives, name)
            )
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
        *row_if_any(
            "The same with what chains of known links add",
            "inferred_share",
            lambda point: point.inferred_share,
        ),
        *row_if_any("A scenario, no estimate", "borrowed_share", scenario),
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
    hard_negatives = tuple(
        found
        for name, words in (
            ("own_push", "Share of the push on the row's own"),
            ("own_false", "Share of the push on known false ones among them"),
            ("other_push", "Share of the push on those of other rows"),
            ("other_false", "Share of the push on known false ones among those"),
        )
        for found in row_if_any(words, f"hard_negatives.{name}", hard(name))
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
        Group("False negatives", false_negatives),
        *([Group("Hard negatives", hard_negatives)] if hard_negatives else []),
        Group("Similarity of the hardest pairs", similarities),
        Group("The same without false negatives, and noise", nulls),
        Group("Very similar pairs in a batch", pairs_above),
        Group("What training sees", training),
    ]


def figure_cell(estimate: Estimate | None, missing: str, notes: Notes) -> Cell:
    """Put a figure and its interval into words; where there is none, a dash and the note `missing`."""
    if estimate is None:
        return Cell("—", None, notes.number(missing))
    if estimate.low is None or estimate.high is None:
        return Cell(_number(estimate.value), None, notes.number(estimate.method))
    exact = estimate.low == estimate.high and estimate.method.startswith("exact")
    interval = "exact" if exact else f"{_number(estimate.low)} to {_number(estimate.high)}"
    return Cell(_number(estimate.value), interval, None)


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


def interval_methods(curve: Sequence[CurvePoint]) -> list[str]:
    """The ways in which the intervals of a curve were made, each once."""
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
