"""Records of a Hugging Face data set, from the hub or from the local cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe_service.corpus.arrow import table_columns
from probe_service.corpus.faults import Faults
from probe_service.corpus.records import RecordBatch, Records
from probe_service.errors import CorpusError

__all__ = ["HF_PREFIX", "HubCorpus", "HubName", "hub_records", "parse_hub_name"]

HF_PREFIX = "hf:"

_BATCH_RECORDS = 1024
_HEAD_RECORDS = 200
_HUB_NAME = re.compile(
    r"hf:(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?::(?P<config>[\w.-]*)(?::(?P<split>[\w.-]*))?)?(?:@(?P<revision>\w[\w.-]*(?:/\w[\w.-]*)*))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class HubName:
    """A data set as the user writes it: ``hf:NAME[:config[:split]][@revision]``."""

    name: str
    config: str | None
    split: str | None
    revision: str | None


@dataclass(frozen=True)
class HubCorpus:
    """The records, the full name that was resolved, with its commit, and a call that reports all rows as done."""

    records: Records
    name: str
    report_end: Callable[[], None]


def parse_hub_name(source: str) -> HubName:
    """Take ``hf:NAME[:config[:split]][@revision]`` apart; an empty config or split is left to be resolved.

    Raises:
        CorpusError: ``hf_name_invalid``.
    """
    match = _HUB_NAME.fullmatch(source)
    if match is None:
        raise CorpusError(
            "hf_name_invalid", f"{source[:200]!r} is not of the form hf:NAME[:config[:split]][@revision]."
        )
    return HubName(match["name"], match["config"] or None, match["split"] or None, match["revision"])


def hub_records(
    source: str, faults: Faults, max_row_bytes: int, on_progress: Callable[[int, int], None] | None
) -> HubCorpus:
    """Open a data set; `datasets` is imported here.

    Offline, `datasets` takes the newest revision in its cache whatever was asked for, and says so only in its log:
    the revision that was loaded is compared with the one asked for.

    Args:
        source: ``hf:NAME[:config[:split]][@revision]``.
        faults: Takes what is wrong.
        max_row_bytes: Longest text.
        on_progress: Called with (rows done, all rows).

    Raises:
        CorpusError: ``hf_name_invalid``, ``hf_dataset_unavailable``, ``hf_split_unknown``, ``hf_revision_mismatch``.
    """
    from datasets.packaged_modules.cache.cache import Cache

    asked = parse_hub_name(source)
    builder = _builder(asked)
    found = str(builder.hash)
    _compare_revisions(asked, found, from_cache=isinstance(builder, Cache))
    table, split = _split(asked, builder)
    rows = table.num_rows

    def report(done: int) -> None:
        if on_progress is not None:
            on_progress(done, rows)

    def batches(names: Sequence[str]) -> Iterator[RecordBatch]:
        for start in range(0, rows, _BATCH_RECORDS):
            part = table.with_format("arrow")[start : start + _BATCH_RECORDS]
            numbers = range(start + 1, start + 1 + part.num_rows)
            yield RecordBatch(numbers, table_columns(part, names, numbers, faults, max_row_bytes))
            report(start + part.num_rows)

    head = table.with_format("arrow")[:_HEAD_RECORDS].to_pydict()
    name = f"{HF_PREFIX}{asked.name}:{builder.config.name}:{split}@{found}"
    return HubCorpus(Records(tuple(table.column_names), head, batches), name, lambda: report(rows))


def _builder(asked: HubName) -> Any:
    import datasets
    import httpx
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if asked.name in _PACKAGED_DATASETS_MODULES:
        # `load_dataset("json")` is a reader that takes files of the current folder, not a data set.
        raise CorpusError(
            "hf_dataset_unavailable", f"{asked.name!r} is a file reader of datasets, not a data set."
        )
    try:
        # The prefix keeps a local folder of the same name out of it.
        return datasets.load_dataset_builder(
            f"hf://datasets/{asked.name}", asked.config, revision=asked.revision
        )
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise _unavailable(asked, error) from error


def _split(asked: HubName, builder: Any) -> tuple[Any, str]:
    import datasets
    import httpx

    try:
        builder.download_and_prepare()
        splits = list(builder.info.splits or ())
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise _unavailable(asked, error) from error
    split = asked.split or (splits[0] if len(splits) == 1 else None)
    if split is None or split not in splits:
        raise CorpusError(
            "hf_split_unknown",
            f"{asked.name} has the splits {', '.join(splits)}; name one: hf:{asked.name}:{builder.config.name}:SPLIT.",
        )
    return builder.as_dataset(split=split), split


def _compare_revisions(asked: HubName, found: str, *, from_cache: bool) -> None:
    """Refuse another revision than the one asked for.

    The hub resolves branches and tags itself; from the cache they count as found only where the hub's own cache says
    which commit they were last.
    """
    if asked.revision is None:
        return
    if _COMMIT.fullmatch(asked.revision):
        matches = found.startswith(asked.revision)
    else:
        matches = not from_cache or found == _commit_last_seen(asked)
    if matches:
        return
    raise CorpusError(
        "hf_revision_mismatch",
        f"{asked.name} is cached at revision {found}, not at {asked.revision}; fetch that revision while online, or"
        f" ask for the cached one: @{found}.",
    )


def _commit_last_seen(asked: HubName) -> str | None:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{asked.name.replace('/', '--')}" / "refs"
    try:
        return (folder / str(asked.revision)).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _unavailable(asked: HubName, error: Exception) -> CorpusError:
    reason = " ".join(str(error).split())[:300]
    return CorpusError(
        "hf_dataset_unavailable",
        f"The data set {asked.name} cannot be loaded, neither from the hub nor from the cache ({reason}).",
    )
