"""The sheet: a jsonl or csv file of questions, blind and shuffled, in which every answer is kept at once."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from probe_service.errors import InputError, ServiceError

__all__ = ["PERSON", "QUESTION", "Answer", "Question", "Sheet", "question_digest"]

QUESTION = "Would you accept B as a positive for A?"
"""Asked of every pair: the definition of a false negative, in the judge's words."""

PERSON = "person"
"""Judge of answers that are written into the file by hand or given at the terminal."""

_COLUMNS = ("id", "question", "a", "known_positive_of_a", "b", "label", "judge")


class Answer(StrEnum):
    """What a judge says of one question."""

    YES = "yes"
    """B would be accepted as a positive for A: as a negative it is false."""
    NO = "no"
    """B means something else."""
    UNSURE = "unsure"
    """Nobody can tell; it widens the interval to both."""


_SPELLINGS = {
    **dict.fromkeys(("yes", "y", "true", "1"), Answer.YES),
    **dict.fromkeys(("no", "n", "false", "0"), Answer.NO),
    **dict.fromkeys(("unsure", "u", "?", "maybe"), Answer.UNSURE),
}


@dataclass(frozen=True)
class Question:
    """One question of a sheet.

    Args:
        id: Opaque; says nothing of what is asked.
        anchor: A.
        positive: The known positive of A, which shows what "positive" means here; None for sentences.
        candidate: B.
    """

    id: str
    anchor: str
    positive: str | None
    candidate: str


def question_digest(question: Question, normalize: Callable[[str], str]) -> str:
    """Return the identity of what is asked: of two sentences in either order, or of anchor, positive and candidate.

    Args:
        question: The question; its id plays no part.
        normalize: Form under which two texts are equal.
    """
    texts = [normalize(question.anchor), normalize(question.candidate)]
    if question.positive is None:
        texts.sort()
    else:
        texts.append(normalize(question.positive))
    return hashlib.sha256(json.dumps(texts, ensure_ascii=True).encode()).hexdigest()


class Sheet:
    """A file of questions and the answers so far; it is rewritten whole, and at once, with every answer.

    Args:
        file: Ends in .jsonl or .csv.
        questions: In the order of the file; ids are unique.
        answers: By question id: the answer and its judge.
    """

    def __init__(
        self, file: Path, questions: Sequence[Question], answers: dict[str, tuple[Answer, str]]
    ) -> None:
        self.file = file
        self.questions = tuple(questions)
        self._answers = dict(answers)

    @classmethod
    def read(cls, file: Path) -> Sheet:
        """Read a sheet; a blank label is no answer yet.

        Raises:
            InputError: audit_sheet_unreadable; audit_label_unknown for a label that is none of yes, no, unsure;
                audit_labels_foreign where two rows have one id.
        """
        try:
            content = file.read_bytes()
        except OSError as error:
            raise InputError(
                "audit_sheet_unreadable", f"{file} cannot be opened ({error.strerror})."
            ) from error
        return cls.parse(file, content)

    @classmethod
    def parse(cls, file: Path, content: bytes) -> Sheet:
        """Read a sheet from bytes that need not lie in the file yet.

        Raises:
            InputError: As of `read`.
        """
        questions: list[Question] = []
        answers: dict[str, tuple[Answer, str]] = {}
        seen: set[str] = set()
        for number, row in _rows(file, content):
            question = Question(row["id"], row["a"], row.get("known_positive_of_a") or None, row["b"])
            if question.id in seen:
                raise InputError(
                    "audit_labels_foreign",
                    f"{file} holds the question {question.id} twice; label the file that was drawn, not a joined one.",
                    row=number,
                )
            seen.add(question.id)
            questions.append(question)
            label = row.get("label", "").strip().casefold()
            if label:
                if label not in _SPELLINGS:
                    raise InputError(
                        "audit_label_unknown",
                        f"{file}: the label {row['label']!r} is none of yes, no, unsure.",
                        row=number,
                        column="label",
                    )
                answers[question.id] = (_SPELLINGS[label], row.get("judge") or PERSON)
        if not questions:
            raise InputError("audit_sheet_unreadable", f"{file} holds no question; draw the pairs again.")
        return cls(file, questions, answers)

    @property
    def answers(self) -> dict[str, Answer]:
        """The answers so far, by question id."""
        return {key: answer for key, (answer, _) in self._answers.items()}

    @property
    def judges(self) -> dict[str, str]:
        """Who gave each answer, by question id."""
        return {key: judge for key, (_, judge) in self._answers.items()}

    @property
    def open_questions(self) -> list[Question]:
        """Questions without an answer, in order."""
        return [question for question in self.questions if question.id not in self._answers]

    def record(self, id: str, answer: Answer, judge: str) -> None:  # noqa: A002 - the file's own word
        """Keep an answer, on disk, before anything else happens.

        Raises:
            KeyError: The sheet has no such question.
            ServiceError: storage_failed.
        """
        self.record_all({id: (answer, judge)})

    def record_all(self, answers: Mapping[str, tuple[Answer, str]]) -> None:
        """Keep several answers, with their judges, by question id: all of them or, at an error, none.

        Raises:
            KeyError: The sheet has no such question.
            ServiceError: storage_failed.
        """
        for id_ in answers.keys() - {question.id for question in self.questions}:
            raise KeyError(id_)
        self._answers |= answers
        self.write()

    def content(self, suffix: str) -> bytes:
        """Return the sheet as the content of a file.

        Args:
            suffix: ``.jsonl`` or ``.csv``.
        """
        rows = [
            (
                question.id,
                QUESTION,
                question.anchor,
                question.positive,
                question.candidate,
                *(self._answers.get(question.id) or (None, None)),
            )
            for question in self.questions
        ]
        return _csv(rows) if suffix == ".csv" else _jsonl(rows)

    def write(self) -> None:
        """Write the file beside itself, then put it in place.

        Raises:
            ServiceError: storage_failed.
        """
        partial = self.file.with_name(f"{self.file.name}.partial-{os.getpid()}")
        try:
            partial.write_bytes(self.content(".csv" if _is_csv(self.file) else ".jsonl"))
            partial.replace(self.file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ServiceError(
                "storage_failed", f"{self.file} cannot be written: {error.strerror}."
            ) from error


def _is_csv(file: Path) -> bool:
    suffix = file.suffix.lower()
    if suffix not in (".jsonl", ".csv"):
        raise InputError("audit_sheet_unreadable", f"{file.name!r} does not end in .jsonl or .csv.")
    return suffix == ".csv"


def _jsonl(rows: list[tuple[str | None, ...]]) -> bytes:
    # Escaped: whatever a text holds, half a surrogate pair included, one line stays one question.
    return "".join(json.dumps(dict(zip(_COLUMNS, row, strict=True))) + "\n" for row in rows).encode()


def _csv(rows: list[tuple[str | None, ...]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    writer.writerows([["" if value is None else _as_cell(value) for value in row] for row in rows])
    # With a mark at its start, spreadsheets read UTF-8 as such.
    return text.getvalue().encode("utf-8-sig", "surrogatepass")


_FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""What a spreadsheet would take for a formula: it would run it, and save its result in place of the text."""


def _as_cell(text: str) -> str:
    return f"'{text}" if _FORMULA.match(text) else text


def _from_cell(text: str) -> str:
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def _rows(file: Path, content: bytes) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (row number from 1, columns as texts)."""
    is_csv = _is_csv(file)
    try:
        text = content.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InputError(
            "audit_sheet_unreadable", f"{file} is not UTF-8; save it as UTF-8 and try again."
        ) from error
    try:
        yield from _csv_rows(text) if is_csv else _jsonl_rows(text)
    except (ValueError, csv.Error, KeyError, AttributeError) as error:
        raise InputError(
            "audit_sheet_unreadable",
            f"{file} is no sheet of questions ({type(error).__name__}: {error}); columns {', '.join(_COLUMNS[:-1])} are needed.",
        ) from error


def _csv_rows(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    # Spreadsheets of some countries save semicolons or tabs.
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    for number, row in enumerate(reader, start=1):
        yield (
            number,
            _needed({key: _from_cell(value or "") for key, value in row.items() if isinstance(key, str)}),
        )


def _jsonl_rows(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = json.loads(line)
            yield number, _needed({key: _label_text(value) for key, value in row.items()})


def _label_text(value: object) -> str:
    """Return a JSON value as the text that a csv would hold: labels are also written true, 1 or null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _needed(row: dict[str, str]) -> dict[str, str]:
    missing = [column for column in ("id", "a", "b") if column not in row]
    if missing:
        raise KeyError(missing[0])
    return row
