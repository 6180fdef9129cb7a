"""What the commands of ``probe`` share: options, from options to a request, settings, a line of progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from probe_service.errors import ServiceError

if TYPE_CHECKING:
    from probe_service.schemas import ProbeRequest, Progress
    from probe_service.settings import Settings

__all__ = [
    "EXIT_FAIL",
    "EXIT_INCONCLUSIVE",
    "EXIT_INFRASTRUCTURE",
    "EXIT_INPUT",
    "EXIT_PASS",
    "EXIT_UNEXPECTED",
    "Condition",
    "ProgressLine",
    "Sizes",
    "corpus_fields",
    "corpus_options",
    "extra",
    "option",
    "output_options",
    "pair_options",
    "read_settings",
    "reading_options",
    "request_from",
    "stopping_options",
]

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_INPUT = 2
EXIT_INCONCLUSIVE = 3
EXIT_INFRASTRUCTURE = 4
EXIT_UNEXPECTED = 5


def option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    """An option whose environment twin is PROBE_ and its long name in capitals."""
    long = next(name for name in names if name.startswith("--")).split("/")[0]
    twin = "PROBE_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=twin, show_envvar=True, **settings)


def _all(options: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class Sizes(click.ParamType[tuple[int, ...]]):
    """Batch sizes, as ``16,64,256``."""

    name = "N,N,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Return the sizes, or end with a usage error."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 16,64,256", param, ctx)


class _Directions(click.ParamType[tuple[str, ...]]):
    """What a loss compares with what, as ``query_to_doc,doc_to_query``."""

    name = "DIRECTION,…"
    choice = click.Choice(["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"])

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        """Return the directions, or end with a usage error."""
        parts = value if isinstance(value, tuple) else str(value).split(",")
        return tuple(self.choice.convert(part, param, ctx) for part in parts)


class Condition(click.ParamType[tuple[str, str]]):
    """A column and the value that it must have, as ``split=train``."""

    name = "COLUMN=VALUE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        """Return column and value, or end with a usage error."""
        if isinstance(value, tuple):
            return value
        column, equals, wanted = str(value).partition("=")
        if not equals or not column:
            self.fail(f"{value!r} is not of the form COLUMN=VALUE", param, ctx)
        return column, wanted


_COLUMNS = ("text", "anchor", "positive", "id", "group", "label", "source", "embedding")

reading_options = _all(
    [
        option("--encoder", help="Known name, sentence-transformers model, path, or openai:MODEL@URL."),
        *(option(f"--{name}-column", help=f"Column with the {name}.") for name in _COLUMNS),
        option("--negative-column", multiple=True, help="Column with hard negatives; may be repeated."),
        option("--kind", type=click.Choice(["sentences", "pairs", "tuples", "embeddings"])),
        option("--format", type=click.Choice(["txt", "jsonl", "csv", "tsv", "parquet", "npy", "npz"])),
        option("--where", type=Condition(), multiple=True, help="Keep rows whose column has this value."),
        option("--label-is-meaning", is_flag=True, help="Rows with one label mean the same."),
        option("--case-fold", is_flag=True, help="Texts that differ only in case are equal."),
        option("--max-rows", type=int, help="Encode at most this many rows, drawn at random."),
        option("--seed", type=int, help="[0]"),
    ]
)
"""What is read and encoded, and the seed."""

_SAMPLER = {
    "sampler": "kind",
    "world_size": "world_size",
    "gather": "gather",
    "sampler_policy": "policy",
    "within_source": "within_source",
}
"""Fields of `SamplerOptions` by the names of their options."""
_LOSS = ("directions", "partition_mode", "train_group_size")

_training_options = _all(
    [
        option(
            "--sampler",
            type=click.Choice(["random", "sequential", "no_duplicates", "grouped"]),
            help="How training puts rows into batches [random].",
        ),
        option("--world-size", type=int, help="Devices that take a step together [1]."),
        option(
            "--gather/--no-gather",
            default=None,
            help="Whether the loss compares the rows of all devices: batch sizes are then those of all [no].",
        ),
        option(
            "--sampler-policy",
            type=click.Choice(["round_robin", "proportional"]),
            help="Which source comes next, for grouped [proportional].",
        ),
        option(
            "--within-source",
            type=click.Choice(["random", "no_duplicates"]),
            help="How grouped fills the batches of one source [random].",
        ),
        option("--directions", type=_Directions(), help="What the loss compares [query_to_doc]."),
        option(
            "--partition-mode",
            type=click.Choice(["joint", "per_direction"]),
            help="One softmax over all directions, or one for each [joint].",
        ),
        option(
            "--train-group-size",
            type=int,
            help="Positive and hard negatives of a row together [one more than every row has].",
        ),
        option("--dropout-views", is_flag=True, help="For sentences: take s⁺ from two passes with dropout."),
        option(
            "--training-dtype",
            type=click.Choice(["float32", "bfloat16", "float16"]),
            help="In which the loss is computed [float32].",
        ),
    ]
)
"""How the training run that is probed for draws batches and computes its loss."""

corpus_options = _all(
    [
        reading_options,
        option("--num-repeats", type=int, help="Batches for each size, at least [100]."),
        option("--top-k", type=int, help="Ranks of the similarity curve [4]."),
        option("--temperature", type=float, help="T [0.05]."),
        _training_options,
        option(
            "--method",
            type=click.Choice(["auto", "sampled"]),
            help="Exact where it can be, or batches alone.",
        ),
        option("--budget", type=float, help="Largest acceptable share S of the push [0.25]."),
        option(
            "--worst-case-similarity", type=float, help="s₀ of the worst case [measured for the encoder]."
        ),
    ]
)
"""What is read, encoded and measured: the fields of `ProbeRequest` that every command has."""

stopping_options = _all(
    [
        option(
            "--target-width",
            type=float,
            help="Encode rows only until the intervals of the curve and of S are this narrow.",
        ),
        option("--max-seconds", type=float, help="Encode only as many rows as leave time to measure them."),
    ]
)
"""When enough rows are encoded."""

pair_options = _all(
    [
        option(
            "--pairs-above",
            type=float,
            help="List every pair at least this similar, up to 1,000,000 [the 1,000 most similar].",
        ),
        option(
            "--pairs",
            "pairs_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write the listed pairs as JSON lines to this file.",
        ),
    ]
)
"""Which pairs are listed, and where the list goes."""

output_options = _all(
    [
        option("--url", help="Use the service at this address instead of this process."),
        option("--json", "json_file", help="Write the report as JSON to this file; - is stdout."),
        option(
            "--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write report.html."
        ),
        option(
            "--chart",
            "chart_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write the charts to this .svg or .png file.",
        ),
    ]
)
"""Where the report goes, and which process makes it."""


def request_from(batch_sizes: tuple[int, ...] | None, options: dict[str, Any]) -> ProbeRequest:
    """Return the request that the values of `corpus_options` ask for; takes them out of `options`.

    Raises:
        RequestError: A value is out of range.
    """
    from pydantic import ValidationError

    from probe_service.problems import translate_validation_error
    from probe_service.schemas import ProbeRequest

    corpus = corpus_fields(options)
    given = {name: value for name, value in options.items() if value is not None}
    given["sampler"] = {field: given.pop(name) for name, field in _SAMPLER.items() if name in given}
    given["loss"] = {name: given.pop(name) for name in _LOSS if name in given}
    try:
        return ProbeRequest.model_validate(given | {"batch_sizes": batch_sizes, "corpus": corpus})
    except ValidationError as error:
        raise translate_validation_error(error) from error


def corpus_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `CorpusOptions` that the values of `reading_options` give; takes them out of `options`."""
    columns = {name: options.pop(f"{name}_column") for name in _COLUMNS}
    columns["negatives"] = options.pop("negative_column")
    corpus = {
        name: options.pop(name) for name in ("kind", "format", "label_is_meaning", "case_fold", "max_rows")
    }
    return corpus | {"columns": columns, "where": dict(options.pop("where"))}


def read_settings(**given: Any) -> Settings:
    """Return the environment's settings, with those that were given on the command line."""
    from pydantic import ValidationError

    from probe_service.problems import translate_validation_error
    from probe_service.settings import Settings

    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise translate_validation_error(error) from error


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Say which extra to install where a package of it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ServiceError(
            "extra_not_installed", f"{error.name} is not installed; pip install 'probe-service[{name}]'"
        ) from error


class ProgressLine:
    """One line on stderr that is rewritten; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, progress: Progress | None) -> None:
        """Say how far a probe is."""
        if progress is None:
            return
        left = f", {progress.eta_seconds:.0f} s left" if progress.eta_seconds is not None else ""
        early = ""
        if progress.curve_rows is not None:
            last = progress.curve[-1]
            share = last.false_negative_softmax_share
            if share is not None:
                limits = "" if share.low is None else f" [{share.low:.3f}, {share.high:.3f}]"
                early = f"; after {progress.curve_rows} rows S({last.batch_size}) = {share.value:.3f}{limits}"
        self.say(
            f"{progress.fraction:4.0%} {progress.phase} {progress.done}/{progress.total} {progress.unit}{left}{early}"
        )

    def say(self, line: str) -> None:
        """Show one line in place of the one before."""
        if sys.stderr.isatty():
            click.echo(f"\r\033[K{line}", nl=False, err=True)
            self._shown = True

    def close(self) -> None:
        """Leave no half line behind."""
        if self._shown:
            click.echo("\r\033[K", nl=False, err=True)
