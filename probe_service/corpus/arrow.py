"""Records of Arrow tables: parquet files, and the tables that `datasets` keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from probe_service.corpus.faults import Faults
from probe_service.corpus.formats import Unpacked, seekable_copy
from probe_service.corpus.records import RecordBatch, Records
from probe_service.errors import CorpusError

__all__ = ["parquet_records", "table_columns"]

_BATCH_RECORDS = 1024
_HEAD_RECORDS = 200


def parquet_records(unpacked: Unpacked, faults: Faults, max_row_bytes: int, stack: Any) -> Records:
    """Read a parquet file in batches.

    Args:
        unpacked: The file; one that is gzip-packed is unpacked into a temporary file.
        faults: Takes what is wrong.
        max_row_bytes: Longest text.
        stack: `contextlib.ExitStack` that closes the file.

    Raises:
        CorpusError: ``corpus_parquet_damaged``, here and while reading.
    """
    path: Path = stack.enter_context(seekable_copy(unpacked, ".parquet"))
    try:
        file = stack.enter_context(pq.ParquetFile(path))
        columns = tuple(file.schema_arrow.names)
        rows = file.metadata.num_rows
        scalar = [field.name for field in file.schema_arrow if not pa.types.is_nested(field.type)]
        head = next(file.iter_batches(_HEAD_RECORDS, columns=scalar), None)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(error) from error

    def batches(names: Sequence[str]) -> Iterator[RecordBatch]:
        done = 0
        tables = file.iter_batches(_BATCH_RECORDS, columns=list(names), use_threads=False)
        while True:
            try:
                batch = next(tables, None)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(error) from error
            if batch is None:
                return
            numbers = range(done + 1, done + 1 + batch.num_rows)
            yield RecordBatch(numbers, table_columns(batch, names, numbers, faults, max_row_bytes))
            done += batch.num_rows
            unpacked.report(unpacked.size_bytes * done // rows)

    values = {} if head is None else {name: _scalars(head.column(name)) for name in scalar}
    return Records(columns, values, batches)


def table_columns(
    batch: pa.RecordBatch | pa.Table,
    names: Sequence[str],
    numbers: Sequence[int],
    faults: Faults,
    max_row_bytes: int,
) -> dict[str, Any]:
    """Return the values of some columns; texts that are not UTF-8 or too long are faults, and None.

    Args:
        batch: Rows.
        names: The columns.
        numbers: Row number of each row.
        faults: Takes what is wrong.
        max_row_bytes: Longest text.
    """
    columns: dict[str, Any] = {}
    for name in names:
        array = batch.column(name)
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if _is_text(array.type):
            columns[name] = _texts(array, name, numbers, faults, max_row_bytes)
        elif _is_list(array.type) and _is_number(array.type.value_type):
            columns[name] = _vectors(array)
        else:
            columns[name] = _scalars(array)
    return columns


def _texts(
    array: pa.Array, name: str, numbers: Sequence[int], faults: Faults, max_row_bytes: int
) -> list[str | None]:
    lengths = pc.binary_length(array)
    if (pc.max(lengths).as_py() or 0) > max_row_bytes:
        too_long = pc.fill_null(pc.greater(lengths, max_row_bytes), False)
        for place in np.flatnonzero(too_long.to_numpy(zero_copy_only=False)).tolist():
            message = f"longer than {max_row_bytes:,} bytes; split or drop it."
            faults.add("corpus_row_too_large", numbers[place], message, column=name)
        array = pc.if_else(too_long, pa.scalar(None, array.type), array)
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        pass
    # Arrow does not check UTF-8 when it reads parquet.
    texts: list[str | None] = []
    for number, content in zip(numbers, array.cast(pa.large_binary()).to_pylist(), strict=True):
        try:
            texts.append(None if content is None else content.decode())
        except UnicodeDecodeError as error:
            message = f"invalid UTF-8 at byte {error.start + 1} of the text; write the column as UTF-8."
            faults.add("corpus_invalid_utf8", number, message, column=name)
            texts.append(None)
    return texts


def _vectors(array: pa.Array) -> np.ndarray | list[np.ndarray | None]:
    """Return lists of numbers as one array (b, d) if they are equally long and none is null, else one by one."""
    flat = array.flatten().to_numpy(zero_copy_only=False)
    if array.null_count == 0 and len(array):
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        if (lengths == lengths[0]).all():
            return flat.reshape(len(array), -1)  # type: ignore[no-any-return]
    return [
        None if scalar.values is None else scalar.values.to_numpy(zero_copy_only=False) for scalar in array
    ]


def _scalars(array: pa.Array) -> list[Any]:
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
        # A value that Python cannot hold (a date out of range, broken UTF-8 inside a list) is no text either.
        return [_scalar(value) for value in array]


def _scalar(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (UnicodeDecodeError, pa.ArrowException, ValueError, OverflowError):
        return float("nan")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _damaged(error: Exception) -> CorpusError:
    return CorpusError(
        "corpus_parquet_damaged", f"The parquet file cannot be read ({error}); export it again."
    )
