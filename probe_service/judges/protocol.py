"""What a judge is, and how a sheet is answered by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from probe_service.judges.sheet import Answer, Question, Sheet, question_digest
from probe_service.judges.store import LabelStore

__all__ = ["Judge", "Judgement", "answer_sheet"]


@dataclass(frozen=True)
class Judgement:
    """One answer of a judge.

    Args:
        id: Of the question.
        answer: What the judge says.
    """

    id: str
    answer: Answer


class Judge(Protocol):
    """Answers questions one after another, in any order."""

    @property
    def name(self) -> str:
        """Who judges: the same name means the same judge, whose earlier labels may be used again."""
        ...

    def judge(self, questions: Sequence[Question]) -> Iterator[Judgement]:
        """Yield each answer as soon as it is known; may end early, or raise, without harm to those before."""
        ...


def answer_sheet(
    sheet: Sheet,
    judge: Judge,
    *,
    store: LabelStore | None = None,
    normalize: Callable[[str], str] = str,
    fresh: frozenset[str] = frozenset(),
    on_answer: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Let a judge answer what is open in a sheet; every answer is on disk before the next is asked for.

    Args:
        sheet: The sheet; answered questions stay as they are, so that a run that broke off goes on.
        judge: Who answers.
        store: Labels that this judge gave before are taken from here.
        normalize: Form under which two texts are equal.
        fresh: Ids of questions that must be answered anew: checks and repetitions measure the judge as it is now.
        on_answer: Told (answers, questions) after each.

    Returns:
        How many answers came from the store.
    """
    reused = 0
    if store is not None:
        digests = {q.id: question_digest(q, normalize) for q in sheet.open_questions if q.id not in fresh}
        known = store.find(digests.values(), judge.name)
        for id_, digest in digests.items():
            if digest in known:
                sheet.record(id_, known[digest], judge.name)
                reused += 1
    total = len(sheet.questions)
    on_answer(total - len(sheet.open_questions), total)
    for judgement in judge.judge(sheet.open_questions):
        sheet.record(judgement.id, judgement.answer, judge.name)
        on_answer(len(sheet.answers), total)
    return reused
