"""A read corpus, and its place on disk."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from probe_service.errors import CorpusError
from probe_service.schemas import CorpusInfo, CorpusKind

__all__ = ["Corpus", "load_corpus", "save_corpus"]

_FILE_NAME = "corpus.parquet"
_INFO_KEY = b"probe_service.corpus_info"


@dataclass(frozen=True)
class Corpus:
    """The rows that were drawn, m of them, in file order, and what was counted over all n usable rows.

    Args:
        kind: What a row is.
        anchors: Texts of `sentences`, anchors of `pairs` and `tuples`; None for `embeddings` without texts. Length m.
        positives: For `pairs` and `tuples`.
        negatives: For `tuples`: the row's own hard negatives.
        vectors: For `embeddings`: float32 (m, d), as supplied; no zero and no non-finite rows.
        ids: From the id column; an empty id where a row has none.
        groups: From the group column, or from the label column if labels are meanings; None where a row has none.
        sources: From the source column.
        row_numbers: int64 (m,), ascending, from 1: lines in txt and jsonl, records elsewhere (a header not counted).
        info: What was read, left out and counted; `truncated` is left to the encoder.
    """

    kind: CorpusKind
    anchors: list[str] | None
    positives: list[str] | None
    negatives: list[list[str]] | None
    vectors: np.ndarray | None
    ids: list[str] | None
    groups: list[str | None] | None
    sources: list[str] | None
    row_numbers: np.ndarray
    info: CorpusInfo

    def __len__(self) -> int:
        return len(self.row_numbers)


def save_corpus(corpus: Corpus, folder: Path) -> None:
    """Write a corpus into a folder as one parquet file, whole or not at all; `load_corpus` gives it back exactly.

    Texts are kept as bytes, so that even a lone surrogate survives. The counts are JSON in the file's metadata.

    Args:
        corpus: The corpus.
        folder: Made if it is not there; a corpus that is there is replaced.
    """
    columns: dict[str, pa.Array] = {"row_number": pa.array(corpus.row_numbers, pa.int64())}
    for name in ("anchors", "positives", "ids", "groups", "sources"):
        texts = getattr(corpus, name)
        if texts is not None:
            columns[name] = pa.array(_packed(texts), pa.large_binary())
    if corpus.negatives is not None:
        columns["negatives"] = pa.array(
            [_packed(texts) for texts in corpus.negatives], pa.large_list(pa.large_binary())
        )
    if corpus.vectors is not None:
        flat = pa.array(np.ascontiguousarray(corpus.vectors, np.float32).reshape(-1))
        columns["vectors"] = pa.FixedSizeListArray.from_arrays(flat, corpus.vectors.shape[1])
    table = pa.table(columns).replace_schema_metadata({_INFO_KEY: corpus.info.model_dump_json()})
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".corpus-", dir=folder)
    os.close(handle)
    try:
        pq.write_table(table, name, compression="zstd")
        Path(name).replace(folder / _FILE_NAME)
    finally:
        Path(name).unlink(missing_ok=True)


def load_corpus(folder: Path) -> Corpus:
    """Read a corpus that `save_corpus` wrote.

    Raises:
        CorpusError: ``corpus_not_saved`` if there is none, or it cannot be read.
    """
    try:
        table = pq.read_table(folder / _FILE_NAME)
        info = CorpusInfo.model_validate(json.loads(table.schema.metadata[_INFO_KEY]))
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise CorpusError(
            "corpus_not_saved", f"No saved corpus can be read in {folder} ({error})."
        ) from error
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    vectors = None
    if "vectors" in columns:
        width = columns["vectors"].type.list_size
        vectors = columns["vectors"].flatten().to_numpy(zero_copy_only=False).reshape(-1, width).copy()
    negatives = None
    if "negatives" in columns:
        negatives = [_unpacked(texts) for texts in columns["negatives"].to_pylist()]
    texts = {
        name: _unpacked(columns[name].to_pylist()) if name in columns else None
        for name in ("anchors", "positives", "ids", "groups", "sources")
    }
    return Corpus(
        kind=info.kind,
        anchors=texts["anchors"],
        positives=texts["positives"],
        negatives=negatives,
        vectors=vectors,
        ids=texts["ids"],
        groups=texts["groups"],  # type: ignore[arg-type]  # lists are invariant
        sources=texts["sources"],
        row_numbers=columns["row_number"].to_numpy(zero_copy_only=False).copy(),
        info=info,
    )


def _packed(texts: Sequence[str | None]) -> list[bytes | None]:
    return [None if text is None else text.encode("utf-8", "surrogatepass") for text in texts]


def _unpacked(texts: Sequence[bytes | None]) -> list[str]:
    return [None if text is None else text.decode("utf-8", "surrogatepass") for text in texts]  # type: ignore[misc]
