"""Records of numpy files: vectors, with ids, texts and groups beside them in an npz."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from probe_service.corpus.formats import Unpacked, seekable_copy, spooled_copy
from probe_service.corpus.records import RecordBatch, Records
from probe_service.errors import CorpusError

__all__ = ["check_npy_header", "npy_records", "npz_records"]

_BATCH_BYTES = 1024 * 1024
_HEAD_RECORDS = 200


def npy_records(unpacked: Unpacked, stack: ExitStack) -> Records:
    """Read an array (n, d) as the column ``embeddings``, mapped rather than loaded.

    Raises:
        CorpusError: ``embeddings_pickled``, ``embeddings_not_numeric``, ``embeddings_damaged``.
    """
    array = _mapped(stack.enter_context(seekable_copy(unpacked, ".npy")), unpacked.path.name)
    if array.ndim != 2:
        raise CorpusError(
            "embeddings_not_numeric", f"The array has shape {array.shape}; vectors need shape (rows, width)."
        )
    return _records({"embeddings": array}, unpacked)


def npz_records(unpacked: Unpacked, stack: ExitStack) -> Records:
    """Read each array of an archive as a column: vectors (n, d), and texts, ids or groups (n,).

    A lone array of any name is the column ``embeddings``. Members are unpacked into temporary files and mapped.

    Raises:
        CorpusError: As `npy_records`, and ``embeddings_widths_differ`` if the arrays are not equally long.
    """
    path = stack.enter_context(seekable_copy(unpacked, ".npz"))
    try:
        archive = stack.enter_context(zipfile.ZipFile(path))
        members = [member for member in archive.namelist() if member.endswith(".npy")]
        arrays = {}
        for member in members:
            with archive.open(member) as content:
                copy = stack.enter_context(spooled_copy(content, ".npy"))
            arrays[member.removesuffix(".npy")] = _mapped(copy, member)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CorpusError(
            "embeddings_damaged", f"The npz archive cannot be read ({error}); save it again."
        ) from error
    if not arrays:
        raise CorpusError("corpus_format_unknown", "The zip archive holds no .npy array.")
    if len(arrays) == 1:
        arrays = {"embeddings": next(iter(arrays.values()))}
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise CorpusError("embeddings_widths_differ", f"The arrays are not equally long: {lengths}.")
    return _records(arrays, unpacked)


def _records(arrays: dict[str, np.ndarray], unpacked: Unpacked) -> Records:
    rows = len(next(iter(arrays.values())))
    row_bytes = sum(array.itemsize * (array.shape[1] if array.ndim > 1 else 1) for array in arrays.values())
    step = max(1, _BATCH_BYTES // max(row_bytes, 1))

    def batches(names: Sequence[str]) -> Iterator[RecordBatch]:
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            columns = {name: _values(arrays[name][start:stop]) for name in names}
            yield RecordBatch(range(start + 1, stop + 1), columns)
            unpacked.report(unpacked.size_bytes * stop // rows)

    head = {name: array[:_HEAD_RECORDS].tolist() for name, array in arrays.items() if array.ndim == 1}
    return Records(tuple(arrays), head, batches)


def _values(part: np.ndarray) -> Any:
    return np.array(part) if part.ndim == 2 else part.tolist()


def check_npy_header(file: BinaryIO, name: str) -> tuple[int, ...]:
    """Return the shape of an array after checking that it holds plain numbers or texts; nothing is unpickled.

    Raises:
        CorpusError: ``embeddings_pickled``, ``embeddings_not_numeric``, ``embeddings_damaged``.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except (ValueError, EOFError) as error:
        raise _damaged(name, error) from error
    if dtype.hasobject:
        raise CorpusError(
            "embeddings_pickled",
            f"{name} holds pickled objects, which are never unpickled; save vectors with a numeric dtype.",
        )
    if dtype.names is not None or dtype.kind not in "fiuU":
        raise CorpusError(
            "embeddings_not_numeric", f"{name} holds {dtype}; vectors are float or integer arrays."
        )
    return shape


def _mapped(path: Path, name: str) -> np.ndarray:
    with path.open("rb") as file:
        shape = check_npy_header(file, name)
    if 0 in shape:
        return np.empty(shape, np.float32)
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, EOFError, OSError) as error:
        raise _damaged(name, error) from error


def _damaged(name: str, error: Exception) -> CorpusError:
    return CorpusError("embeddings_damaged", f"{name} cannot be read ({error}); save it again.")
