"""Two sides by side: before and after a change, encoder against encoder, corpus against corpus.

Both are laid out by a `Workspace` each and measured on batches that share as many rows as they can, so that what they have in
common drops out of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from probe_service.advise import worst_case_assumption
from probe_service.errors import RequestError
from probe_service.estimate import SUB_POOLS, WHOLE, SamplingPlan
from probe_service.estimate.comparison import Side, compare_figures
from probe_service.estimate.coupling import NO_PARTNER, CommonBatches, match_rows
from probe_service.measure import Shares
from probe_service.schemas import (
    CONFIDENCE_LEVEL,
    ComparedSide,
    ComparisonReport,
    ComparisonVerdict,
    CouplingKind,
    FigureComparison,
    ProbeRequest,
    ReportWarning,
    RowOverlap,
    SamplerKind,
    SizeComparison,
    VerdictKind,
)
from probe_service.settings import Settings
from probe_service.workspace import DEFAULT_LARGEST_SIZE, Population, Workspace

__all__ = ["compare", "judge_increase"]

SHARE = "false_negative_softmax_share"
SMALLEST_SHOWN = 0.0005
"""Differences within this are .000 to three decimals."""
DEFAULT_ROWS = SUB_POOLS * DEFAULT_LARGEST_SIZE
"""Rows encoded of each side where the request does not say, however small the sizes: two samples have few rows in common."""
FEW_COMMON_ROWS = 0.5

_DRAWS, _CHOICE = 7, 8
_SEED_APART = 2
"""Added to the seed of a side that is drawn apart, else its batches would be the other's by number."""

Rows = NDArray[np.int64]
Columns = dict[str, NDArray[np.float64]]


def compare(
    request: ProbeRequest,
    source_a: Path | str,
    source_b: Path | str,
    folder: Path,
    *,
    encoder_b: str | None = None,
    temperature_b: float | None = None,
    settings: Settings,
    say: Callable[[str], None] = lambda _line: None,
    checkpoint: Callable[[], None] = lambda: None,
) -> ComparisonReport:
    """Compare two corpora, or one corpus under two encoders or temperatures.

    Args:
        request: What to measure on either side; batches are drawn at random.
        source_a: Path of corpus A, or a Hugging Face data set (``hf:…``).
        source_b: The same for B; may be A again.
        folder: Where intermediate results go.
        encoder_b: Encoder of B; None: the same as A's.
        temperature_b: T of B; None: the same as A's.
        settings: Of the service.
        say: Told what is being done, a line at a time.
        checkpoint: Called often; may raise to cancel.

    Returns:
        Every figure of both sides at every size, with an interval for the difference.

    Raises:
        ProbeError: Bad input, an encoder that cannot be used; ``compare_random_batches_only`` for another sampler.
    """
    if request.sampler.kind is not SamplerKind.RANDOM:
        raise RequestError(
            "compare_random_batches_only",
            f"Common batches are drawn at random; {request.sampler.kind} batches cannot be compared.",
            column="sampler",
        )
    if request.corpus.max_rows is None:
        options = request.corpus.model_copy(update={"max_rows": DEFAULT_ROWS})
        request = request.model_copy(update={"corpus": options})
    changed = {"encoder": encoder_b, "temperature": temperature_b}
    request_b = ProbeRequest.model_validate(
        request.model_dump() | {name: value for name, value in changed.items() if value is not None}
    )
    works = [
        _lay_out(label, each, source, folder / label.lower(), settings, say, checkpoint)
        for label, each, source in (("A", request, source_a), ("B", request_b, source_b))
    ]
    sizes = sorted(set(works[0].sizes) & set(works[1].sizes))
    a, b = (
        _Subject(
            label, each, work, Shares(work.population, sizes, each, work.training_rows, None, work.scratch)
        )
        for label, each, work in zip("AB", (request, request_b), works, strict=True)
    )
    for subject in (a, b):
        tasks = subject.shares.tasks()
        for number, task in enumerate(tasks, start=1):
            for part, each in enumerate(parts := task.parts(), start=1):
                say(f"{subject.label}: every size {number}/{len(tasks)}, {part}/{len(parts)}")
                task.run(each)
    overlap, common = _overlap(a, b)
    unchanged = _unchanged(a, b, common) if overlap.coupling is CouplingKind.SAME_ROWS else frozenset()
    compared = []
    for size in sizes:
        say(f"both at N = {size}")
        compared.append(_compare_size(size, a, b, common, unchanged, checkpoint))
    return ComparisonReport(
        a=a.described(),
        b=b.described(),
        confidence_level=CONFIDENCE_LEVEL,
        rows=overlap,
        sizes=compared,
        headline=_headline(compared),
        warnings=_warnings(a, b, overlap, compared),
    )


def judge_increase(report: ComparisonReport, limit: float) -> VerdictKind:
    """Hold S of B − S of A against a limit: `fail` if the lower limit is above it at any size, `pass` if no upper limit is."""
    differences = [size.figures[SHARE].difference for size in report.sizes]
    if any(each.low is not None and each.low > limit for each in differences):
        return VerdictKind.FAIL
    if all(each.high is not None and each.high <= limit for each in differences):
        return VerdictKind.PASS
    return VerdictKind.INCONCLUSIVE


@dataclass(frozen=True)
class _Subject:
    """One side, laid out."""

    label: str
    request: ProbeRequest
    work: Workspace
    shares: Shares

    @property
    def population(self) -> Population:
        return self.work.population

    @property
    def plan(self) -> SamplingPlan:
        return self.work.population.plan

    def measured(self, rows: Rows, seed: list[int], checkpoint: Callable[[], None]) -> Columns:
        """The columns of (b, N) batches."""
        found = self.shares.softmaxes.measure(rows, np.random.default_rng(seed), checkpoint)
        return {field.name: getattr(found, field.name) for field in fields(found)}

    def side(
        self, size: int, whole: Columns, pools: Sequence[Columns] | None, pool_rows: Sequence[Rows]
    ) -> Side:
        """What was measured, as the estimators take it."""
        setting, all_pairs = self.shares.setting, self.shares.all_pairs
        return Side(
            whole=whole,
            pools=pools,
            pool_rows=pool_rows,
            evidence=self.population.evidence,
            complete=setting.complete,
            plain=setting.plain,
            exact=None if all_pairs is None else all_pairs.figures(size),
        )

    def described(self) -> ComparedSide:
        """The side in the report."""
        scan, assumption = self.shares.scan, worst_case_assumption(self.work.floor["similarity"])
        return ComparedSide(
            request=self.request,
            corpus=self.work.corpus_info,
            encoder=self.work.encoder_info,
            n_max=None if scan is None else scan.limit(self.request.budget, assumption=assumption),
        )


def _lay_out(
    label: str,
    request: ProbeRequest,
    source: Path | str,
    folder: Path,
    settings: Settings,
    say: Callable[[str], None],
    checkpoint: Callable[[], None],
) -> Workspace:
    """Read, encode and lay out one side."""
    name = source.name if isinstance(source, Path) else source
    work = Workspace(request, source, name, folder, settings, checkpoint)
    say(f"{label}: reading {name}")
    parts = work.read()["parts"]
    if parts:
        say(f"{label}: loading the encoder")
        work.load()
    for part in range(parts):
        say(f"{label}: encoding {part + 1}/{parts}")
        work.encode(part)
    say(f"{label}: gathering the vectors")
    work.gather()
    work.find_floor()
    return work


def _compare_size(
    size: int,
    a: _Subject,
    b: _Subject,
    common: CommonBatches | None,
    unchanged: frozenset[str],
    checkpoint: Callable[[], None],
) -> SizeComparison:
    """Measure both sides at one size, and compare them."""
    if common is None:
        sides = (_apart(size, a, 0, checkpoint), _apart(size, b, _SEED_APART, checkpoint))
    else:
        sides = _together(size, a, b, common, checkpoint)
    figures = compare_figures(size, *sides, coupled=common is not None, unchanged=unchanged)
    verdict, statement = _verdict(size, figures[SHARE])
    return SizeComparison(
        batch_size=size,
        num_batches=len(sides[0].whole["false_share"]),
        figures=figures,
        verdict=verdict,
        statement=statement,
    )


# ------------------------------------------------------------------------------------------------------- which batches


def _overlap(a: _Subject, b: _Subject) -> tuple[RowOverlap, CommonBatches | None]:
    """Match the encoded rows, and say how batches are drawn; None: each side's apart."""
    by, keys_a, keys_b = _row_keys(a, b)
    matched = match_rows(keys_a, keys_b)
    common = int((matched != NO_PARTNER).sum())
    rows_a, rows_b = len(keys_a), len(keys_b)
    # Where a sample is encoded, rows at the same places are the same draw only if both were drawn from equally many.
    alike = rows_a == rows_b and a.plan.rows_usable == b.plan.rows_usable
    whole = a.plan.whole_corpus and b.plan.whole_corpus
    if a.plan.whole_corpus != b.plan.whole_corpus:
        kind = CouplingKind.INDEPENDENT
        said = "every row of one side is encoded but only a sample of the other, so each was measured on batches of its own"
    elif common == 0 and not alike:
        kind, said = CouplingKind.INDEPENDENT, "each was measured on batches of its own"
    elif common == 0:
        kind = CouplingKind.FILE_ORDER
        said = "there are equally many, so rows at the same place of the file were put into the same batches"
    elif common == rows_a == rows_b:
        kind, said = CouplingKind.SAME_ROWS, "both were measured on the same batches"
    else:
        kind, said = CouplingKind.COMMON_ROWS, "both were measured on batches that share the common rows"
    batches = None
    if kind is not CouplingKind.INDEPENDENT:
        in_file_order = whole or kind is CouplingKind.FILE_ORDER
        rng = None if in_file_order else np.random.default_rng([a.plan.seed, _DRAWS])
        batches = CommonBatches.pair_up(matched, rows_a, rng)
    if kind is CouplingKind.SAME_ROWS:
        explanation = f"All {common:,} encoded rows are on both sides by their {by}; {said}."
    else:
        explanation = (
            f"Of the encoded rows, {common:,} are on both sides by their {by}, {rows_a - common:,} only in A and "
            f"{rows_b - common:,} only in B; {said}."
        )
    overlap = RowOverlap(
        matched_by=by,
        common=common,
        only_a=rows_a - common,
        only_b=rows_b - common,
        coupling=kind,
        explanation=explanation,
    )
    return overlap, batches


def _unchanged(a: _Subject, b: _Subject, common: CommonBatches | None) -> frozenset[str]:
    """Figures that cannot differ between two sides with the same rows."""
    assert common is not None
    rows = common.pools(np.arange(len(a.population)))
    found: list[str] = []

    def same(column: str) -> bool:
        values = [getattr(side.population, column) for side in (a, b)]
        if any(each is None for each in values):
            return all(each is None for each in values)
        first, second = (np.asarray(each)[at] for each, at in zip(values, rows, strict=True))
        return bool(np.array_equal(first, second))

    if same("anchors") and same("positives"):
        found += ["top_k_mean", "hardest_negative"]
    judged = all(side.shares.setting.complete and side.shares.setting.plain for side in (a, b))
    if judged and same("groups"):
        found += ["false_negatives_per_anchor", "anchors_with_false_negative"]
    return frozenset(found)


def _row_keys(
    a: _Subject, b: _Subject
) -> tuple[Literal["text", "id", "vector"], list[Hashable], list[Hashable]]:
    """What makes two rows the same, and this of every encoded row."""
    sides = (a, b)
    if all(side.work.corpus.anchors is not None for side in sides):
        texts = [
            list(
                zip(
                    side.population.anchor_keys,
                    side.population.positive_keys or side.population.anchor_keys,
                    strict=True,
                )
            )
            for side in sides
        ]
        return "text", texts[0], texts[1]  # type: ignore[return-value]  # lists are invariant
    if all(side.work.corpus.ids is not None for side in sides):
        ids: list[list[Hashable]] = []
        for side in sides:
            of_corpus = side.work.corpus.ids or []
            # A row without an id is no row of the other side.
            ids.append([of_corpus[row] or (side.label, int(row)) for row in side.work.kept_rows])
        return "id", ids[0], ids[1]
    return "vector", list(a.population.anchor_keys), list(b.population.anchor_keys)


def _together(
    size: int, a: _Subject, b: _Subject, common: CommonBatches, checkpoint: Callable[[], None]
) -> tuple[Side, Side]:
    """Measure both sides on common batches, and on those of sub-pools that they have in common."""
    plan = (b if common.larger_is_b else a).plan

    def measured(pool: int, count: int) -> list[Columns]:
        rng = np.random.default_rng([plan.seed, _DRAWS, size, pool + 1])
        drawn = common.draw(plan.batches(size, pool, 0, count), plan.pool_rows(pool), rng)
        seed = [plan.seed, _CHOICE, size, pool + 1]
        return [side.measured(rows, seed, checkpoint) for side, rows in zip((a, b), drawn, strict=True)]

    whole = measured(WHOLE, plan.num_batches(size))
    pool_rows: list[tuple[Rows, Rows]] = []
    pools: list[list[Columns]] = []
    if plan.num_pool_batches(size):
        pool_rows = [common.pools(plan.pool_rows(pool)) for pool in range(SUB_POOLS)]
        if min(len(rows) for both in pool_rows for rows in both) >= size:
            pools = [measured(pool, plan.num_pool_batches(size)) for pool in range(SUB_POOLS)]
    side_a, side_b = (
        subject.side(
            size,
            whole[at],
            None if plan.whole_corpus else [both[at] for both in pools],
            [both[at] for both in pool_rows],
        )
        for at, subject in enumerate((a, b))
    )
    return side_a, side_b


def _apart(size: int, subject: _Subject, seed: int, checkpoint: Callable[[], None]) -> Side:
    """Measure one side on batches of its own."""
    plan = replace(subject.plan, seed=subject.plan.seed + seed)

    def measured(pool: int, count: int) -> Columns:
        rows = plan.batches(size, pool, 0, count)
        return subject.measured(rows, [plan.seed, _CHOICE, size, pool + 1], checkpoint)

    pools = range(SUB_POOLS) if plan.num_pool_batches(size) else range(0)
    return subject.side(
        size,
        measured(WHOLE, plan.num_batches(size)),
        None if plan.whole_corpus else [measured(pool, plan.num_pool_batches(size)) for pool in pools],
        [plan.pool_rows(pool) for pool in pools],
    )


# ------------------------------------------------------------------------------------------------------------ in words


def _verdict(size: int, share: FigureComparison) -> tuple[ComparisonVerdict, str]:
    difference = share.difference
    low, high = difference.low, difference.high
    change = f"S {_signed(difference.value)}"
    if low is None or high is None:
        return ComparisonVerdict.UNDECIDED, f"undecided at N = {size}: {change}, {difference.method}"
    change += " (exact)" if low == high else f" [{_signed(low)}, {_signed(high)}]"
    if max(-low, high) < SMALLEST_SHOWN:
        return ComparisonVerdict.SAME, f"the same at N = {size}: {change}"
    if low > 0:
        return ComparisonVerdict.WORSE, f"B is worse at N = {size}: {change}"
    if high < 0:
        return ComparisonVerdict.BETTER, f"B is better at N = {size}: {change}"
    return ComparisonVerdict.UNDECIDED, f"undecided at N = {size}: {change}"


def _signed(value: float) -> str:
    if abs(value) < SMALLEST_SHOWN:
        return ".000"
    return f"{value:+.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:+.3f}"


_HEADLINES = {
    ComparisonVerdict.WORSE: "B is worse than A",
    ComparisonVerdict.BETTER: "B is better than A",
    ComparisonVerdict.SAME: "both are the same",
    ComparisonVerdict.UNDECIDED: "undecided",
}


def _headline(compared: Sequence[SizeComparison]) -> str:
    said = []
    for verdict, words in _HEADLINES.items():
        sizes = [str(each.batch_size) for each in compared if each.verdict is verdict]
        if sizes:
            said.append(f"{words} at N = {', '.join(sizes)}")
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _warnings(
    a: _Subject, b: _Subject, overlap: RowOverlap, compared: Sequence[SizeComparison]
) -> list[ReportWarning]:
    said: list[ReportWarning] = []

    def warn(code: str, message: str) -> None:
        said.append(ReportWarning(code=code, message=message))

    kinds = [side.work.corpus_info.kind for side in (a, b)]
    if (a.population.positives is None) != (b.population.positives is None):
        warn(
            "kinds_differ",
            f"A has {kinds[0]}, B {kinds[1]}: their anchors are compared with different things, and so are the figures.",
        )
    both = min(overlap.common + overlap.only_a, overlap.common + overlap.only_b)
    if overlap.coupling is CouplingKind.COMMON_ROWS and overlap.common < FEW_COMMON_ROWS * both:
        sampled = "" if a.plan.whole_corpus else ": a sample of each was encoded, which max_rows may enlarge"
        warn(
            "few_common_rows",
            f"Only {overlap.common:,} of {both:,} encoded rows are on both sides{sampled}. The fewer rows the batches share, "
            "the wider the intervals.",
        )
    grouped = [side.population.groups is not None for side in (a, b)]
    if grouped[0] != grouped[1]:
        with_groups, without = ("A", "B") if grouped[0] else ("B", "A")
        warn(
            "evidence_differs",
            f"{with_groups} has groups and {without} has none: what is known about their pairs differs, and S of {without} "
            "is known within bounds only.",
        )
    elif not all(side.shares.setting.complete for side in (a, b)):
        warn(
            "unjudged_pairs",
            "Most pairs are unjudged: the difference in S lies between what the known pairs and the worst case allow.",
        )
    without_interval = [
        str(each.batch_size) for each in compared if each.figures[SHARE].difference.low is None
    ]
    if without_interval:
        warn(
            "no_interval",
            f"The difference in S at N = {', '.join(without_interval)} stands without an interval, and nothing is concluded "
            "from it; encode more rows.",
        )
    return said
