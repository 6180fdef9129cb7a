"""Reading a stream of server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
    """One event: its name (``message`` unless the server names it) and its text."""

    name: str
    text: str


def read_events(chunks: Iterable[bytes]) -> Iterator[ServerEvent]:
    """Yield the events of a byte stream as they complete; an unfinished last one is dropped.

    Lines end at CR, LF or CRLF and nowhere else: `str.splitlines` would also break at U+2028 inside JSON.
    """
    name, texts = "", list[str]()
    for line in _lines(chunks):
        if not line:
            if texts:
                yield ServerEvent(name or "message", "\n".join(texts))
            name, texts = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            texts.append(value)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the finished lines of a byte stream without their ends; each byte is looked at once."""
    unfinished: list[bytes] = []
    after_cr = False
    for chunk in chunks:
        if not chunk:
            continue
        rest = chunk.removeprefix(b"\n") if after_cr else chunk
        after_cr = chunk.endswith(b"\r")
        *finished, last = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in finished:
            yield (b"".join(unfinished) + line).decode("utf-8", errors="replace")
            unfinished = []
        unfinished.append(last)
