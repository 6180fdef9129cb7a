"""Small corpora on disk, and one call to read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe_service.corpus import Corpus, read_corpus
from probe_service.errors import CorpusError
from probe_service.schemas import ColumnRoles, CorpusOptions

REFUSED_ROW_BYTES = 4096


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def options(columns: dict[str, Any] | None = None, **fields: Any) -> CorpusOptions:
    return CorpusOptions(columns=ColumnRoles(**(columns or {})), **fields)


def read(
    path: Path | str,
    columns: dict[str, Any] | None = None,
    *,
    sample_size: int = 1000,
    max_row_bytes: int = REFUSED_ROW_BYTES,
    **fields: Any,
) -> Corpus:
    """Read with everything kept, at a row limit that small files can pass."""
    return read_corpus(
        path,
        options(columns, **fields),
        sample_size=sample_size,
        rng=np.random.default_rng(0),
        max_row_bytes=max_row_bytes,
    )


def refused(path: Path | str, code: str, columns: dict[str, Any] | None = None, **fields: Any) -> CorpusError:
    with pytest.raises(CorpusError) as caught:
        read(path, columns, **fields)
    assert caught.value.code == code, caught.value
    return caught.value
