"""The figures of one batch size, from batches."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from probe_service.estimate import WHOLE, BatchUnits, SamplingPlan, SizeMeasurements
from probe_service.measure.draws import Draws, no_full_batch
from probe_service.measure.task import STEP_SECONDS, batch_seconds
from probe_service.measure.terms import Softmaxes
from probe_service.scratch import Scratch
from probe_service.similarity import BatchMeasurements

__all__ = ["Batches"]

_QUANTILES = 199
"""Quantiles of ξ that are kept of an epoch's anchors."""
_COUNT = "batches"
_SHARES = ("false_share", "worst_share")


@dataclass(frozen=True)
class _Part:
    """Some units of one pool."""

    pool: int
    first: int
    count: int


@dataclass(frozen=True)
class _Pool:
    """What was measured on one pool: columns with one row a unit, and the number of batches behind each row."""

    columns: dict[str, NDArray[np.float64]]
    batches: NDArray[np.float64]


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
        shares_alone: Whether S and its worst case are all that is measured.
        num_anchors: How many anchors of each batch of all rows are measured, where the most similar pairs come from elsewhere;
            None: all anchors.
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
        *,
        shares_alone: bool = False,
        num_anchors: int | None = None,
    ) -> None:
        self._name, self.size, self._dimension = name, size, dimension
        self._draws, self._softmaxes, self._plan, self._scratch = draws, softmaxes, plan, scratch
        self._shares_alone, self._num_anchors = shares_alone, num_anchors

    @property
    def name(self) -> str:
        """With the population and the size."""
        return f"batches-{self._name}-{self.size}"

    def parts(self) -> list[_Part]:
        """About a second's batches each."""
        parts = []
        for pool, total in self._draws.streams(self.size):
            seconds = batch_seconds(
                self.size,
                self._dimension,
                self._softmaxes.candidates_per_row,
                num_anchors=self._anchors_in(pool),
            )
            if self._draws.units is not BatchUnits.BATCHES:
                seconds = self._draws.batches_in_unit(self.size) * seconds + 2e-6 * self._plan.rows_encoded
            step = max(1, int(STEP_SECONDS / seconds))
            parts += [_Part(pool, first, min(step, total - first)) for first in range(0, total, step)]
        return parts

    def run(self, part: _Part) -> None:
        """Measure some units."""
        numbers = range(part.first, part.first + part.count)
        units = [self._draws.unit(self.size, part.pool, number) for number in numbers]
        given = [unit for unit in units if len(unit)]
        columns: dict[str, NDArray[np.float64]] = {}
        if given:
            rng = self._draws.rng(self.size, part.pool, part.first)
            measured = self._softmaxes.measure(
                np.concatenate(given),
                rng,
                self._scratch.checkpoint,
                shares_alone=self._shares_alone,
                num_anchors=self._anchors_in(part.pool),
            )
            kept = _SHARES if self._shares_alone else [field.name for field in fields(BatchMeasurements)]
            columns = {name: getattr(measured, name) for name in kept}
            counts = np.array([len(unit) for unit in given])
            if self._draws.units is not BatchUnits.BATCHES:
                ends = np.cumsum(counts)[:-1]
                columns = {name: _of_units(name, np.split(values, ends)) for name, values in columns.items()}
            columns[_COUNT] = counts.astype(np.float64)
        self._scratch.save_columns(self._file(part), columns)

    @property
    def exist(self) -> bool:
        """Whether the sampler makes batches of this size, in two units at least where chance has a part in it."""
        return len(self._whole.batches) >= (1 if self._draws.units is BatchUnits.EVERY_BATCH else 2)

    def result(self) -> SizeMeasurements:
        """What was measured, one row a unit; a unit without a full batch has none.

        Raises:
            RequestError: ``sampler_no_batch`` where such batches do not `exist`.
        """
        if not self.exist:
            raise no_full_batch(self._draws, self.size)
        pools = sorted({part.pool for part in self.parts()} - {WHOLE})
        return SizeMeasurements(
            whole=self._whole.columns,
            pools=[self._pool(pool).columns for pool in pools],
            pool_rows=[self._plan.pool_rows(pool) for pool in pools],
            units=self._draws.units,
            batches=int(self._whole.batches.sum()),
        )

    def _anchors_in(self, pool: int) -> int | None:
        # Nothing but its own batches tells the most similar pairs of a sub-pool's.
        return self._num_anchors if pool == WHOLE else None

    @cached_property
    def _whole(self) -> _Pool:
        return self._pool(WHOLE)

    def _pool(self, pool: int) -> _Pool:
        found = [self._scratch.load_columns([self._file(part)]) for part in self.parts() if part.pool == pool]
        filled = [columns for columns in found if columns]
        if not filled:
            return _Pool({}, np.zeros(0))
        columns = {name: np.concatenate([each[name] for each in filled]) for name in filled[0]}
        return _Pool(columns, columns.pop(_COUNT))

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
