"""What loops compiled by numba have in common. Imports numba: for modules that are themselves imported inside functions.

What is compiled is kept beside the loops' own file, or where that folder is read-only in the user's cache or in
NUMBA_CACHE_DIR; where nothing can be written, every process compiles anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["REORDERED", "compiled", "exponentials"]

Loop = TypeVar("Loop", bound=Callable[..., Any])
Singles = NDArray[np.float32]

REORDERED = {"reassoc", "contract", "arcp", "nsz"}
"""Of what `fastmath` allows all but the promise that nothing is infinite."""

_SMALLEST_EXPONENT = np.float32(-87.0)
"""exp of less than this is 0: float32 has no room for it."""
_PER_OCTAVE, _OCTAVE, _OCTAVE_REST = (
    np.float32(1.44269504),
    np.float32(0.693145752),
    np.float32(1.42860677e-6),
)
"""1 / ln 2; ln 2 in a part that whole numbers below 2⁹ multiply without rounding, and the rest."""


def compiled(signature: str, *, reordered: bool = True) -> Callable[[Loop], Loop]:
    """Compile for these types alone, free of Python's lock; additions may be reordered, the same way every time."""

    def compile_loop(loop: Loop) -> Loop:
        options = {"nogil": True, "fastmath": REORDERED if reordered else False, "error_model": "numpy"}
        try:
            found: Loop = numba.njit(signature, cache=True, **options)(loop)
        except RuntimeError:  # no folder can be written
            found = numba.njit(signature, **options)(loop)
        return found

    return compile_loop


@numba.njit(fastmath=REORDERED)  # type: ignore[untyped-decorator]
def exponentials(values: Singles, octaves: NDArray[np.int32]) -> None:
    """Put exp of each value, at most 87, in its place, to 3e-7 of itself.

    Plain arithmetic throughout, of which processors do sixteen at a time; libraries' exponentials are called one by one.

    Args:
        values: (n,) overwritten; −inf gives 0.
        octaves: Room for n numbers.
    """
    powers = octaves.view(np.float32)
    for j in range(len(values)):
        given = values[j]
        exponent = given if given > _SMALLEST_EXPONENT else _SMALLEST_EXPONENT
        whole = np.rint(exponent * _PER_OCTAVE)
        rest = (exponent - whole * _OCTAVE) - whole * _OCTAVE_REST
        # exp(r) = 1 + r + r² P(r) for |r| ≤ ln 2 / 2; P is that of Cephes' expf (Moshier).
        power = np.float32(1.9875691500e-4)
        power = power * rest + np.float32(1.3981999507e-3)
        power = power * rest + np.float32(8.3334519073e-3)
        power = power * rest + np.float32(4.1665795894e-2)
        power = power * rest + np.float32(1.6666665459e-1)
        power = power * rest + np.float32(5.0000001201e-1)
        power = power * (rest * rest) + rest + np.float32(1.0)
        octaves[j] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        values[j] = power if exponent > _SMALLEST_EXPONENT else np.float32(0.0)
    for j in range(len(values)):
        values[j] *= powers[j]
