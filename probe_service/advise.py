"""From the figures to advice: verdicts, the safe window, what to change, in words that a newcomer understands."""

from __future__ import annotations

from collections.abc import Sequence

from probe_service.schemas import (
    DEFAULT_BUDGET,
    Advice,
    BatchSizeLimit,
    CorpusInfo,
    CurvePoint,
    DropEffect,
    Estimate,
    EvidenceInfo,
    PaperRule,
    Remedy,
    StarvationFloor,
    Verdict,
    VerdictKind,
)

__all__ = ["advise", "judge", "worst_case_assumption"]

PAPER_THRESHOLDS = (0.7, 0.8, 0.9)
_DEFAULT_BASIS = (
    "the default: in trials on four labelled corpora masking false negatives gained less than a point of MAP up to S = 0.29, "
    "on three of them"
)


def worst_case_assumption(similarity: float | None) -> str:
    """Put into words what an upper limit rests on where pairs are unjudged."""
    if similarity is None:
        return "nothing: every unjudged pair is counted as a false negative"
    return (
        f"rows whose cosine is below {similarity:.2f} do not mean the same; every unjudged pair at or above it was counted "
        "as a false negative"
    )


def judge(batch_size: int, share: Estimate, budget: float, *, complete: bool, assumption: str) -> Verdict:
    """Hold one batch size against the budget (STATISTICS §7).

    Args:
        batch_size: N.
        share: S(N); with incomplete evidence its value is the lower bound and its high the worst case's upper limit.
        budget: Largest acceptable S.
        complete: Whether every pair is judged.
        assumption: What the upper limit rests on if not.

    Returns:
        `fail` if the lower limit is above the budget, `pass` if the upper limit is within it, else `inconclusive`.
    """
    if share.low is None or share.high is None:
        return Verdict(
            batch_size=batch_size,
            verdict=VerdictKind.INCONCLUSIVE,
            reason=f"S is about {share.value:.3g}, but {share.method}; encode more rows",
        )
    if share.low > budget:
        floor = "" if complete else ", from pairs that are certain alone"
        return Verdict(
            batch_size=batch_size,
            verdict=VerdictKind.FAIL,
            reason=f"S is at least {share.low:.3g}{floor}, above the budget of {budget:g}",
        )
    if share.high <= budget:
        return Verdict(
            batch_size=batch_size,
            verdict=VerdictKind.PASS,
            reason=f"S is at most {share.high:.3g}, within the budget of {budget:g}",
            assumption=None if complete else assumption,
        )
    if complete:
        reason = (
            f"S lies between {share.low:.3g} and {share.high:.3g}, and the budget of {budget:g} lies in between; "
            "more repeats narrow it"
        )
    else:
        reason = (
            f"the certain pairs alone give S ≥ {share.low:.3g}, the worst case S ≤ {share.high:.3g}, and the budget of "
            f"{budget:g} lies in between; labels for the unjudged pairs would decide"
        )
    return Verdict(batch_size=batch_size, verdict=VerdictKind.INCONCLUSIVE, reason=reason)


def advise(
    curve: Sequence[CurvePoint],
    n_max: BatchSizeLimit,
    drop: DropEffect | None,
    corpus: CorpusInfo,
    evidence: EvidenceInfo,
    *,
    budget: float,
    complete: bool,
    assumption: str,
    remedies: list[Remedy],
    starvation_floor: StarvationFloor | None,
    snippet: str | None,
) -> Advice:
    """Judge every size of the curve and say what it means.

    Args:
        curve: One point a batch size, in ascending order.
        n_max: The largest size within the budget.
        drop: Effect of dropping repeated rows, if there are any.
        corpus: What was read.
        evidence: What is known about the pairs.
        budget: Largest acceptable S.
        complete: Whether every pair is judged.
        assumption: What upper limits rest on if not.
        remedies: What may be changed.
        starvation_floor: The lower end of the window, where there is an s⁺.
        snippet: Training arguments at the largest safe batch.
    """
    verdicts = [
        judge(
            point.batch_size,
            point.false_negative_softmax_share,
            budget,
            complete=complete,
            assumption=assumption,
        )
        for point in curve
        if point.false_negative_softmax_share is not None
    ]
    return Advice(
        budget=budget,
        budget_basis=_DEFAULT_BASIS if budget == DEFAULT_BUDGET else "given with the request",
        headline=_headline(verdicts, n_max, budget),
        explanation=_explanation(curve, n_max, drop, corpus, evidence, budget, complete=complete),
        n_max=n_max,
        verdicts=verdicts,
        drop_duplicates=drop,
        remedies=remedies,
        starvation_floor=starvation_floor,
        trade_off=_trade_off(curve, n_max, starvation_floor, complete=complete),
        snippet=snippet,
        paper_rule=[PaperRule(threshold=t, batch_size=_paper_size(curve, t)) for t in PAPER_THRESHOLDS],
    )


def _headline(verdicts: Sequence[Verdict], n_max: BatchSizeLimit, budget: float) -> str:
    if n_max.value is not None:
        if n_max.exceeded:
            return (
                f"Batches of up to {n_max.value} rows keep false negatives within the budget of {budget:g}."
            )
        return f"No batch size up to {n_max.tested_up_to} rows exceeds the budget of {budget:g}."
    if any(v.verdict is VerdictKind.FAIL for v in verdicts):
        failing = min(v.batch_size for v in verdicts if v.verdict is VerdictKind.FAIL)
        if failing == verdicts[0].batch_size:
            return f"Every batch size measured exceeds the budget of {budget:g}, from {failing} rows on."
        return (
            f"Batches of {failing} rows exceed the budget of {budget:g}; no smaller size is shown to be safe."
        )
    return f"The rows alone cannot tell whether a batch keeps within the budget of {budget:g}."


def _explanation(
    curve: Sequence[CurvePoint],
    n_max: BatchSizeLimit,
    drop: DropEffect | None,
    corpus: CorpusInfo,
    evidence: EvidenceInfo,
    budget: float,
    *,
    complete: bool,
) -> list[str]:
    said = [
        "A false negative is a row that contrastive training pushes away from an anchor although it means the same. "
        f"S(N) is the share of that push that lands on such rows in a batch of N; the budget allows {budget:g}.",
        n_max.reason[0].upper() + n_max.reason[1:] + ".",
        evidence.description,
    ]
    last = curve[-1].false_negative_softmax_share
    if last is not None and last.low is not None and last.high is not None:
        said.append(
            f"At {curve[-1].batch_size} rows S is between {last.low:.3f} and {last.high:.3f}"
            + (", with 95 % confidence." if complete else ": certain pairs below, the worst case above.")
        )
    if corpus.duplicates.normalized:
        plural = "row repeats" if corpus.duplicates.normalized == 1 else "rows repeat"
        said.append(f"{corpus.duplicates.normalized} {plural} an earlier row, apart from white space.")
    if drop is not None and drop.n_max_after is not None:
        said.append(_drop_sentence(n_max, drop))
    if not complete:
        said.append(
            "Without a judgement of every pair a rising similarity curve proves nothing: give a group column, or labels "
            "for a sample of pairs."
        )
    return said


def _trade_off(
    curve: Sequence[CurvePoint],
    n_max: BatchSizeLimit,
    floor: StarvationFloor | None,
    *,
    complete: bool,
) -> list[str]:
    """What a larger batch costs and what it brings, from the smallest to the largest size and round the limit."""
    first, last = curve[0], curve[-1]
    said = []
    if first.batch_size < last.batch_size:
        of_known = "" if complete else " (of the known pairs)"
        before, after = first.false_negative_softmax_share, last.false_negative_softmax_share
        if before is not None and after is not None:
            said.append(
                f"Cost: from {first.batch_size} to {last.batch_size} rows the share of the push on false negatives{of_known} "
                f"goes from {before.value:.3f} to {after.value:.3f}."
            )
        said.append(
            f"Gain: the negatives that an anchor effectively learns from go from {first.effective_negatives.value:.1f} to "
            f"{last.effective_negatives.value:.1f}, and the hardest of them from a similarity of "
            f"{first.hardest_negative.value:.2f} to {last.hardest_negative.value:.2f}."
        )
    if n_max.value is not None and n_max.exceeded:
        beyond = next((point for point in curve if point.batch_size > n_max.value), None)
        within = [point for point in curve if point.batch_size <= n_max.value]
        if beyond is not None and within:
            gain = beyond.effective_negatives.value / within[-1].effective_negatives.value
            said.append(
                f"Going from {within[-1].batch_size} to {beyond.batch_size} rows, past the limit, would bring {gain:.2g} "
                "times as many effective negatives; what that is worth, a trial tells."
            )
    if floor is not None:
        said.append(floor.reason[0].upper() + floor.reason[1:] + ".")
    return said


def _drop_sentence(n_max: BatchSizeLimit, drop: DropEffect) -> str:
    def size(limit: BatchSizeLimit) -> str:
        if limit.value is None:
            return "no batch size"
        return f"{limit.value}" if limit.exceeded else f"at least {limit.value}"

    assert drop.n_max_after is not None
    count = len(drop.rows_to_drop)
    rows = "the repeated row" if count == 1 else f"the {count} repeated rows"
    before, after = size(n_max), size(drop.n_max_after)
    if before == after:
        return f"Dropping {rows} leaves the largest safe batch at {before}."
    return f"Dropping {rows} moves the largest safe batch from {before} to {after}."


def _paper_size(curve: Sequence[CurvePoint], threshold: float) -> int | None:
    within = [p.batch_size for p in curve if p.top_k_mean is not None and p.top_k_mean.value <= threshold]
    return max(within, default=None)
