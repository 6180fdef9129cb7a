"""Products of rows in int8, with a proven bound of their error.

Rows x, less a mean a, are written as a scale times whole numbers from −127 to 127, q(x); the rows y that they are multiplied
with, less a mean b, likewise. With ε the length of what q leaves out, and ρ that of the row less its mean, Cauchy–Schwarz
bounds what a product of whole numbers leaves out::

    x·y = (x−a)·(y−b) + b·x + a·y − a·b
    |(x−a)·(y−b) − q(x)·q(y)| ≤ ε_x ρ_y + ε_y ρ_x + ε_x ε_y

The means are taken out because vectors that crowd round one direction have short rests, whose errors are as small.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.similarity.threads import alone

__all__ = ["Screen", "int8_pays", "rounding_of_float32"]

_ROUNDING = 128 * 2.0**-24
"""What float32 arithmetic adds to a bound, in units of the longest rows' product: a dozen operations on terms ≤ 7."""
_UNDERFLOW = 2.0**-38
"""Added to lengths: squares of what is far shorter are nought in float32."""
_ROWS_OF_MEAN = 256
_TRIED = (256, 512, 384)
_TRIALS = 8


@dataclass(frozen=True)
class Screen:
    """Rows and columns whose products are to be screened.

    Args:
        left_codes, right_codes: (n, d) and (m, d) int8.
        left_terms, right_terms: (4, n) and (4, m) float32, see `compiled.quantize`.
        longest: At least the length of every right row less its mean.
        rounding: What is to be added to every bound.
    """

    left_codes: torch.Tensor
    right_codes: torch.Tensor
    left_terms: NDArray[np.float32]
    right_terms: NDArray[np.float32]
    longest: float
    rounding: float

    @classmethod
    def of(cls, left: NDArray[np.float32], right: NDArray[np.float32]) -> Screen:
        """Code the rows, without gaps between them; the same array twice is coded once."""
        left_mean = _mean(left)
        right_mean = left_mean if right is left else _mean(right)
        left_codes, left_terms = _coded(left, left_mean, right_mean)
        right_codes, right_terms = (
            (left_codes, left_terms) if right is left else _coded(right, right_mean, left_mean)
        )
        # x·y has a·b left over once: half of it goes with each side, where the rows less their means are multiplied.
        half = np.float32(0.5 * (left_mean.astype(np.float64) @ right_mean.astype(np.float64)))
        left_terms[1] -= half
        if right is not left:
            right_terms[1] -= half
        return cls(
            left_codes,
            right_codes,
            left_terms,
            right_terms,
            longest=float(right_terms[3].max(initial=0.0)),
            rounding=_ROUNDING
            * (float(left_terms[3].max(initial=0.0)) + _length(left_mean))
            * (float(right_terms[3].max(initial=0.0)) + _length(right_mean)),
        )

    def products(self, rows: slice, columns: slice, buffer: torch.Tensor) -> NDArray[np.int32]:
        """Multiply the codes of some rows and columns.

        Args:
            rows: Of the left side.
            columns: Of the right side.
            buffer: Room for the result, int32 of any shape.
        """
        size = (rows.stop - rows.start, columns.stop - columns.start)
        out = buffer.view(-1)[: size[0] * size[1]].view(size)
        torch._int_mm(self.left_codes[rows], self.right_codes[columns].T, out=out)
        return out.numpy()


def rounding_of_float32(left: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    """Bound of the error of a product in float32: |fl(x·y) − x·y| ≤ γ_d ‖x‖‖y‖ (Higham 2002, §3.1)."""
    bound: float = (left.shape[1] + 4) * 2.0**-24 * _longest(left) * _longest(right) * 1.01
    return bound


@cache
def int8_pays() -> bool:
    """Whether products in int8 are exact here, which not every processor's are, and faster than those in float32.

    The trial runs on one thread and by that thread's own clock: what else the machine does must not decide.
    """
    return alone(_int8_pays_on_this_thread)


def _int8_pays_on_this_thread() -> bool:
    if not hasattr(torch, "_int_mm"):
        return False
    rows, columns, dimension = _TRIED
    rng = np.random.default_rng(0)
    left = rng.choice(np.array([-127, -1, 126, 127], dtype=np.int8), (rows, dimension))
    right = rng.choice(np.array([-127, 2, 127], dtype=np.int8), (columns, dimension))
    left[0], right[0] = 127, 127
    sides = torch.from_numpy(left), torch.from_numpy(right)
    try:
        product = torch._int_mm(sides[0], sides[1].T)
    except RuntimeError:
        return False
    # Whole numbers of this size are exact in float64.
    if not np.array_equal(product.numpy(), left.astype(np.float64) @ right.astype(np.float64).T):
        return False

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        multiply = torch._int_mm if left.dtype == torch.int8 else torch.mm
        found = []
        for _ in range(_TRIALS):
            began = time.thread_time()
            multiply(left, right.T)
            found.append(time.thread_time() - began)
        return min(found)

    return seconds(*sides) < 0.7 * seconds(*(side.float() for side in sides))


def _coded(
    rows: NDArray[np.float32], mean: NDArray[np.float32], other_mean: NDArray[np.float32]
) -> tuple[torch.Tensor, NDArray[np.float32]]:
    from probe_service.similarity import compiled

    # Of two columns at least: `torch._int_mm` is wrong for one.
    codes = np.zeros((len(rows), max(rows.shape[1], 2)), dtype=np.int8)
    terms = np.empty((4, len(rows)), dtype=np.float32)
    compiled.quantize(rows, mean, other_mean, codes, terms)
    return torch.from_numpy(codes), terms


def _mean(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Any vector would do; the mean leaves the shortest rests, and that of some rows hardly longer ones."""
    some = rows[:: max(1, len(rows) // _ROWS_OF_MEAN)]
    found: NDArray[np.float32] = torch.from_numpy(some).mean(dim=0).numpy()
    return found


def _length(row: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(row.astype(np.float64))) + _UNDERFLOW


def _longest(rows: NDArray[np.float32]) -> float:
    """At least the length of every row."""
    if not len(rows):
        return 0.0
    lengths: torch.Tensor = torch.linalg.vector_norm(torch.from_numpy(rows), dim=1)
    return float(lengths.max()) * float(1.0 + rows.shape[1] * 2.0**-23) + _UNDERFLOW
