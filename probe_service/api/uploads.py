"""Bodies: multipart uploads streamed to the store, and smaller ones whole, with a limit.

Nothing here holds an upload in memory. What can be seen in the headers, the JSON part or the first 64 KiB is
refused while the rest is still under way.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi.concurrency import run_in_threadpool
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from probe_service.corpus import sniff_corpus
from probe_service.errors import RequestError, ServiceError
from probe_service.schemas import CorpusFormat, CorpusOptions
from probe_service.settings import Settings
from probe_service.store import HEAD_BYTES, CorpusWriter

__all__ = ["UploadedCorpus", "clean_name", "media_type", "read_body", "receive_upload", "write_rows"]

_FORM_OVERHEAD_BYTES = 64 * 1024
_NAME_LENGTH = 200
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class UploadedCorpus:
    """A corpus whose bytes have all arrived.

    Args:
        writer: Holds the bytes, not yet committed.
        name: File name, cleaned.
        format: As sniffed.
        form: Text of the other part (`request` or `options`), or None.
    """

    writer: CorpusWriter
    name: str
    format: CorpusFormat
    form: bytes | None


def media_type(request: Request) -> str:
    """Return the media type of a body, without parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def clean_name(name: str | None, default: str) -> str:
    """Return a file name for people: its last part, printable, of bounded length."""
    last = re.split(r"[\\/]", name or "")[-1]
    return _UNPRINTABLE.sub("", last).strip()[:_NAME_LENGTH] or default


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read a body whole.

    Raises:
        ServiceError: `payload_too_large`.
    """
    request.state.body_unread = True
    _refuse_announced(request, limit_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise ServiceError("payload_too_large", _too_large("body", limit_bytes))
    request.state.body_unread = False
    return bytes(body)


async def receive_upload(
    request: Request,
    writer: CorpusWriter,
    settings: Settings,
    *,
    form_name: str,
    options_of: Callable[[bytes], CorpusOptions],
) -> UploadedCorpus:
    """Stream the parts `file` and, before or after it, a JSON part into the store.

    Args:
        request: A multipart request.
        writer: Takes the file's bytes.
        settings: Limits.
        form_name: Name of the JSON part.
        options_of: Checks the JSON part as soon as it is there, and returns how to read the corpus.

    Raises:
        CorpusError: The first 64 KiB already show a fault.
        RequestError: The parts are not as they should be.
        ServiceError: `payload_too_large`, `storage_failed`.
    """
    request.state.body_unread = True
    _refuse_announced(request, settings.max_upload_bytes + settings.max_inline_bytes + _FORM_OVERHEAD_BYTES)
    reception = _Reception(writer, settings, form_name, options_of)
    async for pieces in _pieces(request):
        for piece in pieces:
            # Hashing and the disk are slow enough to be kept off the event loop.
            await run_in_threadpool(reception.take, piece)
    request.state.body_unread = False
    return await run_in_threadpool(reception.finish)


def write_rows(writer: CorpusWriter, rows: list[dict[str, Any] | str]) -> None:
    """Write rows that came inline as JSON lines; a plain text becomes the column `text`."""
    for row in rows:
        fields = {"text": row} if isinstance(row, str) else row
        writer.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")


@dataclass
class _Piece:
    """A stretch of one part: its headers at the beginning, bytes, and whether it ends here."""

    name: str
    file_name: str | None
    payload: bytes
    begins: bool = False
    ends: bool = False


class _Reception:
    """Takes the pieces of a form in order."""

    def __init__(
        self,
        writer: CorpusWriter,
        settings: Settings,
        form_name: str,
        options_of: Callable[[bytes], CorpusOptions],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._form_name = form_name
        self._options_of = options_of
        self._options: CorpusOptions | None = None
        self._form = bytearray()
        self._form_seen = False
        self._name: str | None = None
        self._format: CorpusFormat | None = None

    def take(self, piece: _Piece) -> None:
        if piece.name == "file":
            self._take_file(piece)
        elif piece.name == self._form_name:
            self._take_form(piece)
        else:
            raise RequestError(
                "request_invalid",
                f"The form has a part {piece.name[:80]!r}; send {self._form_name!r} and then 'file'.",
                column=piece.name[:80],
            )

    def finish(self) -> UploadedCorpus:
        if self._name is None:
            raise RequestError("request_invalid", "The form has no part 'file'.", column="file")
        if self._format is None:
            self._format = self._sniff(complete=self._writer.size_bytes <= HEAD_BYTES)
        return UploadedCorpus(
            self._writer, self._name, self._format, bytes(self._form) if self._form_seen else None
        )

    def _take_file(self, piece: _Piece) -> None:
        if piece.begins:
            if self._name is not None:
                raise RequestError(
                    "request_invalid", "The form has more than one part 'file'.", column="file"
                )
            self._name = clean_name(piece.file_name, "corpus")
        self._writer.write(piece.payload)
        # Without the request, which may name columns and format, the beginning cannot be judged yet.
        if self._format is None and self._form_seen and self._writer.size_bytes > HEAD_BYTES:
            self._format = self._sniff(complete=False)

    def _take_form(self, piece: _Piece) -> None:
        if piece.begins:
            if self._form_seen:
                raise RequestError(
                    "request_invalid",
                    f"The form has more than one part {self._form_name!r}.",
                    column=self._form_name,
                )
            self._form_seen = True
        self._form += piece.payload
        if len(self._form) > self._settings.max_inline_bytes:
            raise ServiceError(
                "payload_too_large", _too_large(f"part {self._form_name!r}", self._settings.max_inline_bytes)
            )
        if piece.ends:
            self._options = self._options_of(bytes(self._form))

    def _sniff(self, *, complete: bool) -> CorpusFormat:
        options = self._options if self._options is not None else self._options_of(b"{}")
        return sniff_corpus(
            self._writer.head,
            self._name or "corpus",
            options,
            complete=complete,
            max_row_bytes=self._settings.max_row_bytes,
        )


@dataclass
class _Headers:
    """Headers of the part that the parser is in."""

    field_name: bytes = b""
    field_value: bytes = b""
    disposition: bytes = b""

    def end_header(self) -> None:
        if self.field_name.lower() == b"content-disposition":
            self.disposition = self.field_value
        self.field_name = self.field_value = b""


@dataclass
class _Form:
    """Callbacks of the multipart parser: collects pieces until they are fetched."""

    pieces: list[_Piece] = field(default_factory=list)
    complete: bool = False
    _headers: _Headers = field(default_factory=_Headers)
    _name: str = ""
    _file_name: str | None = None

    def on_part_begin(self) -> None:
        self._headers = _Headers()

    def on_header_field(self, chunk: bytes, start: int, end: int) -> None:
        self._headers.field_name += chunk[start:end]

    def on_header_value(self, chunk: bytes, start: int, end: int) -> None:
        self._headers.field_value += chunk[start:end]

    def on_header_end(self) -> None:
        self._headers.end_header()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        file_name = options.get(b"filename")
        self._file_name = None if file_name is None else file_name.decode("utf-8", "replace")
        self.pieces.append(_Piece(self._name, self._file_name, b"", begins=True))

    def on_part_data(self, chunk: bytes, start: int, end: int) -> None:
        self.pieces.append(_Piece(self._name, self._file_name, chunk[start:end]))

    def on_part_end(self) -> None:
        self.pieces.append(_Piece(self._name, self._file_name, b"", ends=True))

    def on_end(self) -> None:
        self.complete = True


async def _pieces(request: Request) -> AsyncIterator[list[_Piece]]:
    """Parse a multipart body as it arrives."""
    _, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise RequestError("bad_request", "The multipart body names no boundary.")
    form = _Form()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.on_part_begin,
            "on_header_field": form.on_header_field,
            "on_header_value": form.on_header_value,
            "on_header_end": form.on_header_end,
            "on_headers_finished": form.on_headers_finished,
            "on_part_data": form.on_part_data,
            "on_part_end": form.on_part_end,
            "on_end": form.on_end,
        },
    )
    try:
        async for chunk in request.stream():
            parser.write(chunk)
            pieces, form.pieces = form.pieces, []
            yield pieces
        parser.finalize()
    except MultipartParseError as error:
        raise RequestError("bad_request", f"The multipart body is broken: {error}.") from error
    if not form.complete:
        raise RequestError("bad_request", "The multipart body ends before its last part does.")


def _refuse_announced(request: Request, limit_bytes: int) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise ServiceError("payload_too_large", _too_large("body", limit_bytes))


def _too_large(what: str, limit_bytes: int) -> str:
    return f"The {what} is larger than the limit of {limit_bytes:,} bytes."
