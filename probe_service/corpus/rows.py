"""From records to usable rows: what is a text, what is left out and why, what means the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from probe_service.corpus.equality import ROWS_LISTED, normalize_texts
from probe_service.corpus.faults import Faults
from probe_service.corpus.records import RecordBatch
from probe_service.corpus.roles import Roles
from probe_service.errors import CorpusError
from probe_service.schemas import ExcludedRows

__all__ = ["Row", "RowReader", "UsableRows"]

Reason = Literal["blank", "null", "not_a_string", "zero_vector", "non_finite_vector"]

NO_SOURCE = "(none)"
"""Source of the rows that name none."""


class Row(NamedTuple):
    """One usable row: a plain tuple, since millions of them pass."""

    number: int
    anchor: str | None
    positive: str | None
    negatives: list[str] | None
    vector: np.ndarray | None
    id: str | None
    group: str | None
    source: str | None


@dataclass(frozen=True)
class UsableRows:
    """The usable rows of one batch, by column; each column has length b, or is None if the corpus has no such part.

    Args:
        numbers: int64 (b,).
        normalized: Anchors, normalised; `positives_normalized` likewise.
        vectors: float32 (b, d).
    """

    numbers: np.ndarray
    anchors: list[str] | None
    normalized: list[str] | None
    positives: list[str] | None
    positives_normalized: list[str] | None
    negatives: list[list[str]] | None
    vectors: np.ndarray | None
    ids: list[str] | None
    groups: list[str | None] | None
    sources: list[str] | None

    def row(self, place: int) -> Row:
        """Return one of them; its vector is a copy, so that the batch can go."""
        return Row(
            int(self.numbers[place]),
            None if self.anchors is None else self.anchors[place],
            None if self.positives is None else self.positives[place],
            None if self.negatives is None else self.negatives[place],
            None if self.vectors is None else self.vectors[place].copy(),
            None if self.ids is None else self.ids[place],
            None if self.groups is None else self.groups[place],
            None if self.sources is None else self.sources[place],
        )


@dataclass
class _Excluded:
    count: int = 0
    rows: list[int] = field(default_factory=list)


class RowReader:
    """Turns batches of records into usable rows, and counts the others.

    A row is usable if all its parts are: its anchor, its positive (the first text of a list of positives), its
    vector. A row is left out for the first part that is not; a hard negative that is not is left out of its row, which
    stays, and is counted in `negatives_left_out`. An empty field among several hard-negative columns only says that
    the row has fewer of them.

    Args:
        roles: The columns.
        where: Column and value that a row must have.
        faults: Takes what makes the corpus unusable.
    """

    def __init__(self, roles: Roles, where: dict[str, str], faults: Faults) -> None:
        self._roles = roles
        self._where = where
        self._faults = faults
        self._excluded: dict[Reason, _Excluded] = {}
        self._dimension: int | None = None
        self.rows_read = 0
        self.rows_filtered_out = 0
        self.further_positives = 0
        self.negatives_left_out = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that must be read."""
        return tuple(dict.fromkeys((*self._roles.columns, *self._where)))

    @property
    def excluded(self) -> list[ExcludedRows]:
        """What was left out so far, in order of the reasons' names."""
        return [
            ExcludedRows(reason=reason, count=excluded.count, rows=excluded.rows)
            for reason, excluded in sorted(self._excluded.items())
        ]

    def read(self, batch: RecordBatch) -> UsableRows:
        """Return the usable rows of a batch."""
        self.rows_read += len(batch.numbers)
        places = self._places_kept(batch)
        self.rows_filtered_out += len(batch.numbers) - len(places)
        numbers: Sequence[int] = batch.numbers
        columns = batch.columns
        if len(places) < len(batch.numbers):
            numbers = [batch.numbers[place] for place in places]
            columns = {name: _taken(values, places) for name, values in columns.items()}

        roles = self._roles
        bad: list[Reason | None] = [None] * len(numbers)
        vectors = None
        if roles.embedding is not None:
            vectors = self._vectors(columns[roles.embedding], numbers, bad)
        anchors = normalized = positives = positives_normalized = negatives = None
        if roles.anchor is not None:
            anchors, normalized = _checked(_unwrapped(columns[roles.anchor]), bad)
        if roles.positive is not None:
            firsts, further = _first_positives(columns[roles.positive])
            positives, positives_normalized = _checked(firsts, bad)
            self.further_positives += sum(
                further[place] for place, reason in enumerate(bad) if reason is None
            )

        usable = range(len(numbers))
        if any(bad):
            usable = [place for place, reason in enumerate(bad) if reason is None]  # type: ignore[assignment]
            self._exclude(numbers, bad)
        if roles.negatives:
            negatives = self._negatives([columns[name] for name in roles.negatives], usable)
        everything = len(usable) == len(numbers)

        def kept(values: Any) -> Any:
            return values if values is None or everything else _taken(values, usable)

        return UsableRows(
            numbers=_as_int64(numbers if everything else [numbers[place] for place in usable]),
            anchors=kept(anchors),
            normalized=kept(normalized),
            positives=kept(positives),
            positives_normalized=kept(positives_normalized),
            negatives=negatives,
            vectors=kept(vectors),
            ids=kept(_names(columns, roles.id, "")),
            groups=kept(_names(columns, roles.meaning, None)),
            sources=kept(_names(columns, roles.source, NO_SOURCE)),
        )

    def _places_kept(self, batch: RecordBatch) -> Sequence[int]:
        places: Sequence[int] = range(len(batch.numbers))
        for name, wanted in self._where.items():
            values = batch.columns[name]
            places = [place for place in places if _as_name(values[place]) == wanted]
        return places

    def _exclude(self, numbers: Sequence[int], bad: Sequence[Reason | None]) -> None:
        for number, reason in zip(numbers, bad, strict=True):
            if reason is not None:
                excluded = self._excluded.setdefault(reason, _Excluded())
                excluded.count += 1
                if len(excluded.rows) < ROWS_LISTED:
                    excluded.rows.append(int(number))

    def _negatives(self, columns: list[Any], usable: Sequence[int]) -> list[list[str]]:
        rows = []
        for place in usable:
            negatives = []
            for column in columns:
                value = column[place]
                listed = isinstance(value, list)
                for candidate in value if listed else (value,):
                    text = _passage(candidate)
                    if isinstance(text, str) and text and not text.isspace():
                        negatives.append(text)
                    elif listed or (text is not None and text != ""):
                        self.negatives_left_out += 1
            rows.append(negatives)
        return rows

    def _vectors(self, values: Any, numbers: Sequence[int], bad: list[Reason | None]) -> np.ndarray:
        """Return float32 (b, d); rows that are no vectors are zero there, and marked or a fault."""
        if isinstance(values, np.ndarray):
            if values.dtype.kind not in "fiu" or values.ndim != 2:
                raise CorpusError(
                    "embeddings_not_numeric", f"The vectors have dtype {values.dtype}, not numbers."
                )
            matrix = self._fitted(values, numbers)
        else:
            rows = [self._vector(value, number) for value, number in zip(values, numbers, strict=True)]
            matrix = np.zeros((len(rows), self._dimension or 0), np.float32)
            for place, vector in enumerate(rows):
                if vector is None:
                    bad[place] = "null"
                else:
                    matrix[place] = vector
        finite = np.isfinite(matrix).all(axis=1)
        nonzero = matrix.any(axis=1)
        for place in np.flatnonzero(~(finite & nonzero)).tolist():
            bad[place] = bad[place] or ("non_finite_vector" if not finite[place] else "zero_vector")
        return matrix

    def _fitted(self, values: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
        """Return equally long vectors as float32; a length unlike the first row's is a fault."""
        if self._dimension is None and len(values):
            self._dimension = values.shape[1]
        if len(values) and values.shape[1] != self._dimension:
            for number in numbers:
                self._differs(number, values.shape[1])
            return np.zeros((len(values), self._dimension or 0), np.float32)
        return _as_float32(values)

    def _vector(self, value: Any, number: int) -> np.ndarray | None:
        if value is None or (isinstance(value, list | np.ndarray) and len(value) == 0):
            return None
        try:
            vector = np.asarray(
                [math.nan if x is None else x for x in value] if isinstance(value, list) else value
            )
        except ValueError:
            vector = np.asarray("a ragged list")
        if vector.dtype.kind not in "fiu" or vector.ndim != 1:
            self._faults.add("embeddings_not_numeric", number, "the vector is not a list of numbers.")
            return None
        if self._dimension is None:
            self._dimension = len(vector)
        if len(vector) != self._dimension:
            self._differs(number, len(vector))
            return None
        return _as_float32(vector)

    def _differs(self, number: int, width: int) -> None:
        message = f"a vector of width {width}, where the rows before have {self._dimension}; use one encoder for all."
        self._faults.add("embeddings_widths_differ", int(number), message)


def _as_float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return values.astype(np.float32)


def _as_int64(numbers: Sequence[int]) -> np.ndarray:
    if isinstance(numbers, range):
        return np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.int64)
    return np.asarray(numbers, np.int64)


def _taken(values: Any, places: Sequence[int]) -> Any:
    return values[list(places)] if isinstance(values, np.ndarray) else [values[place] for place in places]


def _checked(values: Sequence[Any], bad: list[Reason | None]) -> tuple[list[str], list[str]]:
    """Return texts and their normal forms; where there is no text, both are empty and `bad` says why."""
    if set(map(type, values)) == {str}:
        texts = list(values)
    else:
        texts = [value if isinstance(value, str) else "" for value in values]
        for place, value in enumerate(values):
            if not isinstance(value, str):
                bad[place] = bad[place] or ("null" if _is_null(value) else "not_a_string")
    normalized = normalize_texts(texts)
    if not all(normalized):
        for place, text in enumerate(normalized):
            if not text:
                bad[place] = bad[place] or "blank"
    return texts, normalized


def _unwrapped(values: Sequence[Any]) -> Sequence[Any]:
    """Take passages given as title and text for texts; lists stay, and are no text."""
    if dict in set(map(type, values)):
        return [_passage(value) for value in values]
    return values


def _first_positives(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the first usable text of each list of positives, and how many usable ones follow it."""
    firsts: list[Any] = []
    further = [0] * len(values)
    for place, value in enumerate(values):
        if not isinstance(value, list):
            firsts.append(_passage(value))
            continue
        candidates = [_passage(candidate) for candidate in value]
        texts = [text for text in candidates if isinstance(text, str) and text and not text.isspace()]
        firsts.append(texts[0] if texts else candidates[0] if candidates else None)
        further[place] = max(0, len(texts) - 1)
    return firsts, further


def _passage(value: Any) -> Any:
    """Return the text of a tevatron passage: title and text, joined as its trainer does; other values as they are."""
    if isinstance(value, dict) and "text" in value:
        title, text = value.get("title"), value["text"]
        if isinstance(text, str) and isinstance(title, str):
            return f"{title} {text}".strip()
        return text
    return value


def _names(columns: Any, name: str | None, missing: str | None) -> list[Any] | None:
    if name is None:
        return None
    if set(map(type, columns[name])) == {str} and all(columns[name]):
        return list(columns[name])
    names = [value if type(value) is str else _as_name(value) for value in columns[name]]
    return [value or missing for value in names]


def _as_name(value: Any) -> str | None:
    """Return an id, group, source or filter value as text: JSON's spelling for what is no string; None for null."""
    if isinstance(value, str):
        return value
    if _is_null(value):
        return None
    if isinstance(value, int | float):
        return json.dumps(value)
    return str(value)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
