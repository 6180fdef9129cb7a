"""What is drawn beside the curve of one batch size: the nulls, the noise and, where there is an s_ii⁺, the gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.estimate import WHOLE, MatchedGaussian, Reference, isotropic
from probe_service.losses.numerics import DTYPES, gradient_errors
from probe_service.measure.task import STEP_SECONDS, batch_seconds
from probe_service.scratch import Scratch
from probe_service.similarity import batch_top_k, in_turn, noise_similarity
from probe_service.workspace import Population

__all__ = ["MOST_BATCHES", "References"]

MOST_BATCHES = 20
"""Batches behind each null and the noise series: t with 19 degrees of freedom. Fewer of large batches, …"""
_MOST_ROWS, _FEWEST_BATCHES = 8_192, 8
"""… whose figures hardly differ from one another: no more rows than these, in no fewer batches."""
NOISE_PER_ROW = 3
"""The paper's M = 3 × batch size."""


@dataclass(frozen=True)
class _Part:
    """Some batches."""

    first: int
    count: int


class References:
    """Nulls, noise and gradient errors at one size, on random batches.

    Args:
        population: The rows.
        gaussians: Fitted to each side of them.
        size: N.
        temperature: T.
        k: Ranks of the similarity curve.
        scratch: Where results go.
        most_batches: Behind each figure.
    """

    def __init__(
        self,
        population: Population,
        gaussians: list[MatchedGaussian],
        size: int,
        *,
        temperature: float,
        k: int,
        scratch: Scratch,
        most_batches: int,
    ) -> None:
        self._most_batches = most_batches
        self._population, self._gaussians, self.size = population, gaussians, size
        self._temperature, self._k, self._scratch = temperature, k, scratch

    @property
    def name(self) -> str:
        """With the size."""
        return f"reference-{self.size}"

    def parts(self) -> list[_Part]:
        """About a second's batches each."""
        total = min(self._most_batches, max(_FEWEST_BATCHES, _MOST_ROWS // self.size))
        dimension = self._population.anchors.shape[1]
        seconds = 1e-3 + 5e-11 * dimension * self.size**2
        if self._with_gradients:
            seconds += 4 * batch_seconds(self.size, dimension)
        step = max(1, int(STEP_SECONDS / seconds))
        return [_Part(first, min(step, total - first)) for first in range(0, total, step)]

    def run(self, part: _Part) -> None:
        """Measure beside some batches."""
        rows = self._population.plan.batches(self.size, WHOLE, part.first, part.count)
        found = []
        for figures in in_turn(self._beside, enumerate(rows, start=part.first)):
            self._scratch.checkpoint()
            found.append(figures)
        columns = {
            name: np.array([figures[name] for figures in found], dtype=np.float64) for name in found[0]
        }
        self._scratch.save_columns(self._file(part), columns)

    def _beside(self, numbered: tuple[int, NDArray[np.int64]]) -> dict[str, float | tuple[float, ...]]:
        """What stands beside one batch."""
        number, batch = numbered
        population, size = self._population, self.size
        rng = population.plan.null_rng(size, number)
        anchors = torch.from_numpy(population.anchors[batch])
        dimension = anchors.shape[1]
        noise = rng.standard_normal((NOISE_PER_ROW * size, dimension), dtype=np.float32)
        figures: dict[str, float | tuple[float, ...]] = {
            "noise": noise_similarity(anchors, torch.from_numpy(noise)),
            "gaussian": _top_mean([gaussian.draw(rng, size) for gaussian in self._gaussians], self._k),
            "isotropic": _top_mean([isotropic(rng, size, dimension) for _ in self._gaussians], self._k),
        }
        if self._with_gradients:
            own, positives = population.own_similarity, population.positives
            errors = gradient_errors(
                anchors,
                anchors if positives is None else torch.from_numpy(positives[batch]),
                temperature=self._temperature,
                own_similarity=None if own is None else torch.from_numpy(own[batch]),
            )
            for dtype, error in errors.items():
                figures[dtype] = (error.infonce, error.flatnce, error.zero_loss_share)
        return figures

    def result(self) -> Reference:
        """What was measured."""
        found = self._scratch.load_columns(self._file(part) for part in self.parts())
        return Reference(
            noise_mean=found["noise"][:, 0],
            noise_max=found["noise"][:, 1],
            noise_vectors=NOISE_PER_ROW * self.size,
            gaussian_top_k_mean=found["gaussian"],
            isotropic_top_k_mean=found["isotropic"],
            gradient={dtype: found[dtype] for dtype in DTYPES if dtype in found},
        )

    @property
    def _with_gradients(self) -> bool:
        return self._population.positives is not None or self._population.own_similarity is not None

    def _file(self, part: _Part) -> str:
        return f"{self.name}-{part.first}.npz"


def _top_mean(sides: list[NDArray[np.float32]], k: int) -> float:
    anchors, *rest = [torch.from_numpy(side)[None] for side in sides]
    return float(batch_top_k(anchors, rest[0] if rest else None, k=k).mean())
