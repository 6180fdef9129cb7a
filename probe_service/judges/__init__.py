"""Judges: who says of two texts whether one would be accepted as the other's positive.

`Sheet` is the file that is labelled: by hand, in a terminal, by a cross-encoder or by a chat model. It is blind: it holds
texts in random order, neither similarity nor evidence, and hidden checks look like all other questions. Light to import.
"""

from __future__ import annotations

from probe_service.judges.chat import ChatJudge
from probe_service.judges.cross_encoder import CrossEncoderJudge
from probe_service.judges.named import judge_by_name
from probe_service.judges.protocol import Judge, Judgement, answer_sheet
from probe_service.judges.sheet import Answer, Question, Sheet, question_digest
from probe_service.judges.store import LabelStore
from probe_service.judges.terminal import TerminalJudge

__all__ = [
    "Answer",
    "ChatJudge",
    "CrossEncoderJudge",
    "Judge",
    "Judgement",
    "LabelStore",
    "Question",
    "Sheet",
    "TerminalJudge",
    "answer_sheet",
    "judge_by_name",
    "question_digest",
]
