"""One probe from end to end: read, encode, measure, judge, report."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import json
import platform
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

from probe_service.advise import advise, worst_case_assumption
from probe_service.estimate import ShareScan, curve_point
from probe_service.schemas import (
    CONFIDENCE_LEVEL,
    SIMILARITY_THRESHOLDS,
    BatchSizeLimit,
    CorpusKind,
    CurvePoint,
    DropEffect,
    EvidenceInfo,
    Phase,
    ProbeReport,
    ProbeRequest,
    Progress,
    ReportWarning,
    RunInfo,
    SamplingInfo,
)
from probe_service.settings import Settings
from probe_service.workspace import Workspace

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

    complete = work.evidence.unjudged_rows is None
    deduplicate = bool(work.rows_to_drop) and len(work.anchors) - len(work.rows_to_drop) >= 2
    measuring = sum(len(work.batch_parts(size)) + len(work.reference_parts(size)) for size in work.sizes)
    scans = [False, True] if deduplicate else [False]
    measuring += sum(len(work.scan_parts(deduplicated=scan)) for scan in scans) + 3
    measuring += sum(len(work.exact_parts(deduplicated=scan)) for scan in scans)
    clock.begin(Phase.MEASURING, measuring, "steps")
    clock.step("find the worst case's similarity", work.find_floor)
    for scan in scans:
        for exact_part in work.exact_parts(deduplicated=scan):
            clock.step(f"look at all pairs {exact_part}", lambda part=exact_part: work.measure_exact(part))
    for size in work.sizes:
        for batch_part in work.batch_parts(size):
            clock.step(f"measure {batch_part}", lambda part=batch_part: work.measure(part))
        for batch_part in work.reference_parts(size):
            clock.step(f"measure beside {batch_part}", lambda part=batch_part: work.measure_reference(part))
        clock.curve.append(_point(work, size))
    for scan in scans:
        for scan_part in work.scan_parts(deduplicated=scan):
            clock.step(f"scan {scan_part}", lambda part=scan_part: work.scan(part))
    clock.step("find the most similar pairs", work.find_pairs)
    clock.step("count similarities", work.count_similarities)

    clock.begin(Phase.ADVISING, 1, "reports")
    report = _report(
        work, request, clock, job_id=job_id, started=started, complete=complete, deduplicate=deduplicate
    )
    # Copied, not moved: after a crash here the report is made again from what the steps left.
    shutil.copyfile(work.pairs_file, folder / "pairs.jsonl")
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


def _point(work: Workspace, size: int) -> CurvePoint:
    return curve_point(
        size,
        work.size_measurements(size),
        work.evidence,
        work.plan,
        thresholds=SIMILARITY_THRESHOLDS,
        ordered_pairs=work.positives is not None,
        exact=work.exact_figures(size),
    )


def _report(
    work: Workspace,
    request: ProbeRequest,
    clock: _Clock,
    *,
    job_id: str,
    started: str,
    complete: bool,
    deduplicate: bool,
) -> ProbeReport:
    evidence = _evidence(work, complete=complete)
    assumption = worst_case_assumption(work.floor["similarity"])
    scan = work.share_scan(deduplicated=False)
    n_max = _limit(scan, request.budget, assumption, work)
    drop = _drop_effect(work, request.budget, assumption) if deduplicate else None
    advice = advise(
        clock.curve,
        n_max,
        drop,
        work.corpus_info,
        evidence,
        budget=request.budget,
        complete=complete,
        assumption=assumption,
    )
    keep = [*work.sizes, *([n_max.value, n_max.value + 1] if n_max.value else [])]
    return ProbeReport(
        run=RunInfo(
            id=job_id,
            created_at=started,
            finished_at=_now(),
            host=socket.gethostname(),
            versions=_versions(),
        ),
        request=request,
        corpus=work.corpus_info,
        encoder=work.encoder_info,
        evidence=evidence,
        sampling=_sampling(work, request),
        curve=clock.curve,
        scan=scan.thinned(keep) if scan else [],
        histogram=work.histogram(),
        pairs=work.similar_pairs(SHOWN_PAIRS),
        advice=advice,
        warnings=_warnings(work, complete=complete),
        timings={phase: round(seconds, 3) for phase, seconds in clock.seconds.items()},
    )


def _limit(scan: ShareScan | None, budget: float, assumption: str, work: Workspace) -> BatchSizeLimit:
    if scan is not None:
        return scan.limit(budget, assumption=assumption)
    return BatchSizeLimit(
        value=None,
        tested_up_to=0,
        exceeded=False,
        reason=f"{work.corpus_info.rows_encoded} of {work.corpus_info.rows_usable} rows were encoded: too few for any interval",
    )


def _drop_effect(work: Workspace, budget: float, assumption: str) -> DropEffect:
    scan = work.share_scan(deduplicated=True)
    return DropEffect(
        rows_to_drop=work.rows_to_drop,
        rows_remaining=len(work.anchors) - len(work.rows_to_drop),
        n_max_after=None if scan is None else scan.limit(budget, assumption=assumption),
        share_after=[] if scan is None else [scan.point(size) for size in work.sizes if size <= scan.largest],
    )


def _evidence(work: Workspace, *, complete: bool) -> EvidenceInfo:
    rows = len(work.anchors)
    known = int(work.evidence.false_negative_counts().sum())
    labelled = work.evidence.group is not None
    if labelled and complete:
        description = (
            "Every row has a group, which is taken as a complete judgement: rows of one group mean the same, rows of "
            "different groups do not."
        )
    elif labelled:
        description = "Rows with a group are judged; pairs with a row without a group are unjudged, unless their texts are equal."
    else:
        description = (
            "Nothing is known about the rows but their texts: equal texts certainly mean the same, all other pairs are "
            "unjudged."
        )
    return EvidenceInfo(
        tier="labelled" if labelled else "certain",
        description=description,
        known_false_negative_pairs=known,
        ordered_pairs=rows * (rows - 1),
        unjudged_pair_share=work.evidence.unjudged_pair_share(),
        worst_case_similarity=work.floor["similarity"],
        worst_case_source=work.floor["source"],
    )


def _sampling(work: Workspace, request: ProbeRequest) -> SamplingInfo:
    plan = work.plan
    exact_up_to = work.exact_up_to(deduplicated=False)
    return SamplingInfo(
        method="exact" if exact_up_to else "sampled",
        exact_up_to=exact_up_to or None,
        sampler="random",
        confidence_level=CONFIDENCE_LEVEL,
        seed=request.seed,
        num_repeats=request.num_repeats,
        top_k=request.top_k,
        temperature=request.temperature,
        sub_pools=None if plan.whole_corpus else 20,
        interval=_interval_in_words(whole_corpus=plan.whole_corpus, exact_up_to=exact_up_to),
        largest_size_with_interval=plan.largest_size_with_interval,
    )


def _interval_in_words(*, whole_corpus: bool, exact_up_to: int) -> str:
    if not whole_corpus:
        return "A sample of the rows is encoded: intervals come from 20 disjoint random sub-pools of it."
    sampled = "Every usable row is encoded: intervals hold the Monte Carlo error of drawing batches."
    if not exact_up_to:
        return sampled
    return (
        f"{sampled} Up to N = {exact_up_to} the shares S and G, the hardest negative and the expected pairs above a similarity "
        "come from all pairs of the corpus and have no such error."
    )


def _warnings(work: Workspace, *, complete: bool) -> list[ReportWarning]:
    said: list[ReportWarning] = []

    def warn(code: str, message: str) -> None:
        said.append(ReportWarning(code=code, message=message))

    corpus, encoder = work.corpus_info, work.encoder_info
    if encoder.backend != "none" and encoder.revision is not None and not encoder.revision_pinned:
        warn(
            "revision_not_pinned",
            f"{encoder.name} was loaded at commit {encoder.revision}, which is not pinned here; name it to repeat this.",
        )
    if corpus.kind is CorpusKind.TUPLES:
        warn(
            "hard_negatives_not_counted",
            f"The {corpus.hard_negatives} hard negatives were read and counted, but are no candidates here: the figures "
            "speak of in-batch negatives.",
        )
    if corpus.columns.label is not None and work.evidence.group is None:
        warn(
            "label_not_used",
            f"The column {corpus.columns.label!r} was not taken as meaning: a topic is no meaning. Set label_is_meaning if "
            "rows with one label mean the same.",
        )
    contradictions = work.evidence.contradictions()
    if contradictions:
        warn(
            "groups_contradict_texts",
            f"{contradictions} ordered pairs have equal texts but different groups; they are counted as false negatives.",
        )
    if not complete:
        warn(
            "unjudged_pairs",
            "Most pairs are unjudged: S is given as a lower bound (certain pairs) and a worst case, not as an estimate.",
        )
    if corpus.truncated is not None and corpus.truncated.collisions:
        warn(
            "truncation_collisions",
            f"{corpus.truncated.collisions} rows equal another only after the tokenizer cut them; they are not counted as "
            "false negatives.",
        )
    beyond = [size for size in work.sizes if size > work.plan.largest_size_with_interval]
    if beyond:
        warn(
            "no_interval",
            f"Sizes {beyond} are above {work.plan.largest_size_with_interval} (a twentieth of the encoded rows): their values "
            "stand without an interval, and no verdict rests on them.",
        )
    return said


def _versions() -> dict[str, str]:
    names = ("probe-service", "numpy", "scipy", "torch", "sentence-transformers", "transformers")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(
            importlib.metadata.PackageNotFoundError
        ):  # e.g. run from a checkout on the path
            versions[name] = importlib.metadata.version(name)
    return versions


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
