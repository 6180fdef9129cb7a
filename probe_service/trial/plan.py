"""The matrix of a trial: which runs there are, how long each trains, and how learning rates are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from probe_service.errors import RequestError
from probe_service.schemas import (
    TrialCell,
    TrialCurvePoint,
    TrialLoss,
    TrialLossKind,
    TrialMode,
    TrialRequest,
)

__all__ = ["TUNING_SEED", "TUNING_SHARE", "Run", "Streams", "TrialPlan"]

TUNING_SEED = 1_000_000
"""The seed of the runs that find learning rates: none of those that count."""
TUNING_SHARE = 0.2
"""Of the training rows: what learning rates are judged by. The runs that count train on all rows."""


@dataclass(frozen=True)
class _Defaults:
    """What a mode does where the request does not say."""

    losses: tuple[TrialLossKind, ...]
    batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    steps: int
    learning_rates: tuple[float, ...]


_DEFAULTS = {
    TrialMode.HEAD: _Defaults(
        tuple(TrialLossKind), (4, 16, 64, 256, 1024), (0.05,), 200, (0.001, 0.003, 0.01)
    ),
    TrialMode.FULL: _Defaults(tuple(TrialLossKind), (64,), (0.05,), 200, (1e-5, 3e-5, 1e-4)),
    TrialMode.IMAGES: _Defaults(
        (TrialLossKind.INFONCE, TrialLossKind.FLATNCE),
        (8, 32, 128, 512, 1024),
        (0.2,),
        200,
        (0.001, 0.003, 0.01),
    ),
}


@dataclass(frozen=True)
class Streams:
    """Generators of one run. Runs of one seed and batch size share their batches, so that losses are compared on them.

    Args:
        root: Seed of the request.
        seed: Of the run.
        batch_size: N.
    """

    root: int
    seed: int
    batch_size: int

    def batches(self) -> np.random.Generator:
        """Which rows meet."""
        return np.random.default_rng([self.root, 1, self.seed, self.batch_size])

    def weights(self) -> int:
        """Seed of the first weights, the same at every batch size."""
        return self._torch_seed(2, self.seed)

    def noise(self) -> int:
        """Seed of what a loss draws."""
        return self._torch_seed(3, self.seed, self.batch_size)

    def _torch_seed(self, *stream: int) -> int:
        return int(np.random.SeedSequence([self.root, *stream]).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        loss, batch_size, temperature, seed, steps, learning_rate: Of the run.
    """

    loss: TrialLoss
    batch_size: int
    temperature: float
    seed: int
    steps: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Tells a cell from every other of the trial; fit for a file."""
        return f"{self.loss.name}-N{self.batch_size}-T{self.temperature:g}-s{self.seed}"

    @property
    def cost(self) -> float:
        """A guess of what it costs, in no unit."""
        return self.steps * (1.0 + self.batch_size / 64 + (self.batch_size / 256) ** 2)

    def finished(self, scores: dict[str, float], curve: list[TrialCurvePoint]) -> TrialCell:
        """The cell that the run leaves."""
        return TrialCell(
            loss=self.loss.name,
            batch_size=self.batch_size,
            temperature=self.temperature,
            seed=self.seed,
            learning_rate=self.learning_rate,
            steps=self.steps,
            examples=self.steps * self.batch_size,
            scores=scores,
            curve=curve,
        )

    def streams(self, root: int) -> Streams:
        """The generators of the run, under the seed of the request."""
        return Streams(root, self.seed, self.batch_size)


Rates = Mapping[tuple[str, float, int], float]
"""The best learning rate by name of loss, temperature and batch size."""


@dataclass(frozen=True)
class TrialPlan:
    """All runs of a trial.

    Args:
        losses, batch_sizes, temperatures: The matrix, ascending.
        num_seeds: Runs of each.
        steps: Of every run; None: as many as see `examples` anchors.
        examples: Anchors that every run sees; None: whatever `steps` takes.
        learning_rates: Ascending.
    """

    losses: tuple[TrialLoss, ...]
    batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_seeds: int
    steps: int | None
    examples: int | None
    learning_rates: tuple[float, ...]

    @classmethod
    def from_request(cls, request: TrialRequest, *, rows: int, any_known: bool) -> TrialPlan:
        """Fill in what the request leaves open.

        Args:
            request: What was asked.
            rows: Training rows that a batch is drawn from, also while learning rates are found.
            any_known: Whether any false negative among them is known.

        Raises:
            RequestError: ``batch_size_too_large``; ``trial_nothing_to_mask`` where `oracle_masking` was asked for and no
                false negative is known.
        """
        defaults = _DEFAULTS[request.mode]
        sizes = request.batch_sizes or tuple(size for size in defaults.batch_sizes if size <= rows)
        if not sizes or max(sizes) > rows:
            largest = max(sizes, default=min(defaults.batch_sizes))
            raise RequestError(
                "batch_size_too_large",
                f"A batch of {largest} needs {largest} rows, but only {rows} are there to train on once others are held out.",
                column="batch_sizes",
            )
        kinds = [kind for kind in defaults.losses if any_known or kind is not TrialLossKind.ORACLE_MASKING]
        losses = request.losses or tuple(TrialLoss.model_validate({"kind": kind}) for kind in kinds)
        if not any_known and any(loss.kind is TrialLossKind.ORACLE_MASKING for loss in losses):
            raise RequestError(
                "trial_nothing_to_mask",
                "oracle_masking leaves out the known false negatives, but none is known among the training rows; name a "
                "group column, or leave this loss out.",
                column="losses",
            )
        return cls(
            losses=losses,
            batch_sizes=sizes,
            temperatures=request.temperatures or defaults.temperatures,
            num_seeds=request.num_seeds,
            steps=None if request.examples is not None else request.steps or defaults.steps,
            examples=request.examples,
            learning_rates=request.learning_rates or defaults.learning_rates,
        )

    def tuning_runs(self) -> list[Run]:
        """What is tried to find the learning rates, one after the other; empty where there is no choice."""
        if len(self.learning_rates) == 1:
            return []
        ends = sorted({self.batch_sizes[0], self.batch_sizes[-1]})
        return [
            replace(run, learning_rate=rate)
            for size in ends
            for run in self._runs(size, TUNING_SEED)
            for rate in self.learning_rates
        ]

    def cells(self, tuned: Rates | None) -> list[Run]:
        """The runs that count: all of the first seed, then all of the next, so that a whole table is there early.

        Args:
            tuned: What the tuning runs found; None: not known yet, and the rates are those of nothing.
        """
        return [
            replace(run, learning_rate=self._learning_rate(run, tuned)) if tuned is not None else run
            for seed in range(self.num_seeds)
            for size in self.batch_sizes
            for run in self._runs(size, seed)
        ]

    def steps_at(self, size: int) -> int:
        """Steps of a run with batches of N."""
        if self.steps is not None:
            return self.steps
        assert self.examples is not None
        return max(1, round(self.examples / size))

    def _learning_rate(self, run: Run, tuned: Rates) -> float:
        """The rate that was chosen at the two ends, in between in proportion to log N; three digits."""
        if len(self.learning_rates) == 1:
            return self.learning_rates[0]
        ends = sorted({self.batch_sizes[0], self.batch_sizes[-1]})
        chosen = [tuned[run.loss.name, run.temperature, size] for size in ends]
        rate = np.exp(np.interp(np.log(run.batch_size), np.log(ends), np.log(chosen)))
        return float(f"{rate:.3g}")

    def _runs(self, size: int, seed: int) -> Iterator[Run]:
        for temperature in self.temperatures:
            for loss in self.losses:
                yield Run(loss, size, temperature, seed, self.steps_at(size), self.learning_rates[0])
