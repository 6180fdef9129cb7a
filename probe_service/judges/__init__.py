"""Judges: who says of two texts whether one would be accepted as the other's positive.

`Sheet` is the file that is labelled: by hand, in a terminal, by a cross-encoder or by a chat model. It is blind: it holds
texts in random order, neither similarity nor evidence, and hidden checks look like all other questions. Light to import;
`judges.named` has those judges that need a model or a server.
"""

from __future__ import annotations

from probe_service.judges.protocol import Judge, Judgement, answer_sheet
from probe_service.judges.sheet import PERSON, Answer, Question, Sheet, question_digest
from probe_service.judges.store import LabelStore

__all__ = [
    "PERSON",
    "Answer",
    "Judge",
    "Judgement",
    "LabelStore",
    "Question",
    "Sheet",
    "answer_sheet",
    "question_digest",
]
