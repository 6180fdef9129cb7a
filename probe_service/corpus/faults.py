"""Faults of a corpus: collected over the whole file, then raised as the first one with its count."""

from __future__ import annotations

from dataclasses import dataclass

from probe_service.errors import CorpusError

__all__ = ["Faults"]


@dataclass
class _Fault:
    message: str
    row: int
    column: str | None
    count: int


class Faults:
    """Bad rows by code: of each code the first row, what was wrong there, and how many rows have it.

    Args:
        row_noun: What a row number counts, e.g. ``line``. Row 0 is the header.
    """

    def __init__(self, row_noun: str = "row") -> None:
        self.row_noun = row_noun
        self._by_code: dict[str, _Fault] = {}

    def __bool__(self) -> bool:
        return bool(self._by_code)

    def add(self, code: str, row: int, message: str, *, column: str | None = None) -> None:
        """Note that `row` has the fault `code`; `message` says what was wrong there and what to do."""
        fault = self._by_code.get(code)
        if fault is None:
            self._by_code[code] = _Fault(message, row, column, 1)
            return
        fault.count += 1
        if row < fault.row:
            fault.message, fault.row, fault.column = message, row, column

    def raise_first(self, *, counted: bool = True) -> None:
        """Raise the fault with the lowest row number, if there is any.

        Args:
            counted: False where only the head of the file was read: the error then carries no count.

        Raises:
            CorpusError: The first fault, with its row and the count of all rows that have it.
        """
        if not self._by_code:
            return
        code, fault = min(self._by_code.items(), key=lambda item: item[1].row)
        others = ""
        if counted and fault.count > 1:
            others = f" ({fault.count} {self.row_noun}s have this fault.)"
        where = f"{self.row_noun.capitalize()} {fault.row}" if fault.row else "The header"
        raise CorpusError(
            code,
            f"{where}: {fault.message}{others}",
            row=max(fault.row, 1),
            column=fault.column,
            count=fault.count if counted else None,
        )
