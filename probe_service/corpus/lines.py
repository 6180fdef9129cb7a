"""Readers of text formats: txt, jsonl, csv, tsv.

A row number is a line number in txt and jsonl, and in csv and tsv the number of the record after the header, since a
csv record may span lines. csv is read with the standard library: of the readers at hand only it can go on after a bad
record, so that every bad record is counted at its number.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from pydantic_core import from_json

from probe_service.corpus.faults import Faults
from probe_service.corpus.formats import CHUNK_BYTES, HEAD_BYTES, ByteStream
from probe_service.corpus.records import RecordBatch, Records
from probe_service.errors import CorpusError

__all__ = ["csv_records", "jsonl_records", "tsv_records", "txt_records"]

_BOM = b"\xef\xbb\xbf"
_CSV_BATCH_RECORDS = 2048
_HEAD_RECORDS = 200


def txt_records(stream: ByteStream, faults: Faults, max_row_bytes: int) -> Records:
    """Read one text a line, as the column ``text``."""

    def batches(columns: Sequence[str]) -> Iterator[RecordBatch]:
        for numbers, texts in _Decoder(faults, max_row_bytes).texts(_lines(stream, max_row_bytes)):
            yield RecordBatch(numbers, dict.fromkeys(columns, texts))

    return Records(("text",), {}, batches)


def jsonl_records(stream: ByteStream, faults: Faults, max_row_bytes: int) -> Records:
    """Read one JSON object a line; a line that is a JSON string is a row whose only column is ``text``.

    The columns are those of the lines in the first 64 KiB. ``NaN`` and ``Infinity`` are read as numbers, as Python
    writes them.
    """
    decoder = _Decoder(faults, max_row_bytes)
    lines = _lines(stream, max_row_bytes)
    first = next(lines, None)
    if first is None:
        return Records((), {}, lambda _: iter(()))
    head: dict[str, list[Any]] = {}
    head_bytes = 0
    for line in first[1]:
        head_bytes += len(line) + 1
        if head and head_bytes > HEAD_BYTES:
            break
        try:
            row = from_json(line)
        except ValueError:
            continue
        for name, value in (
            {"text": row} if isinstance(row, str) else row if isinstance(row, dict) else {}
        ).items():
            head.setdefault(name, []).append(value)

    def batches(columns: Sequence[str]) -> Iterator[RecordBatch]:
        for numbers, block in chain([first], lines):
            kept, rows = _parse(numbers, block, decoder)
            yield RecordBatch(kept, {name: _column(rows, name) for name in columns})

    return Records(tuple(head), head, batches)


def tsv_records(stream: ByteStream, faults: Faults, max_row_bytes: int) -> Records:
    """Read tab-separated records, one a line, below a header line.

    A tab always separates and a line end always ends the record. Quotes around a whole field are taken off where they
    are well formed, as spreadsheets write them, and are otherwise part of the text, as in the GLUE files.
    """
    blocks = _Decoder(faults, max_row_bytes).texts(_lines(stream, max_row_bytes, first_number=0))
    first = next(blocks, None)
    if first is None or not first[0] or first[0][0] != 0:
        return Records((), {}, lambda _: iter(()))
    header = _tsv_fields(first[1][0])

    def records() -> Iterator[tuple[int, list[str]]]:
        for numbers, texts in chain([(first[0][1:], first[1][1:])], blocks):
            for number, text in zip(numbers, texts, strict=True):
                yield number, _tsv_fields(text) if text.strip() else []

    return _separated_records(header, records(), faults)


def csv_records(stream: ByteStream, faults: Faults, max_row_bytes: int, *, complete: bool) -> Records:
    """Read comma-separated records (RFC 4180) below a header; quoted fields may hold line ends.

    Args:
        stream: The bytes.
        faults: Takes what is wrong.
        max_row_bytes: Longest record.
        complete: Whether the bytes end where the file ends; if not, an open quote at their end is no fault.
    """
    # The limit of the csv module is one for the process; the row limit is the one that counts here.
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    lines = _CsvLines(_lines(stream, max_row_bytes), max_row_bytes)
    reader = csv.reader(lines, strict=True)
    header = _next_record(reader, lines, faults, 0, complete=complete)
    if header is None or not lines.good:
        return Records((), {}, lambda _: iter(()))
    if not header:
        raise CorpusError("corpus_column_missing", "The first line is blank; it must name the columns.")
    if len(header) == 1 and any(separator in header[0] for separator in ";\t|"):
        raise CorpusError(
            "corpus_column_missing",
            f"The header {header[0][:80]!r} has no comma; separate columns with commas, or with tabs in a tsv file.",
            column=header[0][:80],
        )

    def records() -> Iterator[tuple[int, list[str]]]:
        number = 0
        while True:
            number += 1
            record = _next_record(reader, lines, faults, number, complete=complete)
            if record is None:
                return
            if lines.good:
                yield number, record

    return _separated_records(header, records(), faults)


def _separated_records(
    header: list[str], records: Iterator[tuple[int, list[str]]], faults: Faults
) -> Records:
    """Check the width of each record and turn them into columns; an empty record is a blank row."""
    width = len(header)

    def checked() -> Iterator[tuple[int, list[str]]]:
        for number, record in records:
            if len(record) == width:
                yield number, record
            elif not record:
                yield number, [""] * width
            else:
                faults.add(
                    "corpus_bad_line",
                    number,
                    f"{len(record)} fields where the header has {width}; quote texts that hold the separator.",
                )

    rows = checked()
    first = _take(rows, _HEAD_RECORDS)

    def batches(columns: Sequence[str]) -> Iterator[RecordBatch]:
        places = {name: header.index(name) for name in columns}
        taken = first
        while taken:
            by_column = list(zip(*(record for _, record in taken), strict=True))
            yield RecordBatch(
                [number for number, _ in taken], {name: by_column[place] for name, place in places.items()}
            )
            taken = _take(rows, _CSV_BATCH_RECORDS)

    head = {name: [record[place] for _, record in first] for place, name in enumerate(header)}
    return Records(tuple(header), head, batches)


def _take(rows: Iterator[tuple[int, list[str]]], count: int) -> list[tuple[int, list[str]]]:
    return [row for row, _ in zip(rows, range(count), strict=False)]


# ------------------------------------------------------------------------------------------------------------ lines

_Block = tuple[Sequence[int], list[bytes]]

_TOO_LONG = b"\xff too long"
"""Stands for a line above the limit; neither text nor JSON, so that no fast path takes it for a row."""


def _lines(stream: ByteStream, max_row_bytes: int, *, first_number: int = 1) -> Iterator[_Block]:
    """Yield blocks of lines with their numbers, without line ends; a too long line is never held whole."""
    number = first_number
    tail = b""
    skipping = False
    at_start = True
    while chunk := stream.read(CHUNK_BYTES):
        if at_start:
            chunk = chunk.removeprefix(_BOM)
            at_start = False
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            chunk = chunk[end + 1 :]
            skipping = False
        lines = (tail + chunk).split(b"\n")
        tail = lines.pop()
        if len(tail) > max_row_bytes:
            lines.append(_TOO_LONG)
            tail, skipping = b"", True
        if max(map(len, lines), default=0) > max_row_bytes:
            lines = [line if len(line) <= max_row_bytes else _TOO_LONG for line in lines]
        if lines:
            yield range(number, number + len(lines)), lines
            number += len(lines)
    if tail:
        yield range(number, number + 1), [tail]


class _Decoder:
    """Turns lines into text; lines that are none are faults.

    Args:
        faults: Takes what is wrong.
        max_row_bytes: The limit that too long lines have passed.
    """

    def __init__(self, faults: Faults, max_row_bytes: int) -> None:
        self.faults = faults
        self._max_row_bytes = max_row_bytes

    def text(self, number: int, line: bytes) -> str | None:
        """Return the text of a line, or None after noting why it has none."""
        if line is _TOO_LONG:
            self.faults.add("corpus_row_too_large", number, _too_large(self._max_row_bytes))
            return None
        if b"\0" in line:
            self.faults.add("corpus_nul_bytes", number, _NUL_BYTES)
            return None
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self.faults.add(
                "corpus_invalid_utf8",
                number,
                f"invalid UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8.",
            )
            return None

    def texts(self, blocks: Iterator[_Block]) -> Iterator[tuple[Sequence[int], list[str]]]:
        """Decode whole blocks where they are clean, else line by line; bad lines fall out."""
        for numbers, lines in blocks:
            block = b"\n".join(lines)
            try:
                texts = [] if b"\0" in block else block.decode().split("\n")
            except UnicodeDecodeError:
                texts = []
            if texts:
                yield numbers, [text.removesuffix("\r") for text in texts] if b"\r" in block else texts
                continue
            decoded = [(number, self.text(number, line)) for number, line in zip(numbers, lines, strict=True)]
            good = [(number, text.removesuffix("\r")) for number, text in decoded if text is not None]
            yield [number for number, _ in good], [text for _, text in good]


def _too_large(max_row_bytes: int) -> str:
    return f"longer than {max_row_bytes:,} bytes; split or drop it."


_NUL_BYTES = "holds a NUL byte; remove it, or save the file as UTF-8 text."


# ------------------------------------------------------------------------------------------------------------ jsonl


def _parse(
    numbers: Sequence[int], lines: list[bytes], decoder: _Decoder
) -> tuple[Sequence[int], list[dict[str, Any]]]:
    """Parse a block of lines at once; if any of them is not an object, one by one."""
    try:
        rows = list(map(from_json, lines))
    except ValueError:
        rows = []
    if rows and set(map(type, rows)) == {dict}:
        return numbers, rows
    parsed = [
        (number, _parse_line(number, line, decoder)) for number, line in zip(numbers, lines, strict=True)
    ]
    good = [(number, row) for number, row in parsed if row is not None]
    return [number for number, _ in good], [row for _, row in good]


def _column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [row.get(name) for row in rows]


def _parse_line(number: int, line: bytes, decoder: _Decoder) -> dict[str, Any] | None:
    text = decoder.text(number, line)
    if text is None:
        return None
    if not text.strip():
        return _BLANK_ROW
    try:
        row = from_json(line)
    except ValueError as error:
        if _holds_lone_surrogate(text):
            message = "a \\u escape that is half of a surrogate pair; no text can hold it."
            decoder.faults.add("corpus_invalid_utf8", number, message)
        else:
            reason = str(error).replace(" at line 1 column ", " at character ")
            decoder.faults.add("corpus_bad_line", number, f"not JSON: {reason}.")
        return None
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        what = "null" if row is None else type(row).__name__
        decoder.faults.add(
            "corpus_bad_line", number, f"a JSON {what}; each line must be an object or a string."
        )
        return None
    return row


class _BlankRow(dict[str, Any]):
    """An empty line: blank in every column."""

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ARG002 - the signature of dict
        return ""


_BLANK_ROW = _BlankRow()


def _holds_lone_surrogate(text: str) -> bool:
    """Whether the standard library, which accepts lone surrogates, can read what the strict parser refused."""
    if "\\ud" not in text.lower():
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# ---------------------------------------------------------------------------------------------------------- csv, tsv


def _tsv_fields(line: str) -> list[str]:
    fields = line.split("\t")
    if '"' in line:
        return [_unquoted(field) for field in fields]
    return fields


def _unquoted(field: str) -> str:
    inner = field[1:-1]
    if len(field) >= 2 and field[0] == field[-1] == '"' and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return field


class _RecordTooLargeError(Exception):
    """A csv record that spans lines has become too long."""


class _CsvLines:
    """Lines for the csv reader, which pulls as many as the record needs; says whether the record's lines were good."""

    def __init__(self, blocks: Iterator[_Block], max_row_bytes: int) -> None:
        self._lines = (line for _, lines in blocks for line in lines)
        self.max_row_bytes = max_row_bytes
        self._record_bytes = 0
        self.good = True
        self.bad_code: str | None = None

    def begin_record(self) -> None:
        self._record_bytes = 0
        self.good = True
        self.bad_code = None

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._record_bytes += len(line) + 1
        if line is _TOO_LONG or self._record_bytes > self.max_row_bytes + 1:
            raise _RecordTooLargeError
        if b"\0" in line:
            self.bad_code = "corpus_nul_bytes"
            line = line.replace(b"\0", b"")
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError:
            self.bad_code = "corpus_invalid_utf8"
            return line.decode("utf-8", "replace") + "\n"


_CSV_FAULTS = {
    "corpus_nul_bytes": _NUL_BYTES,
    "corpus_invalid_utf8": "invalid UTF-8; save the file as UTF-8.",
}


def _next_record(
    reader: Iterator[list[str]], lines: _CsvLines, faults: Faults, number: int, *, complete: bool
) -> list[str] | None:
    """Return the next record, or None at the end; `lines.good` is False if it is a fault, already noted."""
    lines.begin_record()
    try:
        record = next(reader)
    except StopIteration:
        return None
    except _RecordTooLargeError:
        message = f"{_too_large(lines.max_row_bytes)} Or a quote in it is never closed."
        faults.add("corpus_row_too_large", number, message)
        lines.good = False
        return []
    except csv.Error as error:
        lines.good = False
        if "unexpected end" in str(error):
            if complete:
                faults.add("corpus_bad_line", number, "a quote is never closed.")
            return None
        faults.add("corpus_bad_line", number, f"not csv: {error}; double the quotes inside a quoted field.")
        return []
    if lines.bad_code is not None:
        lines.good = False
        faults.add(lines.bad_code, number, _CSV_FAULTS[lines.bad_code])
    return record
