"""The command line: ``probe run``, ``check``, ``compare``, ``audit``, ``trial``, ``serve``, ``worker``, ``encoders``.

Exit status: 0 done, or the gate passed; 1 the gate failed; 2 usage or bad input; 3 inconclusive where the policy says so;
4 and up the infrastructure (4: encoder, service or storage cannot be used; 5: an unexpected fault), so that an outage never
looks like bad rows. Progress goes to stderr, and only when it is a terminal; what was asked for goes to stdout.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe_service.audit_cli import audit
from probe_service.cli_options import (
    EXIT_FAIL,
    EXIT_INCONCLUSIVE,
    EXIT_INFRASTRUCTURE,
    EXIT_INPUT,
    EXIT_PASS,
    EXIT_UNEXPECTED,
    ProgressLine,
    Sizes,
    corpus_options,
    extra,
    option,
    output_options,
    pair_options,
    read_settings,
    request_from,
    stopping_options,
)
from probe_service.compare_cli import compare
from probe_service.errors import InputError, ProbeError, ServiceError
from probe_service.trial_cli import trial

if TYPE_CHECKING:
    from probe_service.schemas import ProbeReport, ProbeRequest, Verdict

__all__ = ["main"]

EXIT_INTERRUPTED = 130

_USAGE_CODES = {"encoder_unknown", "encoder_not_allowed"}


def main() -> None:
    """Run the command line and exit with the status that the module's docstring names."""
    status = _run(sys.argv[1:])
    # Python would look for cycles among all that torch and numba have made, half a second of it, before it ends.
    gc.freeze()
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    try:
        outcome = cli.main(arguments, standalone_mode=False)
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return EXIT_INPUT
    except ProbeError as error:
        _say_error(error)
        usage = isinstance(error, InputError) or error.code in _USAGE_CODES
        return EXIT_INPUT if usage else EXIT_INFRASTRUCTURE
    except BrokenPipeError:
        # The reader of stdout went away: nothing is left to say to it, nor at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INFRASTRUCTURE
    except Exception as error:
        if os.environ.get("PROBE_DEBUG"):
            raise
        click.echo(f"probe: unexpected {type(error).__name__}: {error} (PROBE_DEBUG=1 shows where)", err=True)
        return EXIT_UNEXPECTED
    return outcome if isinstance(outcome, int) else EXIT_PASS


def _say_error(error: ProbeError) -> None:
    where = [
        f"{name} {value}"
        for name, value in (("row", error.row), ("column", error.column))
        if value is not None
    ]
    if error.count is not None and error.count > 1:
        where.append(f"{error.count} rows in all")
    suffix = f" ({', '.join(where)})" if where else ""
    click.echo(f"probe: {error.message}{suffix} [{error.code}]", err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="probe-service")
def cli() -> None:
    """How big may a contrastive batch be on a corpus before false negatives spoil training?"""


@cli.command()
@click.argument("corpus")
@option("--batch-sizes", type=Sizes(), help="Sizes to measure [powers of two that fit].")
@corpus_options
@pair_options
@stopping_options
@output_options
def run(
    corpus: str,
    batch_sizes: tuple[int, ...] | None,
    url: str | None,
    json_file: str | None,
    html_file: Path | None,
    chart_file: Path | None,
    pairs_file: Path | None,
    **options: Any,
) -> int:
    """Measure CORPUS (a file, or hf:NAME[:config[:split]][@revision]) and report its batch-size curve."""
    _check_chart(chart_file)
    report = _measure(corpus, request_from(batch_sizes, options), url, pairs_file)
    _write(report, json_file, html_file, chart_file)
    if json_file != "-":
        _print_summary(report)
    return EXIT_PASS


@cli.command()
@click.argument("corpus")
@option("--batch-size", type=int, required=True, help="The size that training uses.")
@option(
    "--on-inconclusive",
    type=click.Choice(["pass", "fail", "exit3"]),
    default="exit3",
    show_default=True,
    help="What to do if the evidence does not decide.",
)
@corpus_options
@pair_options
@stopping_options
@output_options
def check(
    corpus: str,
    batch_size: int,
    on_inconclusive: str,
    url: str | None,
    json_file: str | None,
    html_file: Path | None,
    chart_file: Path | None,
    pairs_file: Path | None,
    **options: Any,
) -> int:
    """Judge CORPUS at one batch size: exit 0 pass, 1 fail, 3 inconclusive, 2 bad input, 4 and up infrastructure."""
    from probe_service.schemas import VerdictKind

    _check_chart(chart_file)
    report = _measure(corpus, request_from((batch_size,), options), url, pairs_file)
    _write(report, json_file, html_file, chart_file)
    verdict = report.advice.verdicts[0]
    if json_file != "-":
        _print_verdict(verdict, report)
    if verdict.verdict is VerdictKind.INCONCLUSIVE:
        return {"pass": EXIT_PASS, "fail": EXIT_FAIL, "exit3": EXIT_INCONCLUSIVE}[on_inconclusive]
    return EXIT_PASS if verdict.verdict is VerdictKind.PASS else EXIT_FAIL


_home_option = option(
    "--home", type=click.Path(file_okay=False, path_type=Path), help="Folder of corpora, vectors and jobs."
)


@cli.command()
@option("--host", help="Address to listen on [127.0.0.1].")
@option("--port", type=int, help="Port to listen on [8000]; 0 takes a free one.")
@_home_option
@click.option(
    "--worker/--no-worker", default=True, help="Run a supervised worker beside the API.", show_default=True
)
def serve(host: str | None, port: int | None, home: Path | None, *, worker: bool) -> int:
    """Serve the API and the dashboard, with one supervised worker."""
    settings = read_settings(host=host, port=port, home=home)
    _set_up_logs()
    with extra("service"):
        from probe_service.api.server import run_server
    run_server(settings, with_worker=worker)
    return EXIT_PASS


@cli.command()
@_home_option
def worker(home: Path | None) -> int:
    """Run a worker alone: for an API started with --no-worker, here or on another machine with the same home."""
    settings = read_settings(home=home)
    _set_up_logs()
    with extra("cpu"):
        from probe_service.jobs.worker import run_worker
    run_worker(settings)
    return EXIT_PASS


@cli.group(invoke_without_command=True)
@click.pass_context
def encoders(context: click.Context) -> int:
    """List the known encoders."""
    from probe_service.known_encoders import KNOWN_ENCODERS

    if context.invoked_subcommand is None:
        for known in KNOWN_ENCODERS.values():
            revision = known.revision[:12] if known.revision else "not pinned"
            click.echo(
                f"{known.name:28} {known.hub_name:48} {known.pooling:15} {known.max_length:4} tokens  revision {revision}"
            )
    return EXIT_PASS


@encoders.command()
@click.argument("name")
def canary(name: str) -> int:
    """Record canary cosines of encoder NAME from transformers' AutoModel, on a machine that has its weights."""
    import json

    with extra("cpu"):
        from probe_service.encode import record_canaries
    found = record_canaries(name, read_settings())
    click.echo(json.dumps([pair.to_dict() for pair in found], indent=2, ensure_ascii=False))
    return EXIT_PASS


cli.add_command(audit)
cli.add_command(compare)
cli.add_command(trial)


# ------------------------------------------------------------------------------------------------------------- inside


def _measure(corpus: str, request: ProbeRequest, url: str | None, pairs_file: Path | None) -> ProbeReport:
    if not corpus.startswith("hf:") and not Path(corpus).is_file():
        raise click.ClickException(f"there is no file {corpus!r}; a Hugging Face data set is written hf:NAME")
    progress = ProgressLine()
    try:
        return (
            _measure_there(corpus, request, url, pairs_file, progress)
            if url
            else _measure_here(corpus, request, pairs_file, progress)
        )
    finally:
        progress.close()


def _measure_here(
    corpus: str, request: ProbeRequest, pairs_file: Path | None, progress: ProgressLine
) -> ProbeReport:
    import tempfile

    settings = read_settings()
    with extra("cpu"):
        from probe_service.probe import run_probe
    hub = corpus.startswith("hf:")
    with tempfile.TemporaryDirectory(prefix="probe-") as folder:
        report = run_probe(
            request,
            corpus if hub else Path(corpus),
            Path(folder),
            settings=settings,
            job_id=uuid.uuid4().hex,
            name=corpus if hub else Path(corpus).name,
            on_progress=progress.show,
        )
        if pairs_file is not None:
            with _writing(pairs_file):
                shutil.copyfile(Path(folder) / "pairs.jsonl", pairs_file)
        return report


def _measure_there(
    corpus: str, request: ProbeRequest, url: str, pairs_file: Path | None, progress: ProgressLine
) -> ProbeReport:
    from probe_client import ApiError, JobFailed, ProbeClient, ProbeClientError
    from probe_service.problems import HTTP_STATUS

    try:
        with ProbeClient(url) as client:
            if corpus.startswith("hf:"):
                job = client.submit(hf=corpus, request=request)
            else:
                job = client.submit(path=Path(corpus), request=request)
            client.wait(job.id, on_progress=lambda seen: progress.show(seen.progress))
            if pairs_file is not None:
                with _writing(pairs_file):
                    client.save_pairs(job.id, pairs_file)
            return client.report(job.id)
    except (ApiError, JobFailed) as error:
        problem = error.problem
        # The service refuses bad input with 4xx; a key, a limit or a missing job is not the corpus's fault.
        at_fault = problem.status in (400, 413, 415, 422) and problem.code not in HTTP_STATUS
        branch = InputError if at_fault or problem.status in (413, 415) else ServiceError
        raise branch(
            problem.code, problem.detail, row=problem.row, column=problem.column, count=problem.count
        ) from error
    except ProbeClientError as error:
        raise ServiceError("service_unreachable", str(error)) from error


def _set_up_logs() -> None:
    from probe_service.logs import configure_logging

    configure_logging()


def _check_chart(file: Path | None) -> None:
    if file is not None and file.suffix.lower() not in (".svg", ".png"):
        raise click.UsageError(f"--chart writes .svg or .png, not {file.name!r}")


def _write(
    report: ProbeReport, json_file: str | None, html_file: Path | None, chart_file: Path | None
) -> None:
    if json_file == "-":
        click.echo(report.model_dump_json(indent=2))
    elif json_file is not None:
        _write_file(Path(json_file), report.model_dump_json(indent=2) + "\n")
    if html_file is not None:
        with extra("service"):
            from probe_service.report_html import render_report_html
        _write_file(html_file, render_report_html(report))
    if chart_file is not None:
        with extra("service"):
            from probe_service.charts import Theme, figure, render_png, render_svg
        spec = figure(report, theme=Theme.LIGHT)
        _write_file(chart_file, render_png(spec) if chart_file.suffix.lower() == ".png" else render_svg(spec))


def _write_file(file: Path, content: str | bytes) -> None:
    with _writing(file):
        if isinstance(content, str):
            file.write_text(content, encoding="utf-8")
        else:
            file.write_bytes(content)


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ServiceError("storage_failed", f"{file} cannot be written: {error.strerror}") from error


def _print_summary(report: ProbeReport) -> None:
    from probe_service.text_chart import text_chart

    plain = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    click.echo(
        text_chart(
            report,
            width=min(shutil.get_terminal_size().columns, 100),
            use_colour=sys.stdout.isatty(),
            ascii_only=plain,
        )
    )
    for sentence in report.advice.explanation:
        click.echo(sentence)
    click.echo(report.pair_search.description)
    if report.sampling.stopped is not None:
        click.echo(report.sampling.stopped.description)
    for warning in report.warnings:
        click.echo(f"Warning: {warning.message}")


def _print_verdict(verdict: Verdict, report: ProbeReport) -> None:
    click.echo(f"{verdict.verdict}: at a batch size of {verdict.batch_size}, {verdict.reason}.")
    if verdict.assumption:
        click.echo(f"This rests on: {verdict.assumption}.")
    if report.sampling.stopped is not None:
        click.echo(report.sampling.stopped.description)
    if report.advice.drop_duplicates:
        rows = report.advice.drop_duplicates.rows_to_drop
        click.echo(f"{len(rows)} rows repeat an earlier one; dropping them helps. First: {rows[:10]}")


if __name__ == "__main__":
    main()
