"""Where the batches of one size come from: drawn one by one, or whole epochs of a training sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from probe_service.corpus import BatchSampler, Epoch, TrainingRows, draw_epoch
from probe_service.errors import RequestError
from probe_service.estimate import SUB_POOLS, WHOLE, BatchUnits, SamplingPlan
from probe_service.schemas import SamplerKind, SamplerOptions

__all__ = ["Draws", "EpochDraws", "RandomDraws", "draws_for", "ladder", "no_full_batch"]

EPOCHS = 20
"""Epochs of a sampler whose batches depend on each other: t with 19 degrees of freedom over their means."""
_EPOCHS, _CHOICE, _PART_OF_EPOCH = 5, 6, 7
_LADDER_INTEGERS = 32
_LADDER_RATIO = 1.12
_SOURCES_SHOWN = 10

Rows = NDArray[np.int64]


class Draws(Protocol):
    """The batches of every size. A *unit* is what is independent: one batch, or one epoch of them."""

    units: BatchUnits

    @property
    def description(self) -> str:
        """Which batches of which rows, in words."""

    def streams(self, size: int) -> list[tuple[int, int]]:
        """(pool, units) that are measured at this size; the pool `WHOLE` is all encoded rows."""

    def batches_in_unit(self, size: int) -> int:
        """How many batches one unit has, at most."""

    def unit(self, size: int, pool: int, number: int) -> Rows:
        """(c, N) rows of the batches of one unit; (0, N) where it has no full one."""

    def rng(self, size: int, pool: int, number: int) -> np.random.Generator:
        """Randomness for whatever else is chosen for batches, from this unit on."""


@dataclass(frozen=True)
class RandomDraws:
    """Batches drawn one by one, without replacement within a batch.

    Args:
        plan: How many, from which pools.
    """

    plan: SamplingPlan
    units = BatchUnits.BATCHES

    @property
    def description(self) -> str:
        """In words."""
        return f"random batches of {self.plan.rows_encoded} rows"

    def streams(self, size: int) -> list[tuple[int, int]]:
        """All encoded rows, and the sub-pools where a sample of rows was encoded."""
        pools = [(WHOLE, self.plan.num_batches(size))]
        if self.plan.num_pool_batches(size):
            pools += [(pool, self.plan.num_pool_batches(size)) for pool in range(SUB_POOLS)]
        return pools

    def batches_in_unit(self, size: int) -> int:  # noqa: ARG002 - the same for every size
        """One."""
        return 1

    def unit(self, size: int, pool: int, number: int) -> Rows:
        """(1, N) rows of one batch."""
        return self.plan.batches(size, pool, number, 1)

    def rng(self, size: int, pool: int, number: int) -> np.random.Generator:
        """A generator of its own for each batch."""
        return np.random.default_rng([self.plan.seed, _CHOICE, size, pool + 1, number])


class EpochDraws:
    """Epochs of a training sampler, of which as many batches are measured as the anchors' number asks for.

    Batches of one epoch depend on each other (rows that had to wait gather in the late ones), so the mean over an epoch's
    batches, or over a random choice of them, is one observation. `sequential` has one epoch, and all of it is measured.

    Args:
        options: The sampler.
        rows: The rows as it sees them.
        plan: How many batches the figures ask for.
    """

    def __init__(self, options: SamplerOptions, rows: Callable[[], TrainingRows], plan: SamplingPlan) -> None:
        self._options, self._make_rows, self._plan = options, rows, plan
        self.units = BatchUnits.EVERY_BATCH if options.kind is SamplerKind.SEQUENTIAL else BatchUnits.EPOCHS

    @cached_property
    def _rows(self) -> TrainingRows:
        return self._make_rows()

    def streams(self, size: int) -> list[tuple[int, int]]:  # noqa: ARG002 - the same for every size
        """All rows, `EPOCHS` times, or once in file order."""
        return [(WHOLE, 1 if self.units is BatchUnits.EVERY_BATCH else EPOCHS)]

    def batches_in_unit(self, size: int) -> int:
        """As many as all units need together for the plan's number of anchors."""
        whole = self._plan.rows_encoded // size
        if self.units is BatchUnits.EVERY_BATCH:
            return whole
        return max(1, min(whole, -(-self._plan.num_batches(size) // EPOCHS)))

    @property
    def description(self) -> str:
        """In words."""
        options, rows = self._options, self._rows
        said = f"{options.kind} batches"
        if options.world_size > 1:
            said += f" on {options.world_size} devices"
        said += f" of {len(rows)} rows"
        if options.kind is SamplerKind.GROUPED:
            said += f" from sources of {', '.join(map(str, np.bincount(rows.source)[:_SOURCES_SHOWN]))}"
            said += ", …" if len(rows.sources) > _SOURCES_SHOWN else ""
        return said

    def epoch(self, size: int, number: int) -> Epoch:
        """Draw one epoch."""
        rng = np.random.default_rng([self._plan.seed, _EPOCHS, size, number])
        return draw_epoch(BatchSampler.of(self._options, size), self._rows, rng)

    def unit(self, size: int, pool: int, number: int) -> Rows:  # noqa: ARG002 - there is one pool
        """(c, N) rows of a random choice of one epoch's full batches."""
        batches = self.epoch(size, number).full_contrasts
        wanted = self.batches_in_unit(size)
        if len(batches) <= wanted:
            return batches
        rng = np.random.default_rng([self._plan.seed, _PART_OF_EPOCH, size, number])
        return batches[np.sort(rng.choice(len(batches), wanted, replace=False))]

    def rng(self, size: int, pool: int, number: int) -> np.random.Generator:
        """A generator of its own for each epoch."""
        return np.random.default_rng([self._plan.seed, _CHOICE, size, pool + 1, number])


def draws_for(options: SamplerOptions, rows: Callable[[], TrainingRows], plan: SamplingPlan) -> Draws:
    """The draws of a sampler; random batches on several devices are random batches."""
    if options.kind is SamplerKind.RANDOM:
        return RandomDraws(plan)
    return EpochDraws(options, rows, plan)


def no_full_batch(draws: Draws, size: int) -> RequestError:
    """The refusal, ``sampler_no_batch``, where the sampler makes no batch of a size that is asked for."""
    return RequestError(
        "sampler_no_batch",
        f"No full batch of {size} rows, or too few for an estimate: {draws.description}.",
        column="batch_sizes",
    )


def ladder(largest: int, devices: int) -> list[int]:
    """The sizes at which S is tested where not every integer can be: all small ones, then ever wider steps.

    Args:
        largest: The largest of them, at most.
        devices: Devices that a batch is dealt to, each with at least two rows.
    """
    found: list[int] = []
    per_device = 2
    while per_device * devices <= largest:
        found.append(per_device * devices)
        following = per_device + 1 if per_device < _LADDER_INTEGERS else int(per_device * _LADDER_RATIO)
        per_device = following
    return found
