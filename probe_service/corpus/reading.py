"""Read a corpus: one pass over its rows, in memory that does not grow with them."""

from __future__ import annotations

import codecs
import io
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from probe_service.corpus.arrays import check_npy_header, npy_records, npz_records
from probe_service.corpus.arrow import parquet_records
from probe_service.corpus.content import ContentHash
from probe_service.corpus.equality import DuplicateTally, fold_normalized
from probe_service.corpus.faults import Faults
from probe_service.corpus.formats import (
    HEAD_BYTES,
    Unpacked,
    cut_after_last_line,
    detect_format,
    unpack_head,
)
from probe_service.corpus.hub import HF_PREFIX, hub_records
from probe_service.corpus.lines import csv_records, jsonl_records, tsv_records, txt_records
from probe_service.corpus.records import Records
from probe_service.corpus.reservoir import Reservoir
from probe_service.corpus.roles import Roles, resolve_roles
from probe_service.corpus.rows import Row, RowReader, UsableRows
from probe_service.corpus.storage import Corpus
from probe_service.errors import CorpusError
from probe_service.schemas import CorpusFormat, CorpusInfo, CorpusKind, CorpusOptions

__all__ = ["DEFAULT_MAX_ROW_BYTES", "OTHER_SOURCES", "Progress", "read_corpus", "sniff_corpus"]

DEFAULT_MAX_ROW_BYTES = 1024**2
OTHER_SOURCES = "(other)"
"""Counts the rows of all sources beyond the first 1,000 that were met."""

Progress = Callable[[int, int], None]

_SOURCES_COUNTED = 1000
_LINE_FORMATS = {CorpusFormat.TXT, CorpusFormat.JSONL}


def read_corpus(
    source: Path | str,
    options: CorpusOptions,
    *,
    sample_size: int,
    rng: np.random.Generator,
    name: str | None = None,
    max_row_bytes: int = DEFAULT_MAX_ROW_BYTES,
    on_progress: Progress | None = None,
) -> Corpus:
    """Read a corpus whole, keep a uniform sample of its usable rows, and count over all of them.

    Every row is read once: columns get their parts, unusable rows are counted and listed, duplicates and the content
    hash cover all usable rows, and `sample_size` of them are kept (all, if there are no more), in file order. The
    sample depends on `rng` and the rows only. Memory is bounded by the sample, the longest row and 16 MiB of digests.

    A list of positives (FlagEmbedding, tevatron) gives one row, as their trainers draw one positive an epoch: its
    positive is the first usable one, the further ones are counted in `CorpusInfo.further_positives`.

    Args:
        source: A file, or ``hf:NAME[:config[:split]][@revision]``.
        options: Format, kind, columns, filter; `max_rows` lowers `sample_size`.
        sample_size: Rows to keep at most, at least 1.
        rng: Draws the sample; untouched if all rows are kept.
        name: Name in the report and for the format; the file's own if None.
        max_row_bytes: Longest row; a longer one is refused.
        on_progress: Called with (bytes done, all bytes) after every chunk of at most 512 KiB or 1,024 rows; rows in
            place of bytes for a Hugging Face data set. What it raises ends the reading.

    Raises:
        CorpusError: The first fault, with its row number and the count of all rows that have it.
    """
    kept = min(sample_size, options.max_rows or sample_size)
    with ExitStack() as stack:
        if isinstance(source, str) and source.startswith(HF_PREFIX):
            faults = Faults()
            hub = hub_records(source, faults, max_row_bytes, on_progress)
            reading = _Reading(
                hub.records, faults, options, kept, rng, lambda: on_progress and on_progress(1, 1)
            )
            return reading.run(name or hub.name, "hf", stack)
        path = Path(source)
        try:
            unpacked = Unpacked(path, on_progress)
        except OSError as error:
            raise CorpusError("corpus_unreadable", f"{path} cannot be opened ({error.strerror}).") from error
        stack.callback(unpacked.close)
        name = name or path.name
        head = _head(path)
        if not head:
            raise CorpusError("corpus_empty", f"{name} is empty; give at least two rows.")
        found = detect_format(head, name, options.format)
        faults = Faults("line" if found in _LINE_FORMATS else "record")
        records = _open(found, unpacked, faults, max_row_bytes, stack, complete=True)
        reading = _Reading(records, faults, options, kept, rng, lambda: unpacked.report(unpacked.size_bytes))
        return reading.run(name, f"{found.value}.gz" if unpacked.packed else found.value, stack)


def sniff_corpus(
    first_bytes: bytes,
    name: str,
    options: CorpusOptions,
    *,
    complete: bool,
    max_row_bytes: int = DEFAULT_MAX_ROW_BYTES,
) -> CorpusFormat:
    """Tell the format of a file from its first bytes, and refuse what already shows to be wrong.

    A complete file is read as `read_corpus` would. Of a longer one the complete lines in the first bytes are; a line,
    a code point or a quoted field that the end cuts is no fault. Of binary formats only the first bytes are checked,
    and of npy its header.

    Args:
        first_bytes: The file's first 64 KiB or so, as uploaded.
        name: File name.
        options: As for `read_corpus`.
        complete: Whether `first_bytes` is the whole file.
        max_row_bytes: Longest row.

    Raises:
        CorpusError: As `read_corpus`; without a count unless `complete`.
    """
    head, _ = unpack_head(first_bytes, complete=complete)
    found = detect_format(head, name, options.format) if head or not complete else CorpusFormat.TXT
    with tempfile.TemporaryDirectory(prefix="probe-sniff-") as folder:
        path = Path(folder) / "head"
        if complete:
            path.write_bytes(first_bytes)
            read_corpus(
                path,
                options,
                sample_size=1,
                rng=np.random.default_rng(0),
                name=name,
                max_row_bytes=max_row_bytes,
            )
            return found
        if found is CorpusFormat.NPY:
            check_npy_header(io.BytesIO(head), name)
        if found in (CorpusFormat.NPY, CorpusFormat.NPZ, CorpusFormat.PARQUET):
            return found
        lines = cut_after_last_line(head[:HEAD_BYTES])
        if not lines:
            if len(head) > max_row_bytes:
                raise CorpusError(
                    "corpus_row_too_large",
                    f"Line 1: longer than {max_row_bytes:,} bytes; split or drop it.",
                    row=1,
                )
            _refuse_broken_text(head)
            return found
        path.write_bytes(lines)
        with ExitStack() as stack:
            unpacked = Unpacked(path)
            stack.callback(unpacked.close)
            faults = Faults("line" if found in _LINE_FORMATS else "record")
            records = _open(found, unpacked, faults, max_row_bytes, stack, complete=False)
            _Reading(records, faults, options, 1, np.random.default_rng(0), lambda: None).run_head(stack)
    return found


def _head(path: Path) -> bytes:
    unpacked = Unpacked(path)
    try:
        return unpacked.read(HEAD_BYTES)
    finally:
        unpacked.close()


def _open(
    found: CorpusFormat,
    unpacked: Unpacked,
    faults: Faults,
    max_row_bytes: int,
    stack: ExitStack,
    *,
    complete: bool,
) -> Records:
    match found:
        case CorpusFormat.TXT:
            return txt_records(unpacked, faults, max_row_bytes)
        case CorpusFormat.JSONL:
            return jsonl_records(unpacked, faults, max_row_bytes)
        case CorpusFormat.CSV:
            return csv_records(unpacked, faults, max_row_bytes, complete=complete)
        case CorpusFormat.TSV:
            return tsv_records(unpacked, faults, max_row_bytes)
        case CorpusFormat.PARQUET:
            return parquet_records(unpacked, faults, max_row_bytes, stack)
        case CorpusFormat.NPY:
            return npy_records(unpacked, stack)
        case CorpusFormat.NPZ:
            return npz_records(unpacked, stack)


def _refuse_broken_text(head: bytes) -> None:
    """Check the beginning of a row that is longer than the head."""
    if b"\0" in head:
        raise CorpusError("corpus_nul_bytes", "Line 1 holds a NUL byte; save the file as UTF-8 text.", row=1)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        raise CorpusError(
            "corpus_invalid_utf8",
            f"Line 1: invalid UTF-8 at byte {error.start + 1}; save the file as UTF-8.",
            row=1,
        ) from error


class _Reading:
    """One pass over records: sample, counts and hash.

    Args:
        records: Where they come from.
        faults: Where the readers note what is wrong.
        options: Roles and filter.
        sample_size: Rows kept.
        rng: Draws them.
        on_step: Called between the steps that follow the last record.
    """

    def __init__(
        self,
        records: Records,
        faults: Faults,
        options: CorpusOptions,
        sample_size: int,
        rng: np.random.Generator,
        on_step: Callable[[], None],
    ) -> None:
        self._records = records
        self._faults = faults
        self._options = options
        self._reservoir: Reservoir[Row] = Reservoir(sample_size, rng)
        self._on_step = on_step
        self._rows_usable = 0
        self._rows_without_group = 0
        self._sources: Counter[str] = Counter()
        self._hard_negatives = 0

    def run(self, name: str, format_name: str, stack: ExitStack) -> Corpus:
        """Read everything and return the corpus."""
        roles, reader, content, tally = self._begin(stack)
        for batch in self._records.batches(reader.columns):
            rows = reader.read(batch)
            if len(rows.numbers):
                content.add(rows)
                _tally(tally, rows)
                self._count(rows)
        self._faults.raise_first()
        self._refuse_too_few(reader)
        duplicates, groups = tally.finish(self._on_step)
        info = CorpusInfo(
            sha256=content.hexdigest(),
            name=name,
            format=format_name,
            kind=roles.kind,
            columns=roles.echo(),
            columns_inferred=roles.inferred,
            rows_read=reader.rows_read,
            rows_filtered_out=reader.rows_filtered_out,
            rows_usable=self._rows_usable,
            rows_encoded=len(self._reservoir.items),
            excluded=reader.excluded,
            duplicates=duplicates,
            truncated=None,
            groups=None if roles.meaning is None else groups,
            rows_without_group=None if roles.meaning is None else self._rows_without_group,
            sources=None if roles.source is None else dict(sorted(self._sources.items())),
            hard_negatives=self._hard_negatives if roles.kind is CorpusKind.TUPLES else None,
            hard_negatives_left_out=reader.negatives_left_out if roles.kind is CorpusKind.TUPLES else None,
            further_positives=None if roles.positive is None else reader.further_positives,
        )
        return _corpus(roles, sorted(self._reservoir.items, key=lambda row: row.number), info)

    def run_head(self, stack: ExitStack) -> None:
        """Read the head of a file only to raise what is wrong with it."""
        if not self._records.columns:
            for _ in self._records.batches(()):
                pass
            self._faults.raise_first(counted=False)
            return
        _, reader, content, _ = self._begin(stack)
        for batch in self._records.batches(reader.columns):
            content.add(reader.read(batch))
        self._faults.raise_first(counted=False)

    def _begin(self, stack: ExitStack) -> tuple[Roles, RowReader, ContentHash, DuplicateTally]:
        if not self._records.columns:
            self._refuse_rowless()
        roles = resolve_roles(self._records.columns, self._records.head, self._options)
        tally = DuplicateTally()
        stack.callback(tally.close)
        reader = RowReader(roles, self._options.where, self._faults)
        return roles, reader, ContentHash(roles, self._faults), tally

    def _count(self, rows: UsableRows) -> None:
        self._rows_usable += len(rows.numbers)
        if rows.groups is not None:
            self._rows_without_group += rows.groups.count(None)
        if rows.negatives is not None:
            self._hard_negatives += sum(map(len, rows.negatives))
        if rows.sources is not None:
            for source, count in Counter(rows.sources).items():
                room = source in self._sources or len(self._sources) < _SOURCES_COUNTED
                self._sources[source if room else OTHER_SOURCES] += count
        for draw in self._reservoir.draw(len(rows.numbers)):
            self._reservoir.keep(draw, rows.row(draw.position))

    def _refuse_rowless(self) -> None:
        rows_read = sum(len(batch.numbers) for batch in self._records.batches(()))
        self._faults.raise_first()
        if rows_read == 0:
            raise CorpusError("corpus_empty", "The corpus is empty; give at least two rows.")
        raise CorpusError(
            "corpus_no_usable_rows", f"None of the {rows_read} rows holds a text.", row=1, count=rows_read
        )

    def _refuse_too_few(self, reader: RowReader) -> None:
        if self._rows_usable >= 2:
            return
        if reader.rows_read == 0:
            raise CorpusError("corpus_empty", "The corpus has no rows; give at least two.")
        left_out = {excluded.reason: excluded.count for excluded in reader.excluded}
        reasons = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
        if reader.rows_filtered_out:
            reasons = ", ".join(filter(None, (reasons, f"{reader.rows_filtered_out} set aside by where")))
        first = min((excluded.rows[0] for excluded in reader.excluded), default=None)
        detail = f" of {reader.rows_read} read" + (f" ({reasons})" if reasons else "")
        code, found = ("corpus_too_few_rows", "one") if self._rows_usable else ("corpus_no_usable_rows", "no")
        raise CorpusError(
            code,
            f"The corpus has {found} usable row{detail}; a batch needs at least two.",
            row=first,
            count=sum(left_out.values()),
        )


def _tally(tally: DuplicateTally, rows: UsableRows) -> None:
    """Count repeats: of a text, of an anchor with its positive, or of a vector that has no text."""
    if rows.groups is not None:
        tally.add_groups([group for group in rows.groups if group is not None])
    if rows.anchors is None or rows.normalized is None:
        assert rows.vectors is not None
        keys = [vector.tobytes() for vector in rows.vectors]
        for level in ("exact", "normalized", "case_folded"):
            tally.add(level, keys, rows.numbers)
        return
    levels = {
        "exact": rows.anchors,
        "normalized": rows.normalized,
        "case_folded": fold_normalized(rows.normalized),
    }
    if rows.positives is None or rows.positives_normalized is None:
        for level, texts in levels.items():
            tally.add(level, texts, rows.numbers)
        return
    positives = {
        "exact": rows.positives,
        "normalized": rows.positives_normalized,
        "case_folded": fold_normalized(rows.positives_normalized),
    }
    for level, texts in levels.items():
        tally.add(level, list(zip(texts, positives[level], strict=True)), rows.numbers)


def _corpus(roles: Roles, rows: list[Row], info: CorpusInfo) -> Corpus:
    def texts(name: str, column: str | None) -> list[str] | None:
        return None if column is None else [getattr(row, name) for row in rows]

    vectors = np.array([row.vector for row in rows], np.float32) if roles.embedding is not None else None
    return Corpus(
        kind=roles.kind,
        anchors=texts("anchor", roles.anchor),
        positives=texts("positive", roles.positive),
        negatives=[row.negatives or [] for row in rows] if roles.negatives else None,
        vectors=vectors,
        ids=texts("id", roles.id),
        groups=None if roles.meaning is None else [row.group for row in rows],
        sources=texts("source", roles.source),
        row_numbers=np.array([row.number for row in rows], np.int64),
        info=info,
    )
