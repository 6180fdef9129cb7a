"""A uniform sample of a stream whose length is not known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

__all__ = ["Draw", "Reservoir"]

_NEVER = 2**62

Item = TypeVar("Item")


@dataclass(frozen=True)
class Draw:
    """An item that comes in.

    Args:
        position: Which of the items asked about, from 0.
        slot: Where it goes; an item that stands there goes out.
    """

    position: int
    slot: int


class Reservoir(Generic[Item]):
    """Keep `size` items of a stream, every subset equally likely (Li 1994, Algorithm L).

    The algorithm draws which item comes in next, not a number for each item: a caller asks `draw` which of the coming
    items to hand to `keep`, and passes over the rest at no cost. How the stream is cut into batches does not change
    the sample.

    Args:
        size: Items to keep, at least 1.
        rng: Source of randomness; untouched as long as everything fits.
    """

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self._size = size
        self._uniforms = _uniforms(rng)
        self._items: list[Item] = []
        self._seen = 0
        self._next: int | None = None
        self._log_w = 0.0

    @property
    def items(self) -> list[Item]:
        """The kept items, in no particular order."""
        return self._items

    def draw(self, count: int) -> list[Draw]:
        """Return which of the next `count` items come in, in order; each must then be kept, in that order."""
        base = self._seen
        self._seen += count
        draws = [Draw(position, base + position) for position in range(min(count, max(0, self._size - base)))]
        if self._seen <= self._size:
            return draws
        if self._next is None:
            self._next = self._skip_from(self._size - 1)
        while self._next < self._seen:
            draws.append(Draw(self._next - base, int(next(self._uniforms) * self._size)))
            self._next = self._skip_from(self._next)
        return draws

    def keep(self, draw: Draw, item: Item) -> None:
        """Take in the item that `draw` named."""
        if draw.slot == len(self._items):
            self._items.append(item)
        else:
            self._items[draw.slot] = item

    def _skip_from(self, last: int) -> int:
        # 1 - u lies in (0, 1]: its logarithm is finite. w is kept as a logarithm: it falls towards 0.
        self._log_w += math.log(1.0 - next(self._uniforms)) / self._size
        w = min(math.exp(self._log_w), 1.0 - 2.0**-53)
        if w == 0.0:
            return _NEVER
        return min(last + 1 + int(min(math.log(1.0 - next(self._uniforms)) / math.log1p(-w), _NEVER)), _NEVER)


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(1024).tolist()
