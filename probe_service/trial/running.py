"""A trial from end to end: read, encode, find learning rates, train cell by cell, report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from probe_service.encode import default_encoder_name, load_encoder, load_for_training
from probe_service.errors import RequestError
from probe_service.schemas import (
    CorpusInfo,
    EncoderInfo,
    Estimate,
    HeldOutRows,
    Phase,
    Progress,
    ReportWarning,
    TrialCell,
    TrialLossKind,
    TrialMode,
    TrialReport,
    TrialRequest,
    TunedRate,
)
from probe_service.settings import Settings
from probe_service.trial.folder import TrialFolder
from probe_service.trial.frozen import FrozenCorpus
from probe_service.trial.head import HeadTrial
from probe_service.trial.images import ImageTrial
from probe_service.trial.plan import TUNING_SHARE, Run, TrialPlan
from probe_service.trial.reading import Step, TrialCorpus, unused_hard_negatives
from probe_service.trial.report import masking_gains, rank_correlation, trial_table
from probe_service.trial.sts import Sts, read_sts, read_sts_dev
from probe_service.trial.texts import TextCorpus

__all__ = ["run_trial"]

Json = Any


class Trainer(Protocol):
    """What a mode brings: it trains one run and says how it turned out."""

    metric: str
    """The score that decides."""

    def protocol(self) -> list[str]:
        """How it trains and evaluates, in sentences."""

    def before(self, checkpoint: Callable[[], None]) -> dict[str, float]:
        """The scores without training."""

    def tuning_score(self, run: Run, checkpoint: Callable[[], None]) -> float:
        """The metric of a run on the tuning rows."""

    def train(self, run: Run, checkpoint: Callable[[], None]) -> TrialCell:
        """A run on all training rows, with its scores on the held-out rows."""


@dataclass(frozen=True)
class Setting:
    """What a trial is about, once its rows are there.

    Args:
        trainer: Trains and evaluates.
        plan: The runs.
        corpus, encoder: None for images.
        training_rows, training_rows_left_out: Counts.
        held_out: What is evaluated on.
        predicted: S by (N, T); empty where there is none.
        warnings: About the rows.
    """

    trainer: Trainer
    plan: TrialPlan
    corpus: CorpusInfo | None
    encoder: EncoderInfo | None
    training_rows: int
    training_rows_left_out: int
    held_out: HeldOutRows
    predicted: Mapping[tuple[int, float], Estimate]
    warnings: Sequence[ReportWarning]


def call(_name: str, function: Callable[..., Json], *arguments: Json) -> Json:
    """Run a step here and now."""
    return function(*arguments)


def run_trial(
    request: TrialRequest,
    source: Path | str | None,
    kept: TrialFolder,
    *,
    settings: Settings,
    name: str,
    execute: Callable[..., Json] = call,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_report: Callable[[TrialReport], None] = lambda _report: None,
    checkpoint: Callable[[], None] = lambda: None,
) -> TrialReport:
    """Run a trial as a sequence of steps, and leave its report in the folder.

    A run that has finished is a file; started again with the same folder, a trial trains only the others.

    Args:
        request: What to try.
        source: Path of the corpus, or a Hugging Face data set (``hf:…``); None for images.
        kept: Where everything goes.
        settings: Of the service.
        name: Name of the corpus in the report.
        execute: Runs one step, ``execute(name, function, *json_arguments)``.
        on_progress: Told before every step how far the trial is.
        on_report: Told what is known after each cell.
        checkpoint: Called often inside long steps; may raise to cancel.

    Returns:
        The report.

    Raises:
        RequestError: ``trial_folder_in_use``, ``trial_needs_corpus``, ``trial_takes_no_corpus``, ``trial_needs_positives``,
            ``trial_needs_texts``, ``trial_needs_sts``, ``trial_nothing_held_out``, ``trial_nothing_to_mask``,
            ``batch_size_too_large``.
        ProbeError: Bad input, an encoder that cannot be used, storage that fails.
    """
    clock = _Clock(execute, on_progress)
    corpus = None
    if request.mode is TrialMode.IMAGES:
        if source is not None:
            raise RequestError(
                "trial_takes_no_corpus", "A trial on images brings its own; leave the corpus out."
            )
        kept.claim(request, [])
    else:
        if source is None:
            raise RequestError("trial_needs_corpus", f"A trial of mode {request.mode} needs a corpus.")
        corpus = TrialCorpus(request, source, name, kept.scratch, settings, checkpoint)
        kept.claim(request, corpus.read(clock.step))
    known = kept.report()
    if known is not None and known.complete:
        return known
    if corpus is None:
        setting = _image_setting(request)
    elif request.mode is TrialMode.HEAD:
        setting = _head_setting(request, corpus, kept, clock.step)
    else:
        setting = _full_setting(request, corpus, kept, settings, clock.step)
    trainer, plan = setting.trainer, setting.plan

    def before() -> Json:
        return kept.once("before", lambda: trainer.before(checkpoint))

    def tune(run: Run) -> Json:
        found = f"tuning/{run.name}-lr{run.learning_rate:g}"
        return kept.once(found, lambda: trainer.tuning_score(run, checkpoint))

    def train(run: Run) -> Json:
        return kept.once(f"cells/{run.name}", lambda: trainer.train(run, checkpoint).model_dump(mode="json"))

    untrained = clock.step(Phase.MEASURING, "score without training", before)
    tuning = plan.tuning_runs()
    clock.expect([*tuning, *plan.cells(None)])
    scores = [
        clock.train(Phase.TUNING, f"tune {run.name} at {run.learning_rate:g}", run, tune) for run in tuning
    ]
    tuned = _tuned(tuning, scores)
    runs = plan.cells({(each.loss, each.temperature, each.batch_size): each.chosen for each in tuned})
    finished: list[TrialCell] = []
    for run in runs:
        cell = clock.train(Phase.TRAINING, f"train {run.name}", run, train)
        finished.append(TrialCell.model_validate(cell))
        report = _report(request, setting, untrained, tuned, finished, len(runs))
        kept.put_report(report)
        on_report(report)
    shutil.rmtree(kept.scratch, ignore_errors=True)
    clock.finish()
    return report


def _head_setting(request: TrialRequest, corpus: TrialCorpus, kept: TrialFolder, step: Step) -> Setting:
    """Encode a corpus, for heads."""
    frozen = FrozenCorpus(corpus, request, step)
    training = frozen.training
    trainer = HeadTrial(training, frozen.held_out, request, groups_shared=frozen.groups_shared)
    plan = TrialPlan.from_request(request, rows=trainer.rows, any_known=training.rows.any_known)

    def predict(temperature: float) -> Json:
        def measure() -> Json:
            found = frozen.predicted(list(plan.batch_sizes), temperature)
            return {str(size): estimate.model_dump(mode="json") for size, estimate in found.items()}

        return kept.once(f"predicted/T{temperature:g}", measure)

    predicted: dict[tuple[int, float], Estimate] = {}
    if {TrialLossKind.INFONCE, TrialLossKind.ORACLE_MASKING} <= {loss.kind for loss in plan.losses}:
        for temperature in plan.temperatures:
            found = step(Phase.MEASURING, f"predict S at T = {temperature:g}", predict, temperature)
            for size, estimate in found.items():
                predicted[int(size), temperature] = Estimate.model_validate(estimate)
    return Setting(
        trainer=trainer,
        plan=plan,
        corpus=corpus.training.corpus_info,
        encoder=corpus.training.encoder_info,
        training_rows=len(training.rows),
        training_rows_left_out=frozen.rows_left_out,
        held_out=frozen.describe_held_out(),
        predicted=predicted,
        warnings=[*frozen.warnings(), *unused_hard_negatives(corpus.training.corpus_info)],
    )


def _full_setting(
    request: TrialRequest, corpus: TrialCorpus, kept: TrialFolder, settings: Settings, step: Step
) -> Setting:
    """Load an encoder, to train it."""
    sts = None if settings.sts is None else Sts(read_sts(settings.sts), read_sts_dev(settings.sts))
    texts = TextCorpus(corpus, request, with_sts=sts is not None)
    name = request.encoder or default_encoder_name(settings)

    def load() -> Json:
        load_for_training(name, settings)
        return {}

    step(Phase.LOADING, "load the encoder", load)
    # The trainer of sentence-transformers takes seconds to import, and only this mode needs it.
    from probe_service.trial.full import FullTrial

    base = load_for_training(name, settings)
    trainer = FullTrial(base, texts.training, texts.dev, texts.held_out, sts, request, kept.scratch / "runs")
    training = texts.training.rows
    return Setting(
        trainer=trainer,
        plan=TrialPlan.from_request(request, rows=len(training), any_known=training.any_grouped),
        corpus=corpus.training.corpus.info,
        encoder=load_encoder(name, settings).info,
        training_rows=len(training),
        training_rows_left_out=0,
        held_out=texts.describe_held_out(),
        predicted={},
        warnings=unused_hard_negatives(corpus.training.corpus.info),
    )


def _image_setting(request: TrialRequest) -> Setting:
    trainer = ImageTrial(request)
    return Setting(
        trainer=trainer,
        plan=TrialPlan.from_request(request, rows=trainer.rows, any_known=True),
        corpus=None,
        encoder=None,
        training_rows=trainer.training_rows,
        training_rows_left_out=0,
        held_out=trainer.describe_held_out(),
        predicted={},
        warnings=[],
    )


def _tuned(runs: Sequence[Run], scores: Sequence[float]) -> list[TunedRate]:
    """Choose the best rate of each loss, temperature and size; the smaller of equals."""
    tried: dict[tuple[str, int, float], dict[float, float]] = {}
    for run, score in zip(runs, scores, strict=True):
        tried.setdefault((run.loss.name, run.batch_size, run.temperature), {})[run.learning_rate] = score
    return [
        TunedRate(
            loss=loss,
            batch_size=size,
            temperature=temperature,
            scores={f"{rate:g}": score for rate, score in by_rate.items()},
            chosen=max(by_rate, key=lambda rate: by_rate[rate]),
        )
        for (loss, size, temperature), by_rate in tried.items()
    ]


def _report(
    request: TrialRequest,
    setting: Setting,
    before: dict[str, float],
    tuned: list[TunedRate],
    finished: list[TrialCell],
    num_cells: int,
) -> TrialReport:
    plan, trainer = setting.plan, setting.trainer
    gains = masking_gains(finished, trainer.metric, setting.predicted)
    return TrialReport(
        request=request,
        complete=len(finished) == num_cells,
        num_cells=num_cells,
        corpus=setting.corpus,
        encoder=setting.encoder,
        training_rows=setting.training_rows,
        training_rows_left_out=setting.training_rows_left_out,
        held_out=setting.held_out,
        protocol=[*_fairness(plan), *trainer.protocol()],
        metric=trainer.metric,
        before=before,
        tuned=tuned,
        table=trial_table(finished),
        masking=gains,
        rank_correlation=rank_correlation(gains),
        cells=finished,
        warnings=[*setting.warnings, *_edge_warnings(plan, tuned)],
    )


def _fairness(plan: TrialPlan) -> list[str]:
    """What was kept equal, in sentences."""
    if plan.steps is not None:
        equal = f"Every cell takes {plan.steps} steps, so that a batch of N sees {plan.steps} × N anchors."
    else:
        equal = (
            f"Every cell sees {plan.examples} anchors, so that a batch of N takes {plan.examples} / N steps."
        )
    rates = ", ".join(f"{rate:g}" for rate in plan.learning_rates)
    chosen = f"Every cell trains at a learning rate of {rates}."
    if len(plan.learning_rates) > 1:
        ends = " and ".join(str(size) for size in sorted({plan.batch_sizes[0], plan.batch_sizes[-1]}))
        chosen = (
            f"The learning rate of each loss and temperature is the best of {rates} at N = {ends}, in between in proportion to"
            f" log N; they were compared by the metric on {TUNING_SHARE:g} of the training rows, kept apart, with a seed of"
            " its own. The cells train on all training rows."
        )
    return [
        equal,
        chosen,
        "Losses are compared on the same batches from the same first weights, seed by seed.",
    ]


def _edge_warnings(plan: TrialPlan, tuned: Sequence[TunedRate]) -> list[ReportWarning]:
    """Say which arms might do better beyond the rates that were tried."""
    ends = {plan.learning_rates[0], plan.learning_rates[-1]}
    at_edge = [f"{each.loss} at N = {each.batch_size}" for each in tuned if each.chosen in ends]
    if not at_edge:
        return []
    return [
        ReportWarning(
            code="learning_rate_at_edge",
            message=f"The best learning rate is the smallest or the largest tried for {', '.join(at_edge)};"
            " another might do better.",
        )
    ]


class _Clock:
    """Runs the steps and tells how far they are."""

    def __init__(self, execute: Callable[..., Json], on_progress: Callable[[Progress], None]) -> None:
        self._execute, self._on_progress = execute, on_progress
        self._steps, self._runs, self._num_runs = 0, 0, 0
        self._cost, self._total_cost = 0.0, 0.0
        self._began = time.monotonic()

    def step(self, phase: Phase, name: str, function: Callable[..., Json], *arguments: Json) -> Json:
        """Run a step before the training; how many there will be is not known."""
        self._tell(phase, 0.0, self._steps, self._steps + 1, "steps")
        self._steps += 1
        return self._execute(name, function, *arguments)

    def expect(self, runs: Sequence[Run]) -> None:
        """Tell what will be trained."""
        self._num_runs, self._total_cost = len(runs), sum(run.cost for run in runs)
        self._began = time.monotonic()

    def train(self, phase: Phase, name: str, run: Run, function: Callable[[Run], Json]) -> Json:
        """Run one training run as a step."""
        self._tell(phase, self._cost / self._total_cost, self._runs, self._num_runs, "runs")
        self._runs, self._cost = self._runs + 1, self._cost + run.cost
        return self._execute(name, lambda: function(run))

    def finish(self) -> None:
        """Tell that all is done."""
        self._tell(Phase.TRAINING, 1.0, self._num_runs, self._num_runs, "runs")

    def _tell(self, phase: Phase, fraction: float, done: int, total: int, unit: str) -> None:
        elapsed = time.monotonic() - self._began
        left = elapsed * (1 - fraction) / fraction if fraction > 0.02 else None
        self._on_progress(
            Progress(
                phase=phase, fraction=min(1.0, fraction), done=done, total=total, unit=unit, eta_seconds=left
            )
        )
