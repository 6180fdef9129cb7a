"""A cache of vectors on disk, so that a second probe, or one that was killed, encodes only what is new."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from probe_service.encode.protocol import DIGEST_BYTES, CheckedEncoder, EncodedTexts, digest_texts
from probe_service.errors import ServiceError

__all__ = ["CacheHits", "VectorCache", "encode_with_cache"]

_BUSY_SECONDS = 60.0
_DIGESTS_PER_QUERY = 500
_SECONDS_PER_WRITE = 1.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (
    text_digest BLOB PRIMARY KEY,
    vector BLOB NOT NULL,
    was_truncated INTEGER NOT NULL,
    input_digest BLOB NOT NULL
);
"""


@dataclass(frozen=True)
class CacheHits:
    """What the cache had for n texts.

    Args:
        encoded: n rows; a row that was not found is zero.
        was_found: (n,) bool.
    """

    encoded: EncodedTexts
    was_found: NDArray[np.bool_]

    @property
    def found_share(self) -> float:
        """Share of the texts that were found, 0–1; 1 for no texts."""
        return float(self.was_found.mean()) if len(self.was_found) else 1.0


class VectorCache:
    """Vectors of one encoder by the digest of their text, in one SQLite file that several processes may share.

    The file is ``<folder>/<fingerprint>.sqlite``; the fingerprint covers weights, pooling, prompt, maximum length,
    dtype and normalisation, so that a vector found here is the vector that the encoder would give.

    Args:
        folder: Folder of the caches, made if need be.
        fingerprint: `EncoderInfo.fingerprint`.
        dimension: Width d of the vectors.

    Raises:
        ServiceError: storage_failed, naming the file, if it cannot be made or read.
    """

    def __init__(self, folder: Path, fingerprint: str, dimension: int) -> None:
        self.path = folder / f"{fingerprint}.sqlite"
        self.dimension = dimension
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        with self._connection() as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(_SCHEMA)
            connection.execute("INSERT OR IGNORE INTO facts VALUES ('dimension', ?)", (str(dimension),))
            (stored,) = connection.execute("SELECT value FROM facts WHERE name = 'dimension'").fetchone()
        if stored != str(dimension):
            raise self._failed(f"it holds vectors of width {stored}, not {dimension}")

    def get(self, texts: Sequence[str]) -> CacheHits:
        """Return what is stored for the texts.

        Raises:
            ServiceError: storage_failed.
        """
        encoded = EncodedTexts.empty(len(texts), self.dimension)
        was_found = np.zeros(len(texts), dtype=np.bool_)
        rows_of: dict[bytes, list[int]] = {}
        for row, digest in enumerate(digest_texts(texts)):
            rows_of.setdefault(digest, []).append(row)
        wanted = list(rows_of)
        with self._connection() as connection:
            for start in range(0, len(wanted), _DIGESTS_PER_QUERY):
                part = wanted[start : start + _DIGESTS_PER_QUERY]
                marks = ",".join("?" * len(part))
                found = connection.execute(
                    f"SELECT text_digest, vector, was_truncated, input_digest FROM vectors WHERE text_digest IN ({marks})",  # noqa: S608
                    part,
                )
                for text_digest, vector, was_truncated, input_digest in found:
                    if len(vector) != 4 * self.dimension or len(input_digest) != DIGEST_BYTES:
                        raise self._failed("a stored vector has the wrong width")
                    rows = rows_of[text_digest]
                    encoded.vectors[rows] = np.frombuffer(vector, dtype="<f4")
                    encoded.was_truncated[rows] = bool(was_truncated)
                    encoded.input_digests[rows] = np.frombuffer(input_digest, dtype=np.uint8)
                    was_found[rows] = True
        return CacheHits(encoded, was_found)

    def holds(self, texts: Sequence[str]) -> bool:
        """Whether the vectors of all the texts are stored.

        Raises:
            ServiceError: storage_failed.
        """
        digests = list(dict.fromkeys(digest_texts(texts)))
        with self._connection() as connection:
            for start in range(0, len(digests), _DIGESTS_PER_QUERY):
                part = digests[start : start + _DIGESTS_PER_QUERY]
                marks = ",".join("?" * len(part))
                (found,) = connection.execute(
                    f"SELECT COUNT(*) FROM vectors WHERE text_digest IN ({marks})",  # noqa: S608
                    part,
                ).fetchone()
                if found < len(part):
                    return False
        return True

    def put(self, texts: Sequence[str], encoded: EncodedTexts) -> None:
        """Store the vectors of the texts; those already there are replaced.

        Raises:
            ServiceError: storage_failed.
        """
        rows = [
            (
                text_digest,
                encoded.vectors[row].astype("<f4").tobytes(),
                int(encoded.was_truncated[row]),
                encoded.input_digests[row].tobytes(),
            )
            for row, text_digest in enumerate(digest_texts(texts))
        ]
        with self._connection() as connection:
            connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)", rows)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open for one operation: threads and forked processes then never share a connection."""
        try:
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        try:
            # A killed process loses nothing in WAL mode; only a power cut may lose the last write.
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                yield connection
        except sqlite3.Error as error:
            raise self._failed(error) from error
        finally:
            connection.close()

    def _failed(self, fault: object) -> ServiceError:
        return ServiceError(
            "storage_failed",
            f"The cache of vectors {self.path} cannot be used: {fault}. If it is damaged, delete that file; vectors"
            " are then computed again.",
        )


def encode_with_cache(
    encoder: CheckedEncoder,
    texts: Sequence[str],
    cache: VectorCache,
    *,
    checkpoint: Callable[[], None] | None = None,
) -> EncodedTexts:
    """Return the vectors of the texts, encoding only those that the cache lacks, each distinct text once.

    Args:
        encoder: It is loaded only if the cache lacks a text.
        texts: n texts.
        cache: The cache of this encoder; new vectors are written to it about every second, so that a killed
            process loses that much, and what its calls were at work on.
        checkpoint: Called after every call to the model; it may raise in order to cancel.

    Returns:
        n rows in the order of the texts.

    Raises:
        EncoderError: Whatever the encoder raises.
        ServiceError: storage_failed.
    """
    hits = cache.get(texts)
    encoded = hits.encoded
    rows_of: dict[str, list[int]] = {}
    for row in np.flatnonzero(~hits.was_found).tolist():
        rows_of.setdefault(texts[row], []).append(row)
    if not rows_of:
        return encoded
    missing = list(rows_of)
    first_row = np.array([rows[0] for rows in rows_of.values()], dtype=np.intp)
    unwritten: list[int] = []
    written_at = time.monotonic()

    def write() -> None:
        if unwritten:
            cache.put([missing[place] for place in unwritten], encoded.take(first_row[unwritten]))
            unwritten.clear()

    # The encoder works on the next texts while these are written.
    with contextlib.closing(encoder.encoder.stream(missing)) as coming:
        try:
            for places, fresh in coming:
                encoded.put(first_row[places], fresh)
                unwritten.extend(places.tolist())
                if time.monotonic() - written_at >= _SECONDS_PER_WRITE:
                    write()
                    written_at = time.monotonic()
                if checkpoint is not None:
                    checkpoint()
        finally:
            # Also when the checkpoint cancels or the model fails: what is done is kept.
            write()
    for first, *repeats in rows_of.values():
        if repeats:
            encoded.put(np.array(repeats, dtype=np.intp), encoded.take(np.full(len(repeats), first)))
    return encoded
