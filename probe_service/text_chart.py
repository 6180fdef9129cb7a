"""A chart of plain characters for the terminal: similarity and share by batch size, verdicts, and what helps most."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from probe_service.schemas import (
    CurvePoint,
    Estimate,
    ProbeReport,
    Remedy,
    RemedyKind,
    SamplerKind,
    VerdictKind,
)
from probe_service.visible_text import visible_text

__all__ = ["text_chart"]

MIN_WIDTH = 48
MOST_REMEDIES = 3
_INTERVAL_FROM_WIDTH = 72
"""Columns from which there is room for intervals in figures beside the plot."""


@dataclass(frozen=True)
class _Glyphs:
    value: str
    dash: str
    left: str
    right: str
    budget: str
    unknown: str
    edge: str


_UNICODE = _Glyphs(value="●", dash="─", left="├", right="┤", budget="┆", unknown="░", edge="│")
_ASCII = _Glyphs(value="o", dash="-", left="[", right="]", budget="!", unknown=":", edge="|")
_FOLDED = str.maketrans(
    {"≥": ">=", "≤": "<=", "–": "-", "—": "-", "−": "-", "·": "|", "’": "'", "…": "...", "→": "->", "ξ": "xi"}
)
_COLOURS = {VerdictKind.PASS: "32", VerdictKind.FAIL: "31", VerdictKind.INCONCLUSIVE: "33"}


def text_chart(
    report_or_curve: ProbeReport | Sequence[CurvePoint],
    *,
    width: int = 80,
    use_colour: bool = False,
    ascii_only: bool = False,
) -> str:
    """Draw a report, or the curve of a running job, with plain characters.

    Each batch size is one line: the value as a dot, its interval around it, the budget as a column, and, where
    evidence is incomplete, everything up to the worst case filled in. Texts of the corpus cannot steer the terminal:
    apart from colours, if asked for, the result holds no control character but line feeds.

    Args:
        report_or_curve: A finished report, or any number of curve points.
        width: Columns of the terminal; less than 48 is taken as 48.
        use_colour: Colour the verdicts with ANSI escapes.
        ascii_only: Use ASCII characters alone, for a terminal that is not UTF-8.

    Returns:
        Lines, each ended by a line feed.
    """
    report = report_or_curve if isinstance(report_or_curve, ProbeReport) else None
    curve = report.curve if report else [point for point in report_or_curve if isinstance(point, CurvePoint)]
    curve = sorted(curve, key=lambda point: point.batch_size)
    pen = _Pen(width=max(width, MIN_WIDTH), glyphs=_ASCII if ascii_only else _UNICODE)
    budget = report.advice.budget if report else None
    if not curve:
        return "Nothing has been measured yet.\n"
    lines: list[str] = []
    if report:
        lines += _heading(report, pen.width)
    lines += _similarity_lines(curve, pen)
    lines += _share_lines(curve, pen, budget)
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    if report:
        text += _verdicts(report, pen.width, use_colour=use_colour)
        text += "".join(f"{line}\n" for line in _remedies(report.advice.remedies, pen.width))
    return _to_ascii(text) if ascii_only else text


def _to_ascii(text: str) -> str:
    return text.translate(_FOLDED).encode("ascii", "replace").decode("ascii")


def _heading(report: ProbeReport, width: int) -> list[str]:
    about = (
        f"{visible_text(report.corpus.name, limit=60)} · {report.corpus.rows_encoded:,} rows ·"
        f" {visible_text(report.encoder.name, limit=60)} · temperature {report.sampling.temperature:g}"
    )
    if report.sampling.sampler is not SamplerKind.RANDOM:
        about += f" · sampler {report.sampling.sampler.value}"
    return [*textwrap.wrap(visible_text(report.advice.headline), width), *textwrap.wrap(about, width), ""]


def _similarity_lines(curve: Sequence[CurvePoint], pen: _Pen) -> list[str]:
    top_k = max((len(point.top_k) for point in curve), default=0)
    spread = [point.nulls.gaussian_matched for point in curve]
    masked = [point.nulls.false_negatives_masked for point in curve]
    lines = [f"Cosine similarity of the hardest negatives (mean of the {top_k} largest), by batch size N"]
    keys = []
    if any(spread):
        keys.append("s: random vectors spread as the corpus")
    if any(masked):
        keys.append("m: known false negatives masked")
    if keys:
        lines.append("; ".join(keys))
    lines = [part for line in lines for part in textwrap.wrap(line, pen.width)]
    lines.append(pen.axis())
    for point, null, mask in zip(curve, spread, masked, strict=True):
        missing = f"fewer than {top_k} negative pairs"
        lines.append(
            pen.line(point.batch_size, point.top_k_mean, missing, letters=(("s", null), ("m", mask)))
        )
    return [*lines, ""]


def _share_lines(curve: Sequence[CurvePoint], pen: _Pen, budget: float | None) -> list[str]:
    lines = ["Share of the push on negatives that hits same-meaning rows, S(N)"]
    if any(point.worst_case for point in curve):
        lines.append(f"{pen.glyphs.unknown}: not known, from the known pairs up to the worst case")
    lines = [part for line in lines for part in textwrap.wrap(line, pen.width)]
    lines.append(pen.axis(budget))
    lines += [
        pen.line(
            point.batch_size,
            point.false_negative_softmax_share,
            "nothing is known about same-meaning rows",
            budget=budget,
            worst_case=point.worst_case,
        )
        for point in curve
    ]
    return [*lines, ""]


def _verdicts(report: ProbeReport, width: int, *, use_colour: bool) -> str:
    advice = report.advice
    lines = [f"Verdict by batch size, at a budget of {advice.budget:.2f}"]
    for verdict in advice.verdicts:
        word = f"{verdict.verdict.value.upper():<12}"
        text = visible_text(" ".join(filter(None, (verdict.reason, verdict.assumption))))
        first, *rest = textwrap.wrap(text, width - 23) or [""]
        if use_colour:
            word = f"\x1b[1;{_COLOURS[verdict.verdict]}m{word}\x1b[0m"
        lines.append(f"{verdict.batch_size:>8}  {word} {first}")
        lines += [" " * 23 + line for line in rest]
    limit = advice.n_max
    figure = "none" if limit.value is None else f"{'' if limit.exceeded else '≥ '}{limit.value}"
    devices = report.request.sampler.world_size
    if devices > 1 and limit.per_device is not None:
        figure += f", {limit.per_device} a device on {devices} devices"
    said = f"Largest safe batch size (n_max): {figure}. {visible_text(limit.reason)}"
    if not limit.every_integer:
        said += " Not every integer was tested, but a ladder of sizes."
    if limit.assumption:
        said += f" Assumption: {visible_text(limit.assumption)}"
    lines += textwrap.wrap(said, width)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _remedies(remedies: Sequence[Remedy], width: int) -> list[str]:
    """Those that lower the upper limit of S most, the best of each kind, a line each."""
    best: dict[RemedyKind, tuple[float, Remedy]] = {}
    for remedy in remedies:
        if remedy.share_after is None or _upper(remedy.share_after) >= _upper(remedy.share_before):
            continue
        after = _upper(remedy.share_after)
        if remedy.kind not in best or after < best[remedy.kind][0]:
            best[remedy.kind] = after, remedy
    found = sorted(best.values(), key=lambda pair: pair[0])[:MOST_REMEDIES]
    if not found:
        return []
    size = found[0][1].batch_size
    lines = textwrap.wrap(f"What helps most, and the upper limit of S at {size} rows before and after", width)
    for after, remedy in found:
        figures = f"{_upper(remedy.share_before):>8.3f} → {after:.3f}  "
        lines.append(figures + visible_text(remedy.title, limit=width - len(figures)))
    return lines


def _upper(share: Estimate) -> float:
    return share.value if share.high is None else share.high


@dataclass(frozen=True)
class _Pen:
    """Draws one line per batch size: N, value, interval (where there is room), and the plot from 0 to 1."""

    width: int
    glyphs: _Glyphs

    @property
    def _figures(self) -> int:
        return 34 if self.width >= _INTERVAL_FROM_WIDTH else 17

    @property
    def _columns(self) -> int:
        return self.width - self._figures - 2

    def axis(self, budget: float | None = None) -> str:
        """The line above the plot: 0, 1 and the budget above their columns."""
        cells = [" "] * (self._columns + 2)
        cells[0], cells[-1] = "0", "1"
        if budget is not None:
            words = f"budget {budget:.2f}"
            start = min(self._column(budget) + 1, len(cells) - len(words) - 2)
            cells[start : start + len(words)] = words
        names = f"{'N':>8}  {'value':>6} "
        if self._figures > 17:
            names += f" {'interval':<15}"
        return names.ljust(self._figures) + "".join(cells)

    def line(
        self,
        batch_size: int,
        estimate: Estimate | None,
        missing: str,
        *,
        letters: Sequence[tuple[str, Estimate | None]] = (),
        budget: float | None = None,
        worst_case: Estimate | None = None,
    ) -> str:
        """One batch size; ``missing`` says why there is no estimate."""
        if estimate is None:
            return f"{batch_size:>8}  {'-':>6}  ({missing})"
        cells = [" "] * self._columns
        low, high = estimate.low, estimate.high
        if worst_case is not None:
            top = worst_case.value if worst_case.high is None else worst_case.high
            for column in range(self._column(estimate.value), self._column(top) + 1):
                cells[column] = self.glyphs.unknown
        elif low is not None and high is not None:
            start, end = self._column(low), self._column(high)
            cells[start : end + 1] = self.glyphs.dash * (end - start + 1)
            cells[start], cells[end] = self.glyphs.left, self.glyphs.right
        if budget is not None:
            cells[self._column(budget)] = self.glyphs.budget
        for letter, null in letters:
            if null is not None:
                cells[self._column(null.value)] = letter
        cells[self._column(estimate.value)] = self.glyphs.value
        figures = f"{batch_size:>8}  {estimate.value:>6.3f} "
        if self._figures > 17:
            between = "no interval" if low is None or high is None else f"{low:.3f} to {high:.3f}"
            figures += f" {between:<15}"
        return figures.ljust(self._figures) + self.glyphs.edge + "".join(cells) + self.glyphs.edge

    def _column(self, value: float) -> int:
        """The column of a value in 0–1; what lies outside is drawn at the edge."""
        return round(min(1.0, max(0.0, value)) * (self._columns - 1))
