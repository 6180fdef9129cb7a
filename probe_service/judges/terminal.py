"""A person at a terminal as judge: one key a pair."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

import click

from probe_service.judges.protocol import Judgement
from probe_service.judges.sheet import PERSON, QUESTION, Answer, Question
from probe_service.visible_text import visible_text

__all__ = ["TerminalJudge"]

_KEYS = {"y": Answer.YES, "n": Answer.NO, "u": Answer.UNSURE, "?": Answer.UNSURE}
_WIDTH = 100


class TerminalJudge:
    """Shows one question after another; y, n, u answer, b goes back to the one before, q quits.

    Args:
        read_key: Returns one key press; click's by default.
        say: Prints.
    """

    def __init__(
        self,
        read_key: Callable[[], str] = click.getchar,
        say: Callable[[str], None] = click.echo,
    ) -> None:
        self._read_key, self._say = read_key, say

    @property
    def name(self) -> str:
        """The same as for labels that are written into the file by hand."""
        return PERSON

    def judge(self, questions: Sequence[Question]) -> Iterator[Judgement]:
        """Yield one answer a key; ends at q, at the end of input, or with the last question."""
        self._say(f"{QUESTION}  y yes, n no, u unsure, b back, q quit (what is answered is kept)")
        place = 0
        while place < len(questions):
            self._show(questions[place], f"{place + 1}/{len(questions)}")
            key = self._key()
            if key == "q":
                return
            if key == "b":
                place = max(0, place - 1)
                continue
            yield Judgement(questions[place].id, _KEYS[key])
            place += 1

    def _key(self) -> str:
        while True:
            try:
                key = self._read_key().lower()
            except (EOFError, KeyboardInterrupt):
                return "q"
            if key in ("", "\x03", "\x04"):
                return "q"
            if key in _KEYS or key in ("b", "q"):
                return key
            self._say("y, n, u, b or q")

    def _show(self, question: Question, progress: str) -> None:
        self._say("")
        self._say(f"[{progress}]")
        shown = [
            ("A", question.anchor),
            ("known positive of A", question.positive),
            ("B", question.candidate),
        ]
        for role, text in shown:
            if text is not None:
                self._say(
                    textwrap.fill(
                        visible_text(text), _WIDTH, initial_indent=f"{role}: ", subsequent_indent="   "
                    )
                )
