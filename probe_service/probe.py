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
from pathlib import Path
from typing import Any

from probe_service.describe import versions
from probe_service.early import EarlyLooks
from probe_service.measure import Task
from probe_service.reporting import Measurement, make_report
from probe_service.schemas import CurvePoint, Phase, ProbeReport, ProbeRequest, Progress, RunInfo
from probe_service.settings import Settings
from probe_service.workspace import Wave, Workspace

__all__ = ["Executor", "probe", "run_probe"]

Json = Any
Executor = Callable[..., Json]
"""Runs one step: ``execute(name, function, *json_arguments)`` returns the function's small JSON result."""


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
    early = EarlyLooks(work, request, started, sum(clock.seconds.values()))
    waves = [Wave(**wave) for wave in read["waves"]]
    clock.begin(Phase.ENCODING, read["parts"] + 1, "parts")
    encoded, stopped = 0, False
    for wave, following in zip(waves, [*waves[1:], None], strict=False):
        for part in range(encoded, wave.parts):
            clock.step(f"encode part {part}", work.encode, part)
        encoded = wave.parts
        if following is not None and early.due(wave):
            stopped = clock.step(f"look at the first {wave.rows} rows", early.look, wave.rows, following.rows)
            clock.show(early.curve(wave.rows), wave.rows)
        if stopped:
            break
    clock.step("gather the vectors", work.gather, wave.rows if stopped else None)

    for part in range(work.view_parts):
        clock.step(f"compare views {part}", work.compare_views, part)
    clock.step("find the worst case's similarity", work.find_floor)
    measured = Measurement(work, request)
    everything = [
        *measured.first,
        *(task for each in measured.at_sizes for task in each.tasks),
        *measured.last,
    ]
    clock.begin(Phase.MEASURING, sum(len(task.parts()) for task in everything), "steps")

    def run(tasks: list[Task]) -> None:
        for task in tasks:
            for part in task.parts():
                clock.step(f"{task.name} {part}", lambda task=task, part=part: task.run(part))

    run(measured.first)
    clock.extend(sum(len(task.parts()) for task in measured.remedies.tasks()))
    curve = []
    for at_size in measured.at_sizes:
        run(at_size.tasks)
        curve.append(at_size.point())
        clock.show(curve)
    run(measured.last)
    run(measured.remedies.tasks())

    clock.begin(Phase.ADVISING, 1, "reports")
    report = make_report(
        measured,
        curve,
        RunInfo(
            id=job_id,
            created_at=started,
            finished_at=_now(),
            host=socket.gethostname(),
            versions=versions(),
        ),
        {phase: round(seconds, 3) for phase, seconds in clock.seconds.items()},
    )
    # Copied, not moved: after a crash here the report is made again from what the steps left.
    shutil.copyfile(measured.pairs.file, folder / "pairs.jsonl")
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
        self._curve: list[CurvePoint] = []
        self._curve_rows: int | None = None
        self.seconds: dict[str, float] = {}

    def begin(self, phase: Phase, total: int, unit: str) -> None:
        """Enter a phase of `total` steps."""
        self._phase, self._done, self._total, self._unit = phase, 0, total, unit
        self._tell()

    def show(self, curve: Sequence[CurvePoint], rows: int | None = None) -> None:
        """Tell of a curve; while not all rows are encoded, of how many it is."""
        if curve:
            self._curve, self._curve_rows = list(curve), rows
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
                curve=self._curve,
                curve_rows=self._curve_rows,
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
                curve=self._curve,
                curve_rows=self._curve_rows,
            )
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
