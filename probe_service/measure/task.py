"""The shape of a measurement that is made in short parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["STEP_SECONDS", "Task", "batch_seconds", "run_all"]

STEP_SECONDS = 1.0
"""Work that one part is cut to, by a cautious guess."""


class Task(Protocol):
    """A measurement in parts.

    Whether a part was run is not the task's business: whoever runs the parts remembers it.
    """

    @property
    def name(self) -> str:
        """Tells this task from every other of the same probe."""

    def parts(self) -> list[Any]:
        """The parts, small and printable; the same list every time."""

    def run(self, part: Any) -> None:
        """Measure one part and leave its file."""


def run_all(tasks: Iterable[Task]) -> None:
    """Run every part of the tasks, here and now."""
    for task in tasks:
        for part in task.parts():
            task.run(part)


def batch_seconds(
    size: int, dimension: int, candidates_per_row: int = 1, *, num_anchors: int | None = None
) -> float:
    """A cautious guess of the seconds that one batch costs, to cut the work into parts."""
    pairs = candidates_per_row * size * (size if num_anchors is None else num_anchors)
    return 1e-4 + 1e-8 * size * dimension + pairs * (4e-11 * dimension + 4e-8)
