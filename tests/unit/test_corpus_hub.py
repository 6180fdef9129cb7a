"""Hugging Face data sets from a local cache, with the hub switched off."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe_service.corpus import read_corpus
from probe_service.corpus.hub import HubName, parse_hub_name
from probe_service.errors import CorpusError
from probe_service.schemas import CorpusKind
from tests.unit.corpus_files import options, read, refused

datasets = pytest.importorskip("datasets")

OLD, NEW = "0" * 39 + "1", "a1" * 20
ROWS = {"text": ["one", "two", " ", "four"], "group": ["x", "x", None, None]}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that `datasets` and the hub client use."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    logging.getLogger("datasets").setLevel(logging.ERROR)
    return tmp_path


def plant(
    cache: Path, name: str, commit: str, splits: dict[str, dict[str, list[Any]]], config: str = "default"
) -> None:
    """Write what `load_dataset` leaves in its cache after it fetched a data set from the hub."""
    from datasets.arrow_writer import ArrowWriter

    namespace, short = name.split("/")
    folder = cache / "datasets" / f"{namespace}___{short}" / config / "0.0.0" / commit
    folder.mkdir(parents=True)
    infos = {}
    for split, columns in splits.items():
        table = datasets.Dataset.from_dict(columns)
        with ArrowWriter(path=str(folder / f"{short}-{split}.arrow"), features=table.features) as writer:
            writer.write_table(table.data.table)
            rows, size = writer.finalize()
        infos[split] = datasets.SplitInfo(split, size, rows, dataset_name=short)
    datasets.DatasetInfo(
        features=table.features,
        builder_name="parquet",
        dataset_name=short,
        config_name=config,
        version="0.0.0",
        splits=datasets.SplitDict(infos),
    ).write_to_directory(str(folder))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:acme/helpdesk", HubName("acme/helpdesk", None, None, None)),
        ("hf:imdb", HubName("imdb", None, None, None)),
        ("hf:acme/helpdesk:en", HubName("acme/helpdesk", "en", None, None)),
        ("hf:acme/helpdesk:en:train@main", HubName("acme/helpdesk", "en", "train", "main")),
        ("hf:acme/helpdesk::test@refs/pr/1", HubName("acme/helpdesk", None, "test", "refs/pr/1")),
        ("hf:acme/helpdesk@v1.0", HubName("acme/helpdesk", None, None, "v1.0")),
    ],
)
def test_names(source: str, expected: HubName) -> None:
    assert parse_hub_name(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "hf:",
        "hf:a/b/c",
        "hf:../secret",
        "hf:/etc/passwd",
        "hf:a/b:c:d:e",
        "hf:a b",
        "hf:a@../x",
        "hf:a@",
        "hf:a/..",
    ],
)
def test_names_that_are_none(source: str) -> None:
    refused(source, "hf_name_invalid")


def test_a_cached_data_set(cache: Path) -> None:
    plant(cache, "acme/helpdesk", NEW, {"train": ROWS})
    for source in (
        "hf:acme/helpdesk",
        f"hf:acme/helpdesk:default:train@{NEW}",
        f"hf:acme/helpdesk@{NEW[:10]}",
    ):
        corpus = read(source)
        assert corpus.kind is CorpusKind.SENTENCES
        assert corpus.anchors == ["one", "two", "four"]
        assert corpus.groups == ["x", "x", None]
        assert corpus.row_numbers.tolist() == [1, 2, 4]
        assert corpus.info.format == "hf"
        assert corpus.info.name == f"hf:acme/helpdesk:default:train@{NEW}"
        assert [(e.reason, e.rows) for e in corpus.info.excluded] == [("blank", [3])]


def test_embeddings_and_progress(cache: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((2500, 3)).astype(np.float32)
    plant(cache, "acme/vectors", NEW, {"train": {"embeddings": vectors.tolist()}})
    seen: list[tuple[int, int]] = []
    corpus = read_corpus(
        "hf:acme/vectors",
        options(),
        sample_size=5000,
        rng=np.random.default_rng(0),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    np.testing.assert_array_equal(corpus.vectors, vectors)
    assert seen[:3] == [(1024, 2500), (2048, 2500), (2500, 2500)]
    assert seen[-1] == (2500, 2500)


def test_another_revision_in_the_cache_is_not_taken_for_the_one_asked_for(cache: Path) -> None:
    plant(cache, "acme/helpdesk", NEW, {"train": ROWS})
    error = refused(f"hf:acme/helpdesk@{OLD}", "hf_revision_mismatch")
    assert NEW in error.message
    refused("hf:acme/helpdesk@main", "hf_revision_mismatch")


def test_a_branch_counts_as_found_where_the_hub_cache_says_so(cache: Path) -> None:
    plant(cache, "acme/helpdesk", NEW, {"train": ROWS})
    refs = cache / "hub" / "datasets--acme--helpdesk" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(NEW)
    (refs / "old").write_text(OLD)
    assert len(read("hf:acme/helpdesk@main")) == 3
    refused("hf:acme/helpdesk@old", "hf_revision_mismatch")


def test_splits(cache: Path) -> None:
    plant(
        cache, "acme/helpdesk", NEW, {"train": ROWS, "test": {"text": ["five", "six"], "group": ["y", "z"]}}
    )
    assert read("hf:acme/helpdesk::test").anchors == ["five", "six"]
    for source in ("hf:acme/helpdesk", "hf:acme/helpdesk::dev"):
        assert "train, test" in refused(source, "hf_split_unknown").message


def test_what_is_not_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(cache, "acme/helpdesk", NEW, {"train": ROWS}, config="en")
    (cache / "acme" / "other").mkdir(parents=True)
    (cache / "acme" / "other" / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    monkeypatch.chdir(cache)
    assert len(read("hf:acme/helpdesk:en")) == 3
    for source in ("hf:acme/nothing", "hf:acme/helpdesk:de", "hf:acme/other", "hf:json"):
        error = refused(source, "hf_dataset_unavailable")
        assert isinstance(error, CorpusError)
