"""Loops of the integral that numpy would make in a dozen passes, compiled by numba; see `probe_service.loops`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from probe_service.loops import compiled, exponentials

__all__ = ["push_coefficients"]

Singles = NDArray[np.float32]


@compiled(
    "void(float32[:,::1],float32[:,::1],float32[:,::1],float32[:,::1],float32[:,::1],"
    "float32[::1],float32,float32[:,::1])"
)
def push_coefficients(
    log_phi: Singles,
    shrink: Singles,
    itself: Singles,
    itself_at_most: Singles,
    positive: Singles,
    ratio: Singles,
    drawn: np.float32,
    out: Singles,
) -> None:
    """Compute what multiplies `BlockPush.mass` at p points of t, for r anchors.

    Args:
        log_phi: (≥ p, r) log φ.
        shrink: (≥ p, r) c²/2(M−1).
        itself: (≥ p, r) 1/Mφ, with the weight of t for that of 2t.
        itself_at_most: (≥ p, r) the most that `itself` times the ratio may be.
        positive: (≥ p, r) another factor of A; (0, r): none.
        ratio: (r,) m/(1 − (m−1)/M).
        drawn: m.
        out: (p, r) filled.
    """
    points, anchors = out.shape
    alive, before = np.empty(anchors, dtype=np.float32), np.zeros(anchors, dtype=np.float32)
    octaves = np.empty(anchors, dtype=np.int32)
    for g in range(points):
        for i in range(anchors):
            alive[i] = drawn * (log_phi[g, i] + (np.float32(1.0) - drawn) * shrink[g, i])
        exponentials(alive, octaves)
        if len(positive):
            for i in range(anchors):
                alive[i] *= positive[g, i]
        if g == 0:
            out[0] = alive
        else:
            # The second term of B, y_j A_{m−1}, made of x y at t and y at t: x y² is x y at 2t.
            for i in range(anchors):
                weight = itself[g - 1, i] * ratio[i]
                weight = weight if weight < itself_at_most[g - 1, i] else itself_at_most[g - 1, i]
                out[g, i] = alive[i] - weight * before[i]
        before[:] = alive
