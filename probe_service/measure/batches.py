"""The figures of one batch size, from batches."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import WHOLE, BatchUnits, SamplingPlan, SizeMeasurements
from probe_service.measure.draws import Draws
from probe_service.measure.task import STEP_SECONDS, batch_seconds
from probe_service.measure.terms import Softmaxes
from probe_service.scratch import Scratch
from probe_service.similarity import BatchMeasurements

__all__ = ["Batches"]

_QUANTILES = 199
"""Quantiles of ξ that are kept of an epoch's anchors."""


@dataclass(frozen=True)
class _Part:
    """Some units of one pool."""

    pool: int
    first: int
    count: int


class Batches:
    """Batches of one size.

    Args:
        name: Of the population, for the files.
        size: N.
        dimension: d.
        draws: Where batches come from.
        softmaxes: What is measured on them.
        plan: Of the population: which rows are in which pool.
        scratch: Where results go.
    """

    def __init__(
        self,
        name: str,
        size: int,
        dimension: int,
        draws: Draws,
        softmaxes: Softmaxes,
        plan: SamplingPlan,
        scratch: Scratch,
    ) -> None:
        self._name, self.size, self._dimension = name, size, dimension
        self._draws, self._softmaxes, self._plan, self._scratch = draws, softmaxes, plan, scratch

    @property
    def name(self) -> str:
        """With the population and the size."""
        return f"batches-{self._name}-{self.size}"

    def parts(self) -> list[_Part]:
        """About a second's batches each."""
        seconds = batch_seconds(self.size, self._dimension, self._softmaxes.candidates_per_row)
        if self._draws.units is not BatchUnits.BATCHES:
            seconds = self._draws.batches_in_unit(self.size) * seconds + 2e-6 * self._plan.rows_encoded
        step = max(1, int(STEP_SECONDS / seconds))
        return [
            _Part(pool, first, min(step, total - first))
            for pool, total in self._draws.streams(self.size)
            for first in range(0, total, step)
        ]

    def run(self, part: _Part) -> None:
        """Measure some units."""
        numbers = range(part.first, part.first + part.count)
        units = [self._draws.unit(self.size, part.pool, number) for number in numbers]
        rng = self._draws.rng(self.size, part.pool, part.first)
        measured = self._softmaxes.measure(np.concatenate(units), rng, self._scratch.checkpoint)
        columns = {field.name: getattr(measured, field.name) for field in fields(BatchMeasurements)}
        if self._draws.units is not BatchUnits.BATCHES:
            ends = np.cumsum([len(unit) for unit in units])[:-1]
            columns = {name: _of_units(name, np.split(values, ends)) for name, values in columns.items()}
        self._scratch.save_columns(self._file(part), columns)

    def result(self) -> SizeMeasurements:
        """What was measured, one row a unit."""
        parts = self.parts()

        def columns(pool: int) -> dict[str, NDArray[np.float64]]:
            return self._scratch.load_columns(self._file(part) for part in parts if part.pool == pool)

        pools = sorted({part.pool for part in parts} - {WHOLE})
        return SizeMeasurements(
            whole=columns(WHOLE),
            pools=[columns(pool) for pool in pools],
            pool_rows=[self._plan.pool_rows(pool) for pool in pools],
            units=self._draws.units,
            batches=sum(
                part.count * self._draws.batches_in_unit(self.size) for part in parts if part.pool == WHOLE
            ),
        )

    def _file(self, part: _Part) -> str:
        return f"{self.name}-{part.pool}-{part.first}.npz"


def _of_units(name: str, units: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The mean over each unit's batches; of ξ its quantiles, since a mean would tell nothing about its spread."""
    if name == "log_xi":
        if not units[0].shape[1]:
            return np.empty((len(units), 0))
        probabilities = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        return np.stack([np.quantile(values, probabilities) for values in units])
    return np.stack([values.mean(axis=0) for values in units])
