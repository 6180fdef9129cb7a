"""``probe compare``: before and after, encoder against encoder, corpus against corpus."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe_service.cli_options import (
    EXIT_FAIL,
    EXIT_INCONCLUSIVE,
    EXIT_PASS,
    ProgressLine,
    Sizes,
    corpus_options,
    extra,
    option,
    read_settings,
    request_from,
)
from probe_service.errors import ServiceError

if TYPE_CHECKING:
    from probe_service.schemas import ComparedSide, ComparisonReport, Estimate, FigureComparison

__all__ = ["compare"]


@click.command()
@click.argument("a")
@click.argument("b")
@option("--batch-sizes", type=Sizes(), help="Sizes to compare [powers of two that fit both].")
@option("--encoder-b", help="Encoder of B [that of A].")
@option("--temperature-b", type=float, help="T of B [that of A].")
@corpus_options
@option("--json", "json_file", help="Write the comparison as JSON to this file; - is stdout.")
@option(
    "--max-increase",
    type=click.FloatRange(-1, 1),
    help="Exit 1 if S of B is certainly larger than S of A by more than this at a size.",
)
@option("--fail-on-inconclusive", is_flag=True, help="Exit 3 where --max-increase is not decided.")
def compare(
    a: str,
    b: str,
    batch_sizes: tuple[int, ...] | None,
    encoder_b: str | None,
    temperature_b: float | None,
    json_file: str | None,
    max_increase: float | None,
    fail_on_inconclusive: bool,
    **options: Any,
) -> int:
    """Compare corpora A and B (files, or hf:NAME[:config[:split]][@revision]), or one corpus under two encoders.

    Rows that both have are put into the same batches, so that the difference is known far better than either side.
    """
    from probe_service.schemas import VerdictKind

    request = request_from(batch_sizes, options)
    source_a, source_b = _source(a), _source(b)
    settings = read_settings()
    with extra("cpu"):
        from probe_service.compare import compare as compare_sides
        from probe_service.compare import judge_increase
    line = ProgressLine()
    try:
        with tempfile.TemporaryDirectory(prefix="probe-") as folder:
            report = compare_sides(
                request,
                source_a,
                source_b,
                Path(folder),
                encoder_b=encoder_b,
                temperature_b=temperature_b,
                settings=settings,
                say=line.say,
            )
    finally:
        line.close()
    if json_file == "-":
        click.echo(report.model_dump_json(indent=2))
    else:
        if json_file is not None:
            _write(Path(json_file), report)
        _print(report)
    if max_increase is None:
        return EXIT_PASS
    verdict = judge_increase(report, max_increase)
    if json_file != "-":
        click.echo("")
        click.echo(_GATE[verdict.value].format(limit=f"{max_increase:g}"))
    if verdict is VerdictKind.FAIL:
        return EXIT_FAIL
    return EXIT_INCONCLUSIVE if verdict is VerdictKind.INCONCLUSIVE and fail_on_inconclusive else EXIT_PASS


_GATE = {
    "pass": "pass: at every size S of B is at most {limit} above S of A.",
    "fail": "fail: at some size S of B is more than {limit} above S of A.",
    "inconclusive": "inconclusive: the intervals do not say whether S of B is more than {limit} above S of A.",
}


def _source(corpus: str) -> Path | str:
    if corpus.startswith("hf:"):
        return corpus
    if not Path(corpus).is_file():
        raise click.ClickException(f"there is no file {corpus!r}; a Hugging Face data set is written hf:NAME")
    return Path(corpus)


def _write(file: Path, report: ComparisonReport) -> None:
    try:
        file.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ServiceError("storage_failed", f"{file} cannot be written: {error.strerror}") from error


# ----------------------------------------------------------------------------------------------------------- the tables


def _print(report: ComparisonReport) -> None:
    import textwrap

    for label, side in (("A", report.a), ("B", report.b)):
        click.echo(textwrap.fill(f"{label}  {_describe(side)}", 80, subsequent_indent="   "))
    click.echo(textwrap.fill(report.rows.explanation, 80))
    click.echo("")
    click.echo(f"{'N':>7}  {'S of A':>7}  {'S of B':>7}  {'B - A':>7}  {'interval':^18}  B is")
    for size in report.sizes:
        cells = _cells(size.figures["false_negative_softmax_share"])
        click.echo(f"{size.batch_size:>7}  {cells}  {size.verdict}")
    last = report.sizes[-1]
    click.echo("")
    click.echo(
        f"{f'at N = {last.batch_size}':29}  {'A':>7}  {'B':>7}  {'B - A':>7}  {'interval':^18}".rstrip()
    )
    for name, figure in last.figures.items():
        click.echo(f"{name:29}  {_cells(figure)}".rstrip())
    click.echo("")
    click.echo(textwrap.fill(report.headline, 80))
    for warning in report.warnings:
        click.echo(textwrap.fill(f"Warning: {warning.message}", 80), err=True)


def _describe(side: ComparedSide) -> str:
    limit = side.n_max
    if limit is None:
        largest = "not known"
    elif limit.value is None:
        largest = "none"
    else:
        largest = f"{limit.value}" if limit.exceeded else f"at least {limit.value}"
    rows = f"{side.corpus.rows_usable:,} rows"
    if side.corpus.rows_encoded < side.corpus.rows_usable:
        rows += f" ({side.corpus.rows_encoded:,} encoded)"
    return f"{side.corpus.name}, {rows}, {side.encoder.name}, T = {side.request.temperature:g}, largest safe batch {largest}"


def _cells(figure: FigureComparison) -> str:
    return (
        f"{_number(figure.a.value):>7}  {_number(figure.b.value):>7}  {_number(figure.difference.value, '+'):>7}  "
        f"{_interval(figure.difference):^18}"
    )


def _interval(difference: Estimate) -> str:
    if difference.low is None or difference.high is None:
        return "none"
    if difference.low == difference.high:
        return "exact"
    return f"[{_number(difference.low, '+')}, {_number(difference.high, '+')}]"


def _number(value: float, sign: str = "") -> str:
    """Three decimals without a leading zero; fewer where the number is large."""
    if abs(value) < 0.0005:
        return ".000"
    written = format(value, f"{sign}.{3 if abs(value) < 10 else 1}f")
    return written.replace("0.", ".", 1) if abs(value) < 1 else written
