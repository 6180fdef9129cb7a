"""A probe's intermediate results: files that are written at once or not at all, and the cancelling of long work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scratch"]


class Scratch:
    """A folder that tasks leave their results in.

    Args:
        folder: Made if it is not there.
        checkpoint: Called often in long work; may raise to cancel.
    """

    def __init__(self, folder: Path, checkpoint: Callable[[], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.checkpoint = folder, checkpoint

    def file(self, name: str) -> Path:
        """Where a result of this name lies."""
        return self.folder / name

    def save_text(self, name: str, text: str) -> None:
        """Write a text, in UTF-8."""
        with _replaced(self.folder / name) as partial:
            partial.write_text(text, encoding="utf-8")

    def save_lines(self, name: str, lines: Iterable[str]) -> None:
        """Write lines, in UTF-8, as they come."""
        with _replaced(self.folder / name) as partial, partial.open("w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def save_array(self, name: str, array: NDArray[Any]) -> None:
        """Write one array as ``.npy``."""
        with _replaced(self.folder / name) as partial, partial.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)

    def load_array(self, name: str) -> NDArray[Any]:
        """Read one array."""
        array: NDArray[Any] = np.load(self.folder / name, allow_pickle=False)
        return array

    def save_columns(self, name: str, columns: Mapping[str, NDArray[Any]]) -> None:
        """Write several arrays as ``.npz``."""
        with _replaced(self.folder / name) as partial, partial.open("wb") as stream:
            np.savez(stream, **columns)  # type: ignore[arg-type]

    def load_columns(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Read several files of columns, put one after the other along the first axis."""
        loaded = []
        for name in names:
            with np.load(self.folder / name, allow_pickle=False) as arrays:
                loaded.append(dict(arrays))
        return {name: np.concatenate([arrays[name] for arrays in loaded]) for name in loaded[0]}


class _replaced:  # noqa: N801 - reads as a verb
    """Write beside a file, then put it in place at once, so that no reader sees half of it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._partial = file.with_name(f"{file.name}.partial-{os.getpid()}")

    def __enter__(self) -> Path:
        return self._partial

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        if kind is None:
            self._partial.replace(self._file)
        else:
            self._partial.unlink(missing_ok=True)
