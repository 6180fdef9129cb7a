"""Stored corpora, by the SHA-256 of their bytes, and the folders of jobs.

::

    home/corpora/<sha256>/content       the bytes as uploaded
    home/corpora/<sha256>/meta.json     a StoredCorpus
    home/corpora/<sha256>/kept          empty; present if somebody uploaded the corpus for its own sake
    home/corpora/.incoming-<random>/    an upload under way
    home/jobs/<job id>/                 what a job writes: report.json, pairs.jsonl, …

Bytes are hashed while they are written and never held in memory; a corpus appears whole, by one rename, or
not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from probe_service.errors import RequestError, ServiceError
from probe_service.schemas import StoredCorpus

__all__ = ["HEAD_BYTES", "CorpusStore", "CorpusWriter", "storage_errors"]

HEAD_BYTES = 64 * 1024
"""How much of an upload's beginning is looked at before the rest has arrived."""

_ABANDONED_AFTER_SECONDS = 24 * 3600.0
_CORPUS_ID = re.compile(r"[0-9a-f]{64}")


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Translate the operating system's errors (disk full, no permission) into `storage_failed`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ServiceError("storage_failed", f"{doing} failed: {reason}; nothing was kept.") from error


class CorpusWriter:
    """One upload under way; a context manager that leaves nothing behind unless `commit` was called.

    Args:
        root: The folder of corpora.
        limit_bytes: Largest size accepted.
    """

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._limit_bytes = limit_bytes
        self._digest = hashlib.sha256()
        self._head = bytearray()
        self.size_bytes = 0
        with storage_errors("Storing the corpus"):
            root.mkdir(parents=True, exist_ok=True)
            self._folder = root / f".incoming-{uuid.uuid4().hex}"
            self._folder.mkdir()
            self._file = (self._folder / "content").open("wb")

    @property
    def head(self) -> bytes:
        """The first bytes, at most `HEAD_BYTES`."""
        return bytes(self._head)

    def write(self, chunk: bytes) -> None:
        """Append bytes.

        Raises:
            ServiceError: `payload_too_large` above the limit, `storage_failed` if the disk refuses.
        """
        self.size_bytes += len(chunk)
        if self.size_bytes > self._limit_bytes:
            raise ServiceError(
                "payload_too_large", f"The corpus is larger than the limit of {self._limit_bytes:,} bytes."
            )
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        self._digest.update(chunk)
        with storage_errors("Storing the corpus"):
            self._file.write(chunk)

    def commit(self, name: str, corpus_format: str) -> StoredCorpus:
        """Make the corpus visible under its hash; equal bytes that are there already stay as they are."""
        with storage_errors("Storing the corpus"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            stored = StoredCorpus(
                id=self._digest.hexdigest(),
                name=name,
                size_bytes=self.size_bytes,
                format=corpus_format,
                created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
            (self._folder / "meta.json").write_text(stored.model_dump_json(), encoding="utf-8")
            target = self._root / stored.id
            try:
                self._folder.rename(target)
            except OSError:
                # rename refuses a folder that is not empty: the corpus is there already.
                if not (target / "meta.json").is_file():
                    raise
        return stored

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class CorpusStore:
    """Corpora by content, and job folders, below one home folder that the API and the workers share.

    Args:
        home: The service's folder.
        limit_bytes: Largest corpus accepted.
    """

    def __init__(self, home: Path, limit_bytes: int) -> None:
        self._corpora = home / "corpora"
        self._jobs = home / "jobs"
        self._limit_bytes = limit_bytes

    def writer(self) -> CorpusWriter:
        """Begin an upload."""
        return CorpusWriter(self._corpora, self._limit_bytes)

    def get(self, corpus_id: str) -> StoredCorpus:
        """Return what is known about a corpus.

        Raises:
            RequestError: `corpus_not_found`.
        """
        try:
            meta = (self._folder(corpus_id) / "meta.json").read_text(encoding="utf-8")
            return StoredCorpus.model_validate_json(meta)
        except (OSError, ValidationError) as error:
            raise self._not_found(corpus_id) from error

    def content_path(self, corpus_id: str) -> Path:
        """Return the file that holds the bytes of a stored corpus.

        Raises:
            RequestError: `corpus_not_found`.
        """
        self.get(corpus_id)
        return self._folder(corpus_id) / "content"

    def list(self) -> list[StoredCorpus]:
        """Return all stored corpora, newest first."""
        if not self._corpora.is_dir():
            return []
        found = []
        for folder in self._corpora.iterdir():
            if _CORPUS_ID.fullmatch(folder.name):
                try:
                    found.append(self.get(folder.name))
                except RequestError:
                    continue  # deleted meanwhile
        return sorted(found, key=lambda corpus: (corpus.created_at, corpus.id), reverse=True)

    def keep(self, corpus_id: str) -> None:
        """Mark a corpus as uploaded for its own sake: it outlives the jobs that use it."""
        folder = self._folder(corpus_id)
        with storage_errors("Storing the corpus"):
            (folder / "kept").touch()

    def is_kept(self, corpus_id: str) -> bool:
        """Whether the corpus was uploaded for its own sake."""
        return (self._folder(corpus_id) / "kept").exists()

    def delete(self, corpus_id: str) -> None:
        """Delete a corpus.

        Raises:
            RequestError: `corpus_not_found`.
        """
        self.get(corpus_id)
        # Out of sight first, so that nobody finds half a corpus.
        doomed = self._corpora / f".incoming-{uuid.uuid4().hex}"
        try:
            self._folder(corpus_id).rename(doomed)
        except FileNotFoundError as error:
            raise self._not_found(corpus_id) from error
        shutil.rmtree(doomed, ignore_errors=True)

    def remove_abandoned_uploads(self) -> int:
        """Delete what uploads left behind whose process died; return how many."""
        removed = 0
        if self._corpora.is_dir():
            for folder in self._corpora.glob(".incoming-*"):
                try:
                    age_seconds = time.time() - folder.stat().st_mtime
                except OSError:
                    continue
                if age_seconds > _ABANDONED_AFTER_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
        return removed

    def job_folder(self, job_id: str) -> Path:
        """Return the folder of a job, which need not exist.

        Raises:
            ValueError: The id is not a UUID.
        """
        return self._jobs / str(uuid.UUID(job_id))

    def delete_job_folder(self, job_id: str) -> None:
        """Delete what a job stored, if anything."""
        shutil.rmtree(self.job_folder(job_id), ignore_errors=True)

    def append_to_job(self, job_id: str, file_name: str, record: dict[str, object]) -> None:
        """Append one JSON line to a file of a job."""
        folder = self.job_folder(job_id)
        with storage_errors("Recording in the job's folder"):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / file_name).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")

    def _folder(self, corpus_id: str) -> Path:
        if not _CORPUS_ID.fullmatch(corpus_id):
            raise self._not_found(corpus_id)
        return self._corpora / corpus_id

    @staticmethod
    def _not_found(corpus_id: str) -> RequestError:
        return RequestError(
            "corpus_not_found", f"No stored corpus has the id {corpus_id[:80]!r}; upload it first."
        )
