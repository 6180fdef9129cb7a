"""Records of a corpus as every reader gives them: in batches, by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RecordBatch", "Records"]


@dataclass(frozen=True)
class RecordBatch:
    """Some records, in file order.

    Args:
        numbers: Row numbers, length b, ascending.
        columns: Values of each column that was asked for, length b: texts, numbers, lists, None; a column of vectors
            may be an array (b, d).
    """

    numbers: Sequence[int]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """What a reader knows before it reads on.

    Args:
        columns: The columns that exist, as far as the head of the file shows; empty if it shows none.
        head: The first values of each column.
        batches: Reads the whole file, giving the named columns.
    """

    columns: tuple[str, ...]
    head: Mapping[str, Sequence[Any]]
    batches: Callable[[Sequence[str]], Iterator[RecordBatch]]
