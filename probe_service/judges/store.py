"""Labels outlive the corpus that they were drawn from: kept by the texts that were shown."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from probe_service.errors import ServiceError
from probe_service.judges.sheet import Answer

__all__ = ["LabelStore"]

_BUSY_SECONDS = 60.0
_DIGESTS_PER_QUERY = 500
_SCHEMA = """
CREATE TABLE IF NOT EXISTS labels (
    question_digest TEXT NOT NULL,
    judge TEXT NOT NULL,
    answer TEXT NOT NULL,
    corpus_sha256 TEXT NOT NULL,
    labelled_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
    PRIMARY KEY (question_digest, judge)
);
"""


class LabelStore:
    """Labels by question and judge, in one SQLite file that several processes may share.

    Args:
        file: Made if it is not there.

    Raises:
        ServiceError: storage_failed.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        with self._connection() as connection:
            connection.executescript(_SCHEMA)

    @classmethod
    def of_home(cls, home: Path) -> LabelStore:
        """Return the labels of a home folder, which the service and the command line share."""
        return cls(home / "labels.sqlite")

    def find(self, question_digests: Iterable[str], judge: str) -> dict[str, Answer]:
        """Return what this judge answered to these questions, on whatever corpus.

        Raises:
            ServiceError: storage_failed.
        """
        wanted = sorted(set(question_digests))
        found: dict[str, Answer] = {}
        with self._connection() as connection:
            for start in range(0, len(wanted), _DIGESTS_PER_QUERY):
                part = wanted[start : start + _DIGESTS_PER_QUERY]
                marks = ",".join("?" * len(part))
                rows = connection.execute(
                    f"SELECT question_digest, answer FROM labels WHERE judge = ? AND question_digest IN ({marks})",  # noqa: S608
                    [judge, *part],
                )
                found |= {digest: Answer(answer) for digest, answer in rows}
        return found

    def keep(self, answers: Mapping[str, tuple[Answer, str]], corpus_sha256: str) -> None:
        """Keep answers; a later answer of the same judge replaces an earlier one.

        Args:
            answers: By question digest: the answer and its judge.
            corpus_sha256: Content hash of the corpus that they were drawn from.

        Raises:
            ServiceError: storage_failed.
        """
        with self._connection() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO labels (question_digest, judge, answer, corpus_sha256) VALUES (?, ?, ?, ?)",
                [(digest, judge, answer.value, corpus_sha256) for digest, (answer, judge) in answers.items()],
            )

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self._file, timeout=_BUSY_SECONDS)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        try:
            with connection:
                yield connection
        except sqlite3.Error as error:
            raise self._failed(error) from error
        finally:
            connection.close()

    def _failed(self, fault: object) -> ServiceError:
        return ServiceError("storage_failed", f"The labels in {self._file} cannot be used: {fault}.")
