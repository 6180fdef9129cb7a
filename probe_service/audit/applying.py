"""From an answered sheet to S(N) with intervals, verdicts and what the hidden checks tell of the judge."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from probe_service.advise import judge as hold_against_budget
from probe_service.audit.record import Audit, AuditItem, ItemKind
from probe_service.corpus.equality import normalize_text
from probe_service.errors import InputError
from probe_service.estimate.audit import CheckCounts, audited_limit, audited_share, judged_between
from probe_service.judges import Answer, LabelStore, Sheet, question_digest
from probe_service.schemas import (
    CONFIDENCE_LEVEL,
    AuditedShare,
    AuditLabels,
    AuditReport,
    ReportWarning,
    Verdict,
    VerdictKind,
)

__all__ = ["apply_audit", "check_questions", "keep_labels", "normalizer"]

_VALUES = {Answer.YES: 1.0, Answer.NO: 0.0, Answer.UNSURE: np.nan}
_STREAM = 9_001


def normalizer(audit: Audit) -> Callable[[str], str]:
    """Return the form under which the audit holds two texts for equal."""
    return partial(normalize_text, case_fold=audit.request.corpus.case_fold)


def apply_audit(
    audit: Audit, sheet: Sheet, *, corpus_sha256: str | None = None, budget: float | None = None
) -> AuditReport:
    """Estimate S at every size of the audit, and n_max, from an answered sheet.

    Args:
        audit: The private half.
        sheet: The answered half.
        corpus_sha256: Content hash of the corpus that the answer is wanted for; None: not checked.
        budget: Largest acceptable S; None: that of the draw.

    Raises:
        InputError: audit_corpus_changed; audit_labels_foreign where the sheet holds other questions or other texts;
            audit_labels_incomplete where questions or answers are missing.
    """
    if corpus_sha256 not in (None, audit.corpus_sha256):
        raise InputError(
            "audit_corpus_changed",
            "The corpus is not the one that the pairs were drawn from. Draw again: labels that were applied before are "
            "used again for the same texts.",
        )
    budget = audit.request.budget if budget is None else budget
    _check_sheet(audit, sheet)
    answers = sheet.answers
    labels = _labels(audit, answers)
    drawn = np.full(len(audit.design.pairs), np.nan)
    for item in _of_kind(audit, ItemKind.PAIR):
        drawn[list(item.draws)] = _VALUES[answers[item.id]]
    checks = _check_counts(audit, answers)
    rng = np.random.default_rng([audit.request.seed, _STREAM])
    shares = [
        audited_share(
            audit.design,
            size,
            drawn,
            judged_between(audit.judged, size),
            checks,
            level=CONFIDENCE_LEVEL,
            rng=rng,
        )
        for size in audit.design.drawn_sizes
    ]
    n_max = None
    if audit.design.sizes[0] == 2:
        n_max = audited_limit(
            audit.design, drawn, audit.judged, checks, budget=budget, level=CONFIDENCE_LEVEL, rng=rng
        )
    return AuditReport(
        audit=audit.id,
        corpus_sha256=audit.corpus_sha256,
        encoder=audit.encoder,
        temperature=audit.design.temperature,
        confidence_level=CONFIDENCE_LEVEL,
        judges=sorted(set(sheet.judges.values())),
        labels=labels,
        shares=shares,
        n_max=n_max,
        verdicts=[_verdict(share, budget) for share in shares],
        warnings=_warnings(audit, sheet, labels),
    )


def keep_labels(audit: Audit, sheet: Sheet, store: LabelStore) -> int:
    """Keep the answers to drawn pairs for later audits of this or a grown corpus; returns how many.

    Raises:
        InputError: audit_labels_foreign.
        ServiceError: storage_failed.
    """
    check_questions(audit, sheet)
    answers, judges = sheet.answers, sheet.judges
    kept = {
        item.digest: (answers[item.id], judges[item.id])
        for item in _of_kind(audit, ItemKind.PAIR)
        if item.id in answers
    }
    store.keep(kept, audit.corpus_sha256)
    return len(kept)


def check_questions(audit: Audit, sheet: Sheet) -> None:
    """Refuse a sheet with other questions or other texts than were drawn.

    Raises:
        InputError: audit_labels_foreign.
    """
    digests = {item.id: item.digest for item in audit.items}
    normalize = normalizer(audit)
    foreign = [
        number
        for number, question in enumerate(sheet.questions, start=1)
        if digests.get(question.id) != question_digest(question, normalize)
    ]
    if foreign:
        raise InputError(
            "audit_labels_foreign",
            "The labels belong to other pairs: a question of this file was not drawn by this audit, or its texts were "
            "changed. Label the sheet that was drawn, and leave all columns but the label as they are.",
            row=foreign[0],
            count=len(foreign),
        )


def _of_kind(audit: Audit, kind: ItemKind) -> list[AuditItem]:
    return [item for item in audit.items if item.kind is kind]


def _check_sheet(audit: Audit, sheet: Sheet) -> None:
    check_questions(audit, sheet)
    missing = len(audit.items) - len(sheet.questions)
    unanswered = len(sheet.open_questions)
    if missing or unanswered:
        said = [
            *([f"{missing} questions were left out"] if missing else []),
            *([f"{unanswered} of {len(sheet.questions)} have no label yet"] if unanswered else []),
        ]
        raise InputError(
            "audit_labels_incomplete",
            f"Of {len(audit.items)} questions {' and '.join(said)}. Pairs that were skipped are not like the others, so the "
            "rest proves nothing; label them (unsure is an answer, too) and apply again.",
            count=missing + unanswered,
        )


def _check_counts(audit: Audit, answers: dict[str, Answer]) -> CheckCounts:
    def count(kind: ItemKind, answer: Answer) -> int:
        return sum(answers[item.id] is answer for item in _of_kind(audit, kind))

    return CheckCounts(
        duplicates=len(_of_kind(audit, ItemKind.DUPLICATE)),
        duplicates_accepted=count(ItemKind.DUPLICATE, Answer.YES),
        duplicates_unsure=count(ItemKind.DUPLICATE, Answer.UNSURE),
        others=len(_of_kind(audit, ItemKind.OTHER)),
        others_accepted=count(ItemKind.OTHER, Answer.YES),
        others_unsure=count(ItemKind.OTHER, Answer.UNSURE),
    )


def _labels(audit: Audit, answers: dict[str, Answer]) -> AuditLabels:
    pairs, repeats = _of_kind(audit, ItemKind.PAIR), _of_kind(audit, ItemKind.REPEAT)
    given = [answers[item.id] for item in pairs]
    checks = _check_counts(audit, answers)
    certain = {ItemKind.DUPLICATE: Answer.NO, ItemKind.OTHER: Answer.YES}
    return AuditLabels(
        pairs_drawn=len(audit.design.pairs),
        questions=len(pairs),
        yes=given.count(Answer.YES),
        no=given.count(Answer.NO),
        unsure=given.count(Answer.UNSURE),
        repeats=len(repeats),
        repeats_answered_differently=sum(
            answers[item.id] is not answers[item.repeats] for item in repeats if item.repeats
        ),
        duplicates=checks.duplicates,
        duplicates_accepted=checks.duplicates_accepted,
        others=checks.others,
        others_accepted=checks.others_accepted,
        contradictions=[item.id for item in audit.items if certain.get(item.kind) is answers[item.id]],
    )


def _verdict(share: AuditedShare, budget: float) -> Verdict:
    if share.estimate is None:
        return Verdict(
            batch_size=share.batch_size, verdict=VerdictKind.INCONCLUSIVE, reason=share.reason or ""
        )
    verdict = hold_against_budget(share.batch_size, share.estimate, budget, complete=True, assumption="")
    if verdict.verdict is not VerdictKind.INCONCLUSIVE:
        return verdict
    return verdict.model_copy(
        update={
            "reason": f"S lies between {share.estimate.low:.3g} and {share.estimate.high:.3g}, and the budget of {budget:g} "
            "lies in between; more labels narrow it"
        }
    )


def _warnings(audit: Audit, sheet: Sheet, labels: AuditLabels) -> list[ReportWarning]:
    said: list[ReportWarning] = []

    def warn(code: str, message: str) -> None:
        said.append(ReportWarning(code=code, message=message))

    if labels.unsure == labels.questions:
        warn(
            "audit_all_unsure",
            "Every answer is unsure: the labels say nothing, and S may be anything between what is known and all.",
        )
    if labels.contradictions:
        warn(
            "audit_labels_contradict_evidence",
            f"{len(labels.contradictions)} answers contradict what is certain ({labels.duplicates_accepted} of "
            f"{labels.duplicates} certain duplicates and {labels.others_accepted} of {labels.others} certain others were "
            "accepted). S is corrected for it, and its interval wider.",
        )
    if labels.repeats_answered_differently:
        warn(
            "audit_repeats_differ",
            f"{labels.repeats_answered_differently} of {labels.repeats} questions asked twice were answered differently; "
            "the first answer counts.",
        )
    pair_ids = {item.id for item in _of_kind(audit, ItemKind.PAIR)}
    judges = sorted({judge for key, judge in sheet.judges.items() if key in pair_ids})
    if len(judges) > 1:
        warn(
            "audit_several_judges",
            f"The labels come from {', '.join(judges)}; the hidden checks measure them together.",
        )
    return said
