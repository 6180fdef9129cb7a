"""Vectors without false negatives, to draw beside the curve: a rising curve alone proves nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MatchedGaussian", "isotropic"]


def isotropic(rng: np.random.Generator, rows: int, dimension: int) -> NDArray[np.float32]:
    """(rows, dimension) directions drawn uniformly at random."""
    return _unit(rng.standard_normal((rows, dimension), dtype=np.float32))


@dataclass(frozen=True)
class MatchedGaussian:
    """A Gaussian with a corpus's own mean and covariance.

    Args:
        mean: (d,) float32.
        factor: (d, r) float32 with factor · factorᵀ = covariance.
    """

    mean: NDArray[np.float32]
    factor: NDArray[np.float32]

    @classmethod
    def fit(cls, vectors: NDArray[np.float32]) -> MatchedGaussian:
        """Match (m, d) vectors; the covariance may be singular."""
        wide = vectors.astype(np.float64)
        mean = wide.mean(axis=0)
        covariance = (wide - mean).T @ (wide - mean) / max(1, len(vectors) - 1)
        values, directions = np.linalg.eigh(covariance)
        factor = directions * np.sqrt(np.maximum(values, 0.0))
        return cls(mean.astype(np.float32), factor.astype(np.float32))

    def draw(self, rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
        """(rows, d) draws, brought to unit length like the vectors that they stand for."""
        noise = rng.standard_normal((rows, self.factor.shape[1]), dtype=np.float32)
        return _unit(self.mean + noise @ self.factor.T)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(length > 0, length, 1.0)).astype(np.float32)
