"""One probe from end to end: read, encode, measure, judge, report."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import socket
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probe_service.advise import advise, worst_case_assumption
from probe_service.corpus import BatchSampler
from probe_service.describe import (
    describe_evidence,
    describe_harm,
    describe_sampling,
    describe_temperatures,
    versions,
    warnings,
)
from probe_service.estimate import (
    BorrowedCurve,
    MatchedGaussian,
    borrowed_curve,
    curve_point,
    starvation_floor,
)
from probe_service.measure import Batches, Histograms, ListedCurve, References, Shares, SimilarPairs, Task
from probe_service.remedies import Remedies, training_snippet
from probe_service.schemas import (
    BatchSizeLimit,
    CurvePoint,
    DropEffect,
    Phase,
    ProbeReport,
    ProbeRequest,
    Progress,
    RunInfo,
    StarvationFloor,
)
from probe_service.settings import Settings
from probe_service.snippets import drop_rows
from probe_service.workspace import Population, Workspace

__all__ = ["Executor", "probe", "run_probe"]

Json = Any
Executor = Callable[..., Json]
"""Runs one step: ``execute(name, function, *json_arguments)`` returns the function's small JSON result."""

SHOWN_PAIRS = 20


def _ignore(_progress: Progress) -> None:
    pass


def call(_name: str, function: Callable[..., Json], *arguments: Json) -> Json:
    """Run a step here and now: the executor of a probe without a job."""
    return function(*arguments)


def probe(
    texts: Sequence[str] | Path | str,
    *,
    on_progress: Callable[[Progress], None] = _ignore,
    settings: Settings | None = None,
    **request: Any,
) -> ProbeReport:
    """Probe a corpus in this process.

    Args:
        texts: One text a row, or the path of a corpus file, or a Hugging Face data set (``hf:…``).
        on_progress: Told how far the probe is.
        settings: Defaults to those of the environment.
        **request: Fields of `ProbeRequest`, e.g. ``encoder="minilm", batch_sizes=(16, 64)``.

    Returns:
        The report.

    Raises:
        ProbeError: Bad input, an encoder that cannot be used, storage that fails.
    """
    settings = settings or Settings()
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        source: Path | str
        if isinstance(texts, Path) or (isinstance(texts, str) and not texts.startswith("hf:")):
            source = Path(texts)
        elif isinstance(texts, str):
            source = texts
        else:
            source = Path(folder) / "rows.jsonl"
            _write_rows(source, texts)
        return run_probe(
            ProbeRequest.model_validate(request),
            source,
            Path(folder) / "work",
            settings=settings,
            job_id=uuid.uuid4().hex,
            name=source.name if isinstance(source, Path) else source,
            on_progress=on_progress,
        )


def run_probe(
    request: ProbeRequest,
    source: Path | str,
    folder: Path,
    *,
    settings: Settings,
    job_id: str,
    name: str,
    execute: Executor = call,
    on_progress: Callable[[Progress], None] = _ignore,
    checkpoint: Callable[[], None] = lambda: None,
) -> ProbeReport:
    """Run one probe as a sequence of short steps, and leave report.json and pairs.jsonl in the folder.

    Args:
        request: What to measure.
        source: Path of the corpus, or a Hugging Face data set (``hf:…``).
        folder: Where the results go, and until then intermediate ones; a step that finished is not repeated after a crash
            if `execute` remembers it.
        settings: Of the service.
        job_id: Identifies the run in the report.
        name: Name of the corpus in the report.
        execute: Runs one step.
        on_progress: Told after every step how far the probe is, with the curve so far.
        checkpoint: Called often inside long steps; may raise to cancel.

    Returns:
        The report.

    Raises:
        ProbeError: Bad input, an encoder that cannot be used, storage that fails.
    """
    finished = folder / "report.json"
    clock = _Clock(execute, on_progress)
    if finished.exists():
        # A crash after the last step: what the steps left may be gone already, and is not needed.
        clock.finish()
        return ProbeReport.model_validate_json(finished.read_bytes())
    scratch = folder / "scratch"
    work = Workspace(request, source, name, scratch, settings, checkpoint)
    clock.begin(Phase.READING, 1, "corpora")
    started = clock.step("start", _now)
    read = clock.step("read the corpus", work.read)
    clock.begin(Phase.LOADING, 1, "encoders")
    if read["parts"]:
        clock.step("load the encoder", work.load)
    clock.begin(Phase.ENCODING, read["parts"] + 1, "parts")
    for part in range(read["parts"]):
        clock.step(f"encode part {part}", work.encode, part)
    clock.step("gather the vectors", work.gather)

    for part in range(work.view_parts):
        clock.step(f"compare views {part}", work.compare_views, part)
    clock.step("find the worst case's similarity", work.find_floor)
    population = work.population
    borrowed = borrowed_curve(work.encoder_info.name, work.encoder_info.revision)

    def shares_of(rows: Population, places: NDArray[np.int64] | None) -> Shares:
        return Shares(
            rows,
            work.sizes,
            request,
            lambda: work.training_rows(places),
            borrowed,
            work.scratch,
            detailed=rows is population,
        )

    shares = shares_of(population, None)
    distinct = None
    if len(work.distinct_rows) < len(population) and len(work.distinct_rows) >= max(2, min(work.sizes)):
        distinct = shares_of(work.distinct_population, work.distinct_rows)
    gaussians = [
        MatchedGaussian.fit(side) for side in (population.anchors, population.positives) if side is not None
    ]
    at_sizes = [
        (
            shares.batches(size),
            References(
                population,
                gaussians,
                size,
                temperature=request.temperature,
                k=request.top_k,
                scratch=work.scratch,
            ),
            shares.listed_curve(size),
        )
        for size in work.sizes
    ]
    pairs, histograms = SimilarPairs(work), Histograms(population, work.scratch)
    # The points of the curve need the figures of all pairs and the list of the most similar ones, so these come first.
    before: list[Task] = [task for task in (shares.all_pairs, shares.listing) if task is not None]
    after = [task for task in shares.tasks(measured=work.sizes) if task not in before]
    after += [] if distinct is None else distinct.tasks()
    after += [pairs, histograms]
    tasks = [*before, *(task for each in at_sizes for task in each if task is not None), *after]
    clock.begin(Phase.MEASURING, sum(len(task.parts()) for task in tasks), "steps")

    def run(task: Task) -> None:
        for part in task.parts():
            clock.step(f"{task.name} {part}", lambda part=part: task.run(part))

    for task in before:
        run(task)
    remedies = Remedies(work, request, shares, worst_case_assumption(population.floor))
    clock.extend(sum(len(task.parts()) for task in remedies.tasks()))
    for batches, references, listed in at_sizes:
        run(batches)
        run(references)
        if listed is not None:
            run(listed)
        clock.curve.append(_point(batches, references, listed, shares))
    for rest in [*after, *remedies.tasks()]:
        run(rest)

    clock.begin(Phase.ADVISING, 1, "reports")
    report = _report(
        work,
        request,
        clock,
        shares,
        distinct,
        borrowed,
        remedies,
        pairs,
        histograms,
        job_id=job_id,
        started=started,
    )
    # Copied, not moved: after a crash here the report is made again from what the steps left.
    shutil.copyfile(pairs.file, folder / "pairs.jsonl")
    partial = folder / "report.json.partial"
    partial.write_text(report.model_dump_json(), encoding="utf-8")
    partial.replace(finished)
    shutil.rmtree(scratch)
    clock.finish()
    return report


_PHASE_SHARES = {Phase.READING: 0.05, Phase.LOADING: 0.05, Phase.ENCODING: 0.55, Phase.MEASURING: 0.34}
"""Guessed shares of the whole work, for the progress bar."""


class _Clock:
    """Runs the steps, and tells how far they are and what they cost."""

    def __init__(self, execute: Executor, on_progress: Callable[[Progress], None]) -> None:
        self._execute, self._on_progress = execute, on_progress
        self._began = time.monotonic()
        self._phase, self._done, self._total, self._unit = Phase.READING, 0, 1, ""
        self.curve: list[CurvePoint] = []
        self.seconds: dict[str, float] = {}

    def begin(self, phase: Phase, total: int, unit: str) -> None:
        """Enter a phase of `total` steps."""
        self._phase, self._done, self._total, self._unit = phase, 0, total, unit
        self._tell()

    def extend(self, steps: int) -> None:
        """Count further steps of this phase."""
        self._total += steps

    def step(self, name: str, function: Callable[..., Json], *arguments: Json) -> Json:
        """Run one step and count it."""

        def timed(*given: Json) -> Json:
            began = time.perf_counter()
            result = function(*given)
            return {"result": result, "seconds": time.perf_counter() - began}

        outcome = self._execute(name, timed, *arguments)
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + outcome["seconds"]
        self._done += 1
        self._tell()
        return outcome["result"]

    def finish(self) -> None:
        """Tell that all is done."""
        self._phase, self._done, self._total = Phase.ADVISING, 1, 1
        self._on_progress(
            Progress(
                phase=self._phase,
                fraction=1.0,
                done=1,
                total=1,
                unit=self._unit,
                eta_seconds=0.0,
                curve=self.curve,
            )
        )

    def _tell(self) -> None:
        before = 0.0
        for phase, share in _PHASE_SHARES.items():
            if phase is self._phase:
                before += share * min(1.0, self._done / self._total)
                break
            before += share
        elapsed = time.monotonic() - self._began
        fraction = min(before, 0.99)
        self._on_progress(
            Progress(
                phase=self._phase,
                fraction=fraction,
                done=min(self._done, self._total),
                total=self._total,
                unit=self._unit,
                eta_seconds=elapsed * (1 - fraction) / fraction if fraction > 0.1 and elapsed > 1 else None,
                curve=list(self.curve),
            )
        )


def _point(
    batches: Batches, references: References, listed: ListedCurve | None, shares: Shares
) -> CurvePoint:
    measured = batches.result()
    if listed is not None:
        measured = replace(measured, whole={**measured.whole, **listed.result()})
    return curve_point(
        batches.size,
        measured,
        references.result(),
        shares.setting,
        candidates_per_anchor=shares.softmaxes.candidates_per_anchor(batches.size),
        exact=None if shares.all_pairs is None else shares.all_pairs.figures(batches.size),
    )


def _report(
    work: Workspace,
    request: ProbeRequest,
    clock: _Clock,
    shares: Shares,
    distinct: Shares | None,
    borrowed: BorrowedCurve | None,
    remedies: Remedies,
    pairs: SimilarPairs,
    histograms: Histograms,
    *,
    job_id: str,
    started: str,
) -> ProbeReport:
    evidence = describe_evidence(work, shares, borrowed)
    assumption = worst_case_assumption(work.floor["similarity"])
    n_max = _limit(shares, request, assumption)
    advice = advise(
        clock.curve,
        n_max,
        None if distinct is None else _drop_effect(work, distinct, request, assumption),
        work.corpus_info,
        evidence,
        budget=request.budget,
        complete=shares.setting.complete,
        assumption=assumption,
        remedies=remedies.result(clock.curve),
        starvation_floor=_starvation(clock.curve, shares.population, request),
        snippet=_snippet(work, request, n_max),
    )
    keep = [*work.sizes, *([n_max.value, n_max.value + 1] if n_max.value else [])]
    return ProbeReport(
        run=RunInfo(
            id=job_id,
            created_at=started,
            finished_at=_now(),
            host=socket.gethostname(),
            versions=versions(),
        ),
        request=request,
        corpus=work.corpus_info,
        encoder=work.encoder_info,
        evidence=evidence,
        sampling=describe_sampling(work, shares, request),
        curve=clock.curve,
        scan=shares.scan.thinned(keep) if shares.scan else [],
        shares_by_temperature=describe_temperatures(shares),
        harm=describe_harm(work, shares),
        histogram=histograms.result(),
        pairs=pairs.result(SHOWN_PAIRS),
        advice=advice,
        warnings=warnings(work, shares, request),
        timings={phase: round(seconds, 3) for phase, seconds in clock.seconds.items()},
    )


def _starvation(
    curve: list[CurvePoint], population: Population, request: ProbeRequest
) -> StarvationFloor | None:
    if any(point.gradient_error is None for point in curve):
        return None
    given = population.positives is not None
    own = population.own_similarity
    if population.positives is not None:
        own = np.einsum("nd,nd->n", population.anchors, population.positives)
    assert own is not None
    found = [point.gradient_error for point in curve if point.gradient_error is not None]
    return starvation_floor(
        [point.batch_size for point in curve],
        {dtype: [errors[dtype] for errors in found] for dtype in found[0]},
        dtype=request.training_dtype,
        temperature=request.temperature,
        positive_similarity=float(np.clip(own.mean(), -1.0, 1.0)),
        positives="given" if given else "dropout",
    )


def _snippet(work: Workspace, request: ProbeRequest, n_max: BatchSizeLimit) -> str | None:
    if n_max.per_device is None or n_max.per_device < 2:
        return None
    sampler = request.sampler
    return training_snippet(
        work,
        request,
        BatchSampler(
            sampler.kind,
            n_max.per_device,
            world_size=sampler.world_size,
            gather=sampler.gather,
            policy=sampler.policy,
            within_source=sampler.within_source,
        ),
    )


def _limit(shares: Shares, request: ProbeRequest, assumption: str) -> BatchSizeLimit:
    plan = shares.population.plan
    if shares.scan is None:
        return BatchSizeLimit(
            value=None,
            tested_up_to=0,
            exceeded=False,
            reason=f"{plan.rows_encoded} of {plan.rows_usable} rows were encoded: too few for any interval",
        )
    limit = shares.scan.limit(request.budget, assumption=assumption)
    if limit.value is None:
        return limit
    return limit.model_copy(update={"per_device": limit.value // shares.setting.devices})


def _drop_effect(work: Workspace, distinct: Shares, request: ProbeRequest, assumption: str) -> DropEffect:
    scan = distinct.scan
    return DropEffect(
        rows_to_drop=work.rows_to_drop,
        snippet=drop_rows(work.rows_to_drop, rows_read=work.corpus_info.rows_read),
        rows_remaining=len(distinct.population),
        n_max_after=None if scan is None else _limit(distinct, request, assumption),
        share_after=[] if scan is None else [scan.point(size) for size in work.sizes if size in scan.sizes],
    )


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _write_rows(file: Path, texts: Sequence[str]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for text in texts:
            lines.write(json.dumps({"text": text}) + "\n")


class _CallableModule(types.ModuleType):
    """Lets ``probe_service.probe(...)`` mean `probe`, although a module of that name is the home of it."""

    def __call__(self, *arguments: Any, **options: Any) -> ProbeReport:
        return probe(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
