"""Figures that need no batches: known partners and a uniform draw without replacement."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

__all__ = ["anchors_with_false_negative", "false_negatives_per_anchor"]


def anchors_with_false_negative(partners: NDArray[np.int64], batch_size: int) -> float:
    """Return P(an anchor has at least one false negative in its batch), 0–1.

    With n rows, of which d_i are false negatives of anchor i, and N − 1 other rows drawn without replacement::

        mean_i [1 − C(n−1−d_i, N−1) / C(n−1, N−1)]

    Args:
        partners: (n,) int64, d_i.
        batch_size: N, from 2 to n.
    """
    others = len(partners) - 1
    drawn = batch_size - 1
    counts, how_often = np.unique(partners, return_counts=True)
    possible = others - counts >= drawn
    log_none = np.full(len(counts), -np.inf)
    left = others - counts[possible]
    log_none[possible] = (
        gammaln(left + 1) - gammaln(left - drawn + 1) - gammaln(others + 1) + gammaln(others - drawn + 1)
    )
    none = np.where(counts == 0, 1.0, np.exp(np.minimum(log_none, 0.0)))
    return float(((1.0 - none) * how_often).sum() / len(partners))


def false_negatives_per_anchor(partners: NDArray[np.int64], batch_size: int) -> float:
    """Return the expected number of false negatives of an anchor: (N − 1) · mean(d_i) / (n − 1)."""
    return float((batch_size - 1) * partners.mean() / (len(partners) - 1))
