"""``probe trial``: train with several losses at several batch sizes and see what each brings on held-out rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe_service.cli_options import (
    EXIT_PASS,
    Condition,
    ProgressLine,
    Sizes,
    corpus_fields,
    extra,
    option,
    read_settings,
    reading_options,
)
from probe_service.errors import ServiceError

if TYPE_CHECKING:
    from probe_service.schemas import Estimate, TrialReport, TrialRequest

__all__ = ["trial"]


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers, as ``0.001,0.01``."""

    name = "X,X,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.001,0.01", param, ctx)


class _Losses(click.ParamType[tuple[dict[str, Any], ...]]):
    """Losses, as ``infonce,gs_infonce:8``; the number is M / N."""

    name = "LOSS,LOSS,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[dict[str, Any], ...]:
        if isinstance(value, tuple):
            return value
        losses = []
        for part in str(value).split(","):
            kind, colon, noise = part.partition(":")
            try:
                losses.append({"kind": kind} | ({"noise_per_anchor": float(noise)} if colon else {}))
            except ValueError:
                self.fail(
                    f"{part!r} is not of the form LOSS or LOSS:NUMBER, such as gs_infonce:8", param, ctx
                )
        return tuple(losses)


@click.command()
@click.argument("corpus", required=False)
@option("--mode", type=click.Choice(["head", "full", "images"]), default="head", show_default=True)
@option(
    "--losses",
    type=_Losses(),
    help="Of infonce, gs_infonce, gs_infonce_control, flatnce, oracle_masking; LOSS:X sets the noise per anchor [all].",
)
@option("--batch-sizes", type=Sizes(), help="Sizes to try [those of the mode].")
@option("--temperatures", type=_Numbers(), help="Temperatures to try [that of the mode].")
@option("--num-seeds", type=int, help="Runs of each [5].")
@option("--steps", type=int, help="Optimisation steps of every cell [200].")
@option("--examples", type=int, help="Instead: anchors that every cell sees.")
@option("--learning-rates", type=_Numbers(), help="Each loss takes its best [three of the mode].")
@option(
    "--held-out-where", type=Condition(), multiple=True, help="Evaluate on rows whose column has this value."
)
@option("--held-out-share", type=float, help="Share of the rows to hold out otherwise [0.2].")
@option("--head", type=click.Choice(["linear", "mlp"]), help="[linear]")
@option("--head-width", type=int, help="Numbers that the head gives [128].")
@option("--max-length", type=int, help="Tokens of a text in training, of mode full [32 for sentences].")
@option(
    "--sts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the seven STS tasks, which judge a whole encoder.",
)
@option("--recall-at", type=int, help="k of recall@k [10].")
@reading_options
@option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep each finished cell in this folder: killed, the same command goes on there.",
)
@option("--json", "json_file", help="Write the report as JSON to this file; - is stdout.")
def trial(
    corpus: str | None, out: Path | None, json_file: str | None, sts: Path | None, **options: Any
) -> int:
    """Train on CORPUS with every loss at every batch size, and evaluate on held-out rows.

    What `oracle_masking` gains over `infonce` is what the known false negatives cost; the share S that the probe predicts
    stands beside it. CORPUS is a file, or hf:NAME[:config[:split]][@revision]; images need none.
    """
    request = _request(options)
    hub = corpus is not None and corpus.startswith("hf:")
    if corpus is not None and not hub and not Path(corpus).is_file():
        raise click.ClickException(f"there is no file {corpus!r}; a Hugging Face data set is written hf:NAME")
    with extra("cpu"):
        from probe_service.trial import TrialFolder
        from probe_service.trial.running import run_trial
    line = ProgressLine()
    seeds_shown = 0

    def show(report: TrialReport) -> None:
        """Print the table whenever one more seed is through with all cells."""
        nonlocal seeds_shown
        seeds = min(figure.num_seeds for figure in report.table)
        whole = len(report.table) * request.num_seeds == report.num_cells
        if not report.complete and whole and seeds > seeds_shown:
            seeds_shown = seeds
            line.close()
            click.echo(f"After {seeds} of {request.num_seeds} seeds:\n{_table(report)}\n", err=True)

    with tempfile.TemporaryDirectory(prefix="probe-trial-") as folder:
        try:
            report = run_trial(
                request,
                corpus if hub or corpus is None else Path(corpus),
                TrialFolder(out or Path(folder)),
                settings=read_settings(sts=sts),
                name=corpus or "digits" if hub or corpus is None else Path(corpus).name,
                on_progress=line.show,
                on_report=show,
            )
        finally:
            line.close()
    if json_file == "-":
        click.echo(report.model_dump_json(indent=2))
        return EXIT_PASS
    if json_file is not None:
        try:
            Path(json_file).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ServiceError(
                "storage_failed", f"{json_file} cannot be written: {error.strerror}"
            ) from error
    _print(report)
    return EXIT_PASS


def _request(options: dict[str, Any]) -> TrialRequest:
    from pydantic import ValidationError

    from probe_service.problems import translate_validation_error
    from probe_service.schemas import TrialRequest

    options["held_out_where"] = dict(options["held_out_where"])
    fields = {"corpus": corpus_fields(options)}
    try:
        return TrialRequest.model_validate(
            fields | {name: value for name, value in options.items() if value is not None}
        )
    except ValidationError as error:
        raise translate_validation_error(error) from error


# ---------------------------------------------------------------------------------------------------------- the tables


def _print(report: TrialReport) -> None:
    import textwrap

    scores = ", ".join(f"{name} {_number(value)}" for name, value in report.before.items())
    held = report.held_out
    click.echo(f"{report.training_rows:,} rows to train on; {held.rows:,} held out ({held.description})")
    click.echo(f"without training: {scores}\n")
    click.echo(_table(report))
    if report.masking:
        click.echo(f"\n{'N':>6}  {'T':>5}  {'predicted S':>11}  {'gain of masking':>15}  interval")
        for each in report.masking:
            share = "–" if each.predicted_share is None else _number(each.predicted_share.value)
            click.echo(
                f"{each.batch_size:>6}  {each.temperature:>5g}  {share:>11}  {_number(each.gain.value, '+'):>15}  "
                f"{_interval(each.gain)}"
            )
        if report.rank_correlation is not None:
            click.echo(f"rank correlation of S with the gain: {report.rank_correlation:.2f}")
    click.echo("")
    for sentence in report.protocol:
        click.echo(textwrap.fill(sentence, 100))
    for warning in report.warnings:
        click.echo(textwrap.fill(f"Warning: {warning.message}", 100), err=True)


def _table(report: TrialReport) -> str:
    """The metric by batch size, a column for each loss, a block for each temperature."""
    losses = list(dict.fromkeys(figure.loss for figure in report.table))
    widths = [max(len(loss), 12) for loss in losses]
    head = "  ".join(f"{loss:>{width}}" for loss, width in zip(losses, widths, strict=True))
    found = {
        (each.temperature, each.batch_size, each.loss): each.scores[report.metric] for each in report.table
    }
    lines = []
    for temperature in sorted({each.temperature for each in report.table}):
        lines += [f"{report.metric} at T = {temperature:g}, mean ± half of the interval", f"{'N':>6}  {head}"]
        for size in sorted({each.batch_size for each in report.table}):
            cells = [
                f"{_cell(found.get((temperature, size, loss))):>{width}}"
                for loss, width in zip(losses, widths, strict=True)
            ]
            lines.append(f"{size:>6}  {'  '.join(cells)}")
    return "\n".join(lines)


def _cell(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return _number(estimate.value)
    return f"{_number(estimate.value)} ± {_number((estimate.high - estimate.low) / 2)}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "none"
    return f"[{_number(estimate.low, '+')}, {_number(estimate.high, '+')}]"


def _number(value: float, sign: str = "") -> str:
    """Three decimals, without a leading zero."""
    return (
        format(value, f"{sign}.3f").replace("0.", ".", 1) if abs(value) < 1 else format(value, f"{sign}.3f")
    )
