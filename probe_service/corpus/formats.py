"""From bytes to a format: gzip is unpacked on the way, content counts for more than the name."""

from __future__ import annotations

import gzip
import io
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from probe_service.errors import CorpusError
from probe_service.schemas import CorpusFormat

__all__ = [
    "CHUNK_BYTES",
    "HEAD_BYTES",
    "ByteStream",
    "Unpacked",
    "cut_after_last_line",
    "detect_format",
    "seekable_copy",
    "spooled_copy",
    "unpack_head",
]

HEAD_BYTES = 64 * 1024
"""Bytes at the start of a file that its format and columns are read from."""
CHUNK_BYTES = 512 * 1024
"""Bytes read at a time."""

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_UNPACKED_HEAD_BYTES = 1024 * 1024
# gzip packs up to a thousandfold; only formats that must be copied to be read are limited.
_MAX_COPY_BYTES = 16 * 1024**3
_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_MAGICS = (
    (b"PAR1", CorpusFormat.PARQUET),
    (b"\x93NUMPY", CorpusFormat.NPY),
    (b"PK\x03\x04", CorpusFormat.NPZ),
)
_FOREIGN_MAGICS = {
    b"\x28\xb5\x2f\xfd": "packed with zstd",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ\x00": "packed with xz",
    b"%PDF": "a PDF document",
    b"\x89PNG": "a picture",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3": "an SQLite file",
}
_SUFFIXES = {
    ".txt": CorpusFormat.TXT,
    ".text": CorpusFormat.TXT,
    ".jsonl": CorpusFormat.JSONL,
    ".ndjson": CorpusFormat.JSONL,
    ".json": CorpusFormat.JSONL,
    ".csv": CorpusFormat.CSV,
    ".tsv": CorpusFormat.TSV,
    ".tab": CorpusFormat.TSV,
    ".parquet": CorpusFormat.PARQUET,
    ".npy": CorpusFormat.NPY,
    ".npz": CorpusFormat.NPZ,
}
_SUPPORTED = "txt, jsonl, csv, tsv, parquet, npy and npz, each also packed with gzip"
_CONTROLS = bytes(code for code in range(1, 32) if code not in b"\t\n\v\f\r\x1b")
_COLUMN_NAMES = re.compile(
    r"(text|sentence\d?|anchor|query|question|positive|answer|passage|group|label|id)", re.IGNORECASE
)


class ByteStream(Protocol):
    """Bytes read from the start in chunks."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes; none at the end."""


class Unpacked:
    """The content of a file, read from its start in chunks, unpacked if it is gzip.

    Args:
        path: The file.
        on_progress: Called with (bytes of the file consumed, bytes of the file) after each read; may raise.

    Raises:
        CorpusError: ``corpus_gzip_damaged`` from `read`.
    """

    def __init__(self, path: Path, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.path = path
        self._on_progress = on_progress
        self.size_bytes = path.stat().st_size
        self._file = path.open("rb")
        self.packed = self._file.read(2) == _GZIP_MAGIC
        self._file.seek(0)
        self._stream: BinaryIO | gzip.GzipFile = (
            gzip.GzipFile(fileobj=self._file) if self.packed else self._file
        )

    def read(self, size: int) -> bytes:
        """Return the next bytes: fewer than `size` only at the end, none after it."""
        with _gzip_errors_translated():
            content = self._stream.read(size)
        self.report(min(self._file.tell(), self.size_bytes))
        return content

    def report(self, done_bytes: int) -> None:
        """Report progress."""
        if self._on_progress is not None:
            self._on_progress(done_bytes, self.size_bytes)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()


@contextmanager
def _gzip_errors_translated() -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorpusError(
            "corpus_gzip_damaged", f"The gzip packing is damaged or cut short ({error}); send the file again."
        ) from error


def unpack_head(first_bytes: bytes, *, complete: bool) -> tuple[bytes, bool]:
    """Return the unpacked start of a file, and whether it was packed.

    Args:
        first_bytes: The file's first bytes.
        complete: Whether they are the whole file; then the packing must end properly.

    Raises:
        CorpusError: ``corpus_gzip_damaged``.
    """
    if not first_bytes.startswith(_GZIP_MAGIC):
        return first_bytes, False
    with _gzip_errors_translated():
        if complete:
            return gzip.GzipFile(fileobj=io.BytesIO(first_bytes)).read(_MAX_UNPACKED_HEAD_BYTES), True
        return zlib.decompressobj(wbits=31).decompress(first_bytes, _MAX_UNPACKED_HEAD_BYTES), True


@contextmanager
def seekable_copy(unpacked: Unpacked, suffix: str) -> Iterator[Path]:
    """Give a path whose bytes are the unpacked content: the file itself, or a temporary copy.

    Raises:
        CorpusError: ``corpus_gzip_damaged``, ``corpus_unpacked_too_large``.
    """
    if not unpacked.packed:
        yield unpacked.path
        return
    with spooled_copy(unpacked, suffix) as path:
        yield path


@contextmanager
def spooled_copy(stream: ByteStream, suffix: str) -> Iterator[Path]:
    """Give a temporary file with the rest of a stream.

    Raises:
        CorpusError: ``corpus_unpacked_too_large``, or what the stream raises.
    """
    with tempfile.NamedTemporaryFile(prefix="probe-unpacked-", suffix=suffix) as copy:
        copied_bytes = 0
        while chunk := stream.read(CHUNK_BYTES):
            copied_bytes += len(chunk)
            if copied_bytes > _MAX_COPY_BYTES:
                raise CorpusError(
                    "corpus_unpacked_too_large",
                    f"The file unpacks to more than {_MAX_COPY_BYTES // 1024**3} GiB; split it.",
                )
            copy.write(chunk)
        copy.flush()
        yield Path(copy.name)


def detect_format(head: bytes, name: str, asked: CorpusFormat | None) -> CorpusFormat:
    """Tell the format of unpacked content.

    A binary format is known by its first bytes. Among text formats the request decides, then the name, then the
    first line. A ``.txt`` of JSON objects is jsonl unless the request says txt.

    Args:
        head: First bytes, unpacked.
        name: File name.
        asked: The format that the request names.

    Raises:
        CorpusError: ``corpus_format_unknown``, ``corpus_not_text``, ``corpus_invalid_utf8`` for UTF-16.
    """
    for magic, binary_format in _MAGICS:
        if head.startswith(magic):
            if asked is not None and asked is not binary_format:
                raise CorpusError(
                    "corpus_format_unknown",
                    f"The request says {asked.value}, the content is {binary_format.value}.",
                )
            return binary_format
    for magic, what in _FOREIGN_MAGICS.items():
        if head.startswith(magic):
            raise CorpusError("corpus_format_unknown", f"{name} is {what}; formats read: {_SUPPORTED}.")
    suffix = _suffix(name)
    found = asked or _SUFFIXES.get(suffix)
    if found in (CorpusFormat.PARQUET, CorpusFormat.NPY, CorpusFormat.NPZ):
        code = "corpus_parquet_damaged" if found is CorpusFormat.PARQUET else "embeddings_damaged"
        raise CorpusError(code, f"{name} does not begin like a {found.value} file; export it again.")
    if head.startswith(_UTF16_BOMS):
        raise CorpusError("corpus_invalid_utf8", f"{name} is UTF-16; save it as UTF-8.", row=1)
    _refuse_binary(head, name)
    first_line = next((line for line in head.removeprefix(_BOM).splitlines() if line.strip()), b"").strip()
    if found is CorpusFormat.JSONL and first_line.startswith(b"[") and _is_json_array(head, first_line):
        raise CorpusError(
            "corpus_format_unknown", f"{name} is one JSON array; write one object a line (jsonl) instead."
        )
    if asked is None and found in (None, CorpusFormat.TXT) and _is_json_row(first_line):
        return CorpusFormat.JSONL
    if found is not None:
        return found
    if suffix:
        raise CorpusError(
            "corpus_format_unknown",
            f"{name}: {suffix} is not a format that is read; formats: {_SUPPORTED}. If it is one of them, say which"
            " with the option format.",
        )
    for delimiter, separated in ((b"\t", CorpusFormat.TSV), (b",", CorpusFormat.CSV)):
        fields = first_line.decode("utf-8", "replace").split(delimiter.decode())
        if len(fields) > 1 and any(_COLUMN_NAMES.fullmatch(field.strip(' "')) for field in fields):
            return separated
    return CorpusFormat.TXT


def cut_after_last_line(head: bytes) -> bytes:
    """Return the complete lines of a head that may end inside a line, even inside a code point."""
    return head[: head.rfind(b"\n") + 1]


def _suffix(name: str) -> str:
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in (".gz", ".gzip") else path.suffix


def _is_json_row(line: bytes) -> bool:
    if not line.startswith((b"{", b'"')):
        return False
    try:
        return isinstance(json.loads(line), dict | str)
    except (ValueError, RecursionError):
        return False


def _is_json_array(head: bytes, first_line: bytes) -> bool:
    """Whether a file that begins with a bracket is one array, rather than an array on each line."""
    if head.removeprefix(_BOM).strip() == first_line:
        return True
    try:
        json.loads(first_line)
    except (ValueError, RecursionError):
        return True
    return False


def _refuse_binary(head: bytes, name: str) -> None:
    """Random bytes hold a tenth of control characters; text in whatever encoding holds next to none."""
    sample = head[:HEAD_BYTES]
    controls = len(sample) - len(sample.translate(None, _CONTROLS))
    if controls > 0.02 * len(sample):
        raise CorpusError("corpus_not_text", f"{name} is not text; formats read: {_SUPPORTED}.", row=1)
