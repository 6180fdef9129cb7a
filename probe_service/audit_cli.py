"""``probe audit``: draw pairs to label, label them or have them labelled, and apply the labels."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe_service.cli_options import (
    ProgressLine,
    Sizes,
    corpus_options,
    extra,
    option,
    read_settings,
    request_from,
)
from probe_service.errors import InputError, ServiceError

if TYPE_CHECKING:
    from probe_service.audit import AuditFolder
    from probe_service.judges import LabelStore
    from probe_service.schemas import AuditReport, AuditRequest, ProbeRequest
    from probe_service.settings import Settings

__all__ = ["audit"]

_sheet_argument = click.argument("pairs", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group()
def audit() -> None:
    """Measure S with a few hundred labels: draw pairs, label them, apply the labels."""


@audit.command()
@click.argument("corpus")
@option("--batch-sizes", type=Sizes(), help="Sizes that the labels shall serve [powers of two that fit].")
@option("--labels", type=click.IntRange(2, 5000), default=200, show_default=True, help="Pairs to draw.")
@option(
    "--checks",
    type=click.IntRange(0, 500),
    default=20,
    show_default=True,
    help="Hidden certain duplicates, and as many certain others, that measure the judge.",
)
@option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The sheet to label: .jsonl or .csv.",
)
@corpus_options
def draw(
    corpus: str,
    batch_sizes: tuple[int, ...] | None,
    labels: int,
    checks: int,
    out: Path,
    **options: Any,
) -> None:
    """Draw pairs of CORPUS in proportion to the push that they receive, and write a blind sheet to label.

    Beside the sheet lies NAME.audit.json, which says what the questions stand for: keep it, and do not show it to who labels.
    """
    from probe_service.audit import Audit, AuditFolder
    from probe_service.judges import Sheet
    from probe_service.schemas import AuditRequest

    if not corpus.startswith("hf:") and not Path(corpus).is_file():
        raise click.ClickException(f"there is no file {corpus!r}; a Hugging Face data set is written hf:NAME")
    if out.suffix.lower() not in (".jsonl", ".csv"):
        raise click.UsageError(f"--out writes .jsonl or .csv, not {out.name!r}")
    beside = Audit.file_beside(out)
    for file in (out, beside):
        if file.exists():
            raise InputError(
                "audit_sheet_exists",
                f"{file} is there already, perhaps with labels; move it or name another.",
            )
    settings = read_settings()
    request = request_from(batch_sizes, options)
    with tempfile.TemporaryDirectory(prefix="probe-audit-") as folder:
        kept = AuditFolder(Path(folder), settings.home)
        _draw(corpus, request, AuditRequest(labels=labels, checks=checks), kept, settings)
        private, blind = kept.audit(), kept.sheet()
    private.save(beside)
    judges = blind.judges
    answers = {id_: (answer, judges[id_]) for id_, answer in blind.answers.items()}
    Sheet(out, blind.questions, answers).write()
    asked_to_check = len(private.checks_and_repeats)
    click.echo(
        f"{out}: {len(blind.questions)} questions ({len(blind.questions) - asked_to_check} pairs, {asked_to_check} repeats "
        f"and hidden checks), {len(answers)} of them labelled before."
    )
    click.echo(f"Write yes, no or unsure into the column label, or: probe audit label {out}")
    click.echo(f"Then: probe audit apply {corpus} {out}")


def _draw(
    corpus: str, request: ProbeRequest, wanted: AuditRequest, kept: AuditFolder, settings: Settings
) -> None:
    with extra("cpu"):
        from probe_service.audit.running import run_draw
    hub = corpus.startswith("hf:")
    line = ProgressLine()
    try:
        run_draw(
            request,
            corpus if hub else Path(corpus),
            kept,
            wanted,
            settings=settings,
            name=corpus if hub else Path(corpus).name,
            on_progress=line.show,
        )
    finally:
        line.close()


@audit.command()
@_sheet_argument
def label(pairs: Path) -> None:
    """Label PAIRS here, one key a pair; quit and go on whenever you like."""
    from probe_service.judges import Sheet, answer_sheet
    from probe_service.judges.terminal import TerminalJudge

    sheet = Sheet.read(pairs)
    answer_sheet(sheet, TerminalJudge())
    left = len(sheet.open_questions)
    click.echo(
        f"{len(sheet.answers)} of {len(sheet.questions)} labelled" + (f", {left} left." if left else ".")
    )


@audit.command("judge")
@_sheet_argument
@option("--judge", "name", required=True, help="cross-encoder:NAME, or chat:MODEL@http://host/v1.")
@option(
    "--threshold",
    type=float,
    default=0.5,
    show_default=True,
    help="Least score of a cross-encoder that means yes.",
)
@option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="Requests at a time.")
@option(
    "--price-per-million",
    type=click.FloatRange(0),
    help="Of input tokens, in any currency: the cost is shown before the first call.",
)
def judge_pairs(
    pairs: Path, name: str, threshold: float, concurrency: int, price_per_million: float | None
) -> None:
    """Have PAIRS labelled by a model. Each answer is kept at once: after a fault the same command goes on.

    The key of a chat endpoint is read from PROBE_JUDGE_API_KEY.
    """
    from probe_service.audit import Audit
    from probe_service.audit.applying import normalizer
    from probe_service.judges import Sheet, answer_sheet
    from probe_service.judges.chat import ChatJudge
    from probe_service.judges.named import judge_by_name

    settings = read_settings()
    sheet = Sheet.read(pairs)
    record = Audit.read(Audit.file_beside(pairs))
    judge = judge_by_name(name, threshold=threshold, concurrency=concurrency, device=settings.device)
    if isinstance(judge, ChatJudge):
        cost = judge.cost(sheet.open_questions)
        price = ""
        if price_per_million is not None:
            price = f", {cost.input_tokens * price_per_million / 1e6:.2f} for them"
        click.echo(f"{cost.calls} calls, about {cost.input_tokens} input tokens{price}", err=True)
    line = ProgressLine()
    try:
        reused = answer_sheet(
            sheet,
            judge,
            store=_store(settings),
            normalize=normalizer(record),
            fresh=record.checks_and_repeats,
            on_answer=lambda done, total: line.say(f"{done}/{total} labelled"),
        )
    finally:
        line.close()
    click.echo(f"{len(sheet.answers)} of {len(sheet.questions)} labelled, {reused} of them before.")


@audit.command("apply")
@click.argument("corpus")
@_sheet_argument
@option("--budget", type=click.FloatRange(0, 1), help="Largest acceptable share S of the push [as drawn].")
@option("--json", "json_file", help="Write the result as JSON to this file; - is stdout.")
def apply_pairs(corpus: str, pairs: Path, budget: float | None, json_file: str | None) -> None:
    """Apply the labels of PAIRS: S(N) of CORPUS with intervals, verdicts and n_max."""
    from probe_service.audit import Audit, apply_audit, keep_labels
    from probe_service.judges import Sheet

    settings = read_settings()
    record = Audit.read(Audit.file_beside(pairs))
    sheet = Sheet.read(pairs)
    report = apply_audit(record, sheet, corpus_sha256=_hash(corpus, record.request, settings), budget=budget)
    keep_labels(record, sheet, _store(settings))
    if json_file == "-":
        click.echo(report.model_dump_json(indent=2))
        return
    if json_file is not None:
        try:
            Path(json_file).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ServiceError(
                "storage_failed", f"{json_file} cannot be written: {error.strerror}"
            ) from error
    _print(report)


def _hash(corpus: str, request: ProbeRequest, settings: Settings) -> str:
    """Read the corpus as it was read for the draw, for its content hash alone."""
    import numpy as np

    from probe_service.corpus import read_corpus

    hub = corpus.startswith("hf:")
    if not hub and not Path(corpus).is_file():
        raise click.ClickException(f"there is no file {corpus!r}; a Hugging Face data set is written hf:NAME")
    return read_corpus(
        corpus if hub else Path(corpus),
        request.corpus,
        sample_size=2,
        rng=np.random.default_rng(0),
        max_row_bytes=settings.max_row_bytes,
    ).info.sha256


def _store(settings: Settings) -> LabelStore:
    from probe_service.judges import LabelStore

    return LabelStore.of_home(settings.home)


def _print(report: AuditReport) -> None:
    labels = report.labels
    click.echo(
        f"{labels.questions} pairs judged by {', '.join(report.judges)}: {labels.yes} yes, {labels.no} no, {labels.unsure} unsure"
    )
    if labels.repeats:
        click.echo(
            f"asked twice: {labels.repeats}, answered differently: {labels.repeats_answered_differently}"
        )
    if labels.duplicates or labels.others:
        click.echo(
            f"hidden checks: {labels.duplicates_accepted} of {labels.duplicates} certain duplicates and "
            f"{labels.others_accepted} of {labels.others} certain others accepted"
        )
    click.echo("")
    click.echo(f"{'N':>6}  {'S':>6}  {'interval':^15}  {'labels worth':>12}  verdict")
    for share, verdict in zip(report.shares, report.verdicts, strict=True):
        if share.estimate is None:
            click.echo(
                f"{share.batch_size:>6}  {'–':>6}  {'':15}  {share.effective_labels:>12.0f}  {verdict.verdict}: {share.reason}"
            )
            continue
        interval = f"{share.estimate.low:.3f} – {share.estimate.high:.3f}"
        click.echo(
            f"{share.batch_size:>6}  {share.estimate.value:>6.3f}  {interval:^15}  {share.effective_labels:>12.0f}  "
            f"{verdict.verdict}: {verdict.reason}"
        )
    if report.n_max is not None:
        click.echo("")
        size = "none" if report.n_max.value is None else str(report.n_max.value)
        click.echo(f"largest safe batch: {size} ({report.n_max.reason})")
    for warning in report.warnings:
        click.echo(f"Warning: {warning.message}", file=sys.stderr)
