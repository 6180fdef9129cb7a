"""When two texts are equal, and how many rows repeat an earlier one, in memory that does not grow."""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from probe_service.schemas import DuplicateCounts

__all__ = [
    "ROWS_LISTED",
    "DuplicateTally",
    "RepeatCounter",
    "Repeats",
    "fold_normalized",
    "normalize_text",
    "normalize_texts",
]

ROWS_LISTED = 1000
"""Row numbers that a report lists of one kind, at most."""

_BUFFERED_ROWS = 1 << 18
_PARTITIONS = 64
_TEXTS_CHECKED_AT_ONCE = 32
_ASCII_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f"
"""All ASCII white space that `str.split` knows, but the plain blank."""


def normalize_text(text: str, *, case_fold: bool = False) -> str:
    """Return the form under which two texts are equal: NFC, white space folded, and case folded if asked.

    Equivalent to ``" ".join(unicodedata.normalize("NFC", text).split())``; with `case_fold`, to the canonical
    caseless form (Unicode 15, definition D145) composed again. Applying it twice changes nothing.

    Args:
        text: Any text.
        case_fold: Fold case as well.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    # Every white space but the plain blank is unprintable: this spares clean text the split and the join.
    if "  " in text or not text.isprintable() or text[:1] == " " or text[-1:] == " ":
        text = " ".join(text.split())
    if not case_fold:
        return text
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).casefold())


def normalize_texts(texts: Sequence[str]) -> list[str]:
    """Return `normalize_text` of each text; runs of clean ASCII texts are checked at one stroke."""
    normalized: list[str] = []
    for start in range(0, len(texts), _TEXTS_CHECKED_AT_ONCE):
        run = texts[start : start + _TEXTS_CHECKED_AT_ONCE]
        # With a bar on both sides of each text, a blank at its end shows as a blank beside a bar.
        joined = f"|{'|'.join(run)}|"
        clean = joined.isascii() and not any(space in joined for space in _ASCII_SPACES)
        if clean and "  " not in joined and "| " not in joined and " |" not in joined:
            normalized += run
        else:
            normalized += map(normalize_text, run)
    return normalized


def fold_normalized(normalized: Sequence[str]) -> list[str]:
    """Return `normalize_text(text, case_fold=True)` of texts that are already normalised."""
    return [text.lower() if text.isascii() else normalize_text(text, case_fold=True) for text in normalized]


@dataclass(frozen=True)
class Repeats:
    """Of all digests that were counted.

    Args:
        repeats: Rows whose digest an earlier row had.
        distinct: Different digests.
        rows: Row numbers of the repeats, ascending; the first 1,000.
    """

    repeats: int
    distinct: int
    rows: list[int]


class RepeatCounter:
    """Count rows whose 64-bit digest was seen before, with row numbers, in bounded memory.

    A buffer of 262,144 rows is sorted and reduced to its first rows of each digest; these go to 64 files by the
    digest's high bits, so that equal digests meet in one file, and the files are counted one after another. A corpus
    that fits into one buffer touches no disk.

    Args:
        folder: Existing folder for the files.
        name: Prefix of the files, unique in the folder.
        buffered_rows: Rows held in memory.
    """

    def __init__(self, folder: Path, name: str, *, buffered_rows: int = _BUFFERED_ROWS) -> None:
        self._folder = folder
        self._name = name
        self._digests = np.empty(buffered_rows, np.uint64)
        self._numbers = np.empty(buffered_rows, np.int64)
        self._filled = 0
        self._spilled = False
        self._repeats = 0
        self._rows = np.empty(0, np.int64)

    def add(self, digests: np.ndarray, numbers: np.ndarray) -> None:
        """Add rows in file order.

        Args:
            digests: uint64 (b,).
            numbers: int64 (b,), row numbers, ascending over all calls.
        """
        start = 0
        while start < len(digests):
            take = min(len(digests) - start, len(self._digests) - self._filled)
            self._digests[self._filled : self._filled + take] = digests[start : start + take]
            self._numbers[self._filled : self._filled + take] = numbers[start : start + take]
            self._filled += take
            start += take
            if self._filled == len(self._digests):
                self._spill()

    def finish(self, on_step: Callable[[], None] = lambda: None) -> Repeats:
        """Return the counts; `on_step` is called after each file."""
        if not self._spilled:
            digests, _ = self._first_of_each(self._digests[: self._filled], self._numbers[: self._filled])
            return Repeats(self._repeats, len(digests), self._rows.tolist())
        self._spill()
        distinct = 0
        for partition in range(_PARTITIONS):
            path = self._path(partition)
            if path.exists():
                records = np.fromfile(path, np.uint64).reshape(-1, 2)
                digests, _ = self._first_of_each(records[:, 0], records[:, 1].astype(np.int64))
                distinct += len(digests)
            on_step()
        return Repeats(self._repeats, distinct, self._rows.tolist())

    def _first_of_each(self, digests: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Note the repeats among these rows and return the first row of each digest, in order of digest."""
        order = np.argsort(digests, kind="stable")
        ordered = digests[order]
        first = np.ones(len(ordered), bool)
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
        repeated = numbers[order[~first]]
        if len(repeated):
            self._repeats += len(repeated)
            self._rows = np.sort(np.concatenate([self._rows, repeated]))[:ROWS_LISTED]
        return ordered[first], numbers[order[first]]

    def _spill(self) -> None:
        digests, numbers = self._first_of_each(self._digests[: self._filled], self._numbers[: self._filled])
        records = np.stack([digests, numbers.astype(np.uint64)], axis=1)
        width = np.uint64(2**64 // _PARTITIONS)
        bounds = np.searchsorted(digests, [np.uint64(p) * width for p in range(1, _PARTITIONS)])
        for partition, part in enumerate(np.split(records, bounds)):
            if len(part):
                with self._path(partition).open("ab") as file:
                    file.write(part.tobytes())
        self._filled = 0
        self._spilled = True

    def _path(self, partition: int) -> Path:
        return self._folder / f"{self._name}-{partition:02d}"


class DuplicateTally:
    """`DuplicateCounts` and the number of groups of a stream of rows.

    A digest is the interpreter's 64-bit SipHash, keyed afresh in each process: fast, and not to be forged by a
    corpus. Among n rows some two different texts share a digest with probability about n²/2⁶⁵ (3e-7 for 5 million).
    """

    def __init__(self, *, buffered_rows: int = _BUFFERED_ROWS) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="probe-duplicates-")
        folder = Path(self._temporary.name)
        self._levels = {
            name: RepeatCounter(folder, name, buffered_rows=buffered_rows)
            for name in ("exact", "normalized", "case_folded")
        }
        self._groups = RepeatCounter(folder, "groups", buffered_rows=buffered_rows)

    def add(self, level: str, keys: Sequence[object], numbers: np.ndarray) -> None:
        """Add one key a row at the level ``exact``, ``normalized`` or ``case_folded``."""
        self._levels[level].add(_digests(keys), numbers)

    def add_groups(self, groups: Sequence[str]) -> None:
        """Add the groups of those rows that have one; only their number is asked for, not where they stand."""
        self._groups.add(_digests(groups), np.zeros(len(groups), np.int64))

    def finish(self, on_step: Callable[[], None] = lambda: None) -> tuple[DuplicateCounts, int]:
        """Return the counts, and the number of distinct groups."""
        exact, normalized, case_folded = (counter.finish(on_step) for counter in self._levels.values())
        counts = DuplicateCounts(
            exact=exact.repeats,
            normalized=normalized.repeats,
            case_folded=case_folded.repeats,
            rows=normalized.rows,
        )
        return counts, self._groups.finish(on_step).distinct

    def close(self) -> None:
        """Remove the temporary files."""
        self._temporary.cleanup()


def _digests(keys: Sequence[object]) -> np.ndarray:
    return np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
