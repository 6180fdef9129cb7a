"""An audit on disk: both halves, the answers so far, and the report once there is one. Light."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from probe_service.audit.applying import apply_audit, check_questions, normalizer
from probe_service.audit.record import Audit, ItemKind
from probe_service.errors import InputError
from probe_service.judges import Answer, LabelStore, Question, Sheet, question_digest
from probe_service.schemas import AuditAnswer, AuditCounts, AuditQuestion, AuditQuestionPage, AuditReport
from probe_service.store import storage_errors

__all__ = ["AuditFolder"]


class AuditFolder:
    """One audit and its labels; several threads and processes may use the same folder.

    ::

        audit.json     the private half
        pairs.jsonl    the sheet, with every answer from the moment it is given; it appears last
        report.json    what the answers mean, until one of them changes
        lock           held while answers change

    Args:
        folder: Made if it is not there.
        home: Where the labels of all audits are kept.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self._home = home
        self._sheet_file = folder / "pairs.jsonl"
        self._report_file = folder / "report.json"

    @property
    def is_drawn(self) -> bool:
        """Whether there is something to label."""
        return self._sheet_file.exists()

    def put(self, audit: Audit, questions: Sequence[Question], *, judge: str) -> None:
        """Keep a drawn audit, answered as far as the judge has answered pairs of the same texts before.

        Checks and repeats measure the judge as it is now, so they are always asked anew.

        Raises:
            ServiceError: storage_failed.
        """
        with storage_errors("Keeping the audit"):
            self.folder.mkdir(parents=True, exist_ok=True)
        audit.save(self.folder / "audit.json")
        normalize, fresh = normalizer(audit), audit.checks_and_repeats
        digests = {q.id: question_digest(q, normalize) for q in questions if q.id not in fresh}
        known = LabelStore.of_home(self._home).find(digests.values(), judge)
        answers = {id_: (known[digest], judge) for id_, digest in digests.items() if digest in known}
        Sheet(self._sheet_file, questions, answers).write()

    def audit(self) -> Audit:
        """Return the private half."""
        return Audit.read(self.folder / "audit.json")

    def sheet(self) -> Sheet:
        """Return the blind half with the answers so far."""
        return Sheet.read(self._sheet_file)

    def counts(self) -> AuditCounts:
        """Return how many questions are answered."""
        return _counts(self.sheet())

    def questions(self, *, offset: int, limit: int, open_only: bool) -> AuditQuestionPage:
        """Return some questions in the order of the sheet.

        Args:
            offset: Places of the sheet to skip, answered or not, so that pages do not shift while answers come in.
            limit: Questions to return, at most.
            open_only: Leave out those that are answered.
        """
        sheet = self.sheet()
        answers, judges = sheet.answers, sheet.judges
        found = [
            AuditQuestion(
                id=question.id,
                number=number,
                anchor=question.anchor,
                positive=question.positive,
                candidate=question.candidate,
                answer=answers[question.id].value if question.id in answers else None,
                judge=judges.get(question.id),
            )
            for number, question in islice(enumerate(sheet.questions, start=1), offset, None)
            if not (open_only and question.id in answers)
        ]
        return AuditQuestionPage(
            questions=found[:limit],
            counts=_counts(sheet),
            next_offset=found[limit - 1].number if len(found) > limit else None,
        )

    def answer(self, answers: Sequence[AuditAnswer]) -> AuditCounts:
        """Keep answers at once, all or none; a later answer to a question replaces an earlier one.

        Answers to drawn pairs are also kept by their texts, for later audits of this or a grown corpus.

        Raises:
            InputError: audit_labels_foreign, with its place in the list, for a question that was not drawn.
            ServiceError: storage_failed.
        """
        with self._locked():
            audit, sheet = self.audit(), self.sheet()
            items = {item.id: item for item in audit.items}
            foreign = [place for place, given in enumerate(answers, start=1) if given.id not in items]
            if foreign:
                raise InputError(
                    "audit_labels_foreign",
                    "The labels belong to other pairs: this audit did not draw the question"
                    f" {answers[foreign[0] - 1].id[:80]!r}. Nothing was kept.",
                    row=foreign[0],
                    column="id",
                    count=len(foreign),
                )
            if answers:
                given_by_id = {given.id: (Answer(given.answer), given.judge) for given in answers}
                drawn = {
                    items[id_].digest: given
                    for id_, given in given_by_id.items()
                    if items[id_].kind is ItemKind.PAIR
                }
                LabelStore.of_home(self._home).keep(drawn, audit.corpus_sha256)
                with storage_errors("Keeping the labels"):
                    self._report_file.unlink(missing_ok=True)
                sheet.record_all(given_by_id)
            return _counts(sheet)

    def answer_by_sheet(self, filled: Sheet) -> AuditCounts:
        """Keep the answers of a sheet that was filled elsewhere; questions without a label stay as they are.

        Raises:
            InputError: audit_labels_foreign where it holds other questions or other texts.
            ServiceError: storage_failed.
        """
        check_questions(self.audit(), filled)
        judges = filled.judges
        return self.answer(
            [
                AuditAnswer(id=id_, answer=answer.value, judge=judges[id_])
                for id_, answer in filled.answers.items()
            ]
        )

    def report(self) -> AuditReport:
        """Return S at every size and n_max, made once for the same answers: it may take seconds.

        Raises:
            InputError: audit_labels_incomplete.
            ServiceError: storage_failed.
        """
        with self._locked():
            if self._report_file.exists():
                return AuditReport.model_validate_json(self._report_file.read_bytes())
            report = apply_audit(self.audit(), self.sheet())
            partial = self._report_file.with_suffix(".partial")
            partial.write_text(report.model_dump_json(), encoding="utf-8")
            partial.replace(self._report_file)
            return report

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with storage_errors("Keeping the labels"), (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _counts(sheet: Sheet) -> AuditCounts:
    questions, left = len(sheet.questions), len(sheet.open_questions)
    return AuditCounts(questions=questions, answered=questions - left, open=left)
