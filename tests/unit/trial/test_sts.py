"""STS in SimCSE's protocol against sentence-transformers' evaluator on the same rows, and against known figures."""

from __future__ import annotations

import gzip
import itertools
import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from probe_service.encode import load_for_training
from probe_service.errors import InputError
from probe_service.settings import Settings
from probe_service.trial.sts import StsScores, StsTask, read_sts, read_sts_dev, sts_correlation, sts_scores
from tests.unit.encode.checkpoints import write_checkpoint

SIZES = {
    "sts12": 3108,
    "sts13": 1500,
    "sts14": 3750,
    "sts15": 3000,
    "sts16": 1186,
    "stsb": 1379,
    "sick": 4927,
}
WORDS = [
    "the cat",
    "a cat sat",
    "dogs run",
    "in the park",
    "on the mat",
    "words and the rest",
    "mat",
    "dogs sat on a mat",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random BERT whose vectors are of many lengths."""
    base = write_checkpoint(tmp_path_factory.mktemp("tiny"), "some/bert", "bert", weights="model.safetensors")
    return SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, "mean")], device="cpu")


@pytest.fixture(scope="module")
def pairs() -> StsTask:
    """All pairs of different sentences, in few different scores.

    No pair comes twice, nor the other way round: their cosines tie, and float32 would break such ties by chance.
    """
    sides = zip(*itertools.combinations(WORDS, 2), strict=True)
    return StsTask("some", *sides, np.random.default_rng(0).integers(0, 6, 28).astype(float))


def test_it_agrees_with_the_evaluator_of_sentence_transformers(model, pairs):
    evaluator = EmbeddingSimilarityEvaluator(
        list(pairs.first),
        list(pairs.second),
        pairs.scores.tolist(),
        main_similarity="cosine",
        write_csv=False,
    )
    expected = evaluator(model)["spearman_cosine"]
    assert sts_correlation(model, pairs, batch_size=7) == pytest.approx(expected, abs=1e-9)
    assert abs(expected) > 0.01


def test_the_average_is_of_rounded_correlations():
    scores = StsScores({"a": 0.70005, "b": 0.80004})
    # .7001 (half to even in binary: .70005 is a little above) and .8000.
    assert scores.average == pytest.approx((round(0.70005, 4) + 0.8) / 2, abs=1e-12)
    assert StsScores({"a": 0.12344, "b": 0.12344}).average == 0.1234


def write(file, rows):
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def row(split, score, **texts):
    return {"split": split, "score": score, "sentence1": "Raw One", "sentence2": "Raw Two", **texts}


def test_splits_and_tokenised_texts(tmp_path):
    for name in SIZES:
        tokenised = {} if name == "sick" else {"sentence1_tok": "raw one", "sentence2_tok": f"raw {name}"}
        write(
            tmp_path / f"{name}.jsonl.gz",
            [row("test", 1, **tokenised), row("test", 2), row("dev", 3), row("dev", 4)],
        )
    tasks = read_sts(tmp_path)
    assert [each.name for each in tasks] == list(SIZES)
    assert list(tasks[0].second) == ["raw sts12", "Raw Two"]
    assert list(tasks[-1].first) == ["Raw One", "Raw One"]
    assert tasks[0].scores.tolist() == [1.0, 2.0]
    assert read_sts_dev(tmp_path).scores.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("dev", 1)] * 4,
        [row("test", "high")],
        [{"split": "test", "score": 1}],
        [["test"]],
        [row("test", 1), row("test", 1, sentence2=None)],
    ],
)
def test_files_that_are_no_tasks(tmp_path, rows):
    write(tmp_path / "sts12.jsonl.gz", rows)
    with pytest.raises(InputError) as refused:
        read_sts(tmp_path)
    assert refused.value.code == "sts_unreadable"
    assert "sts12" in refused.value.message


def test_a_missing_folder_and_a_broken_file(tmp_path):
    (tmp_path / "sts12.jsonl.gz").write_bytes(gzip.compress(b'{"split": "test"')[:-9])
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError) as refused:
            read_sts(folder)
        assert refused.value.code == "sts_unreadable"


def test_the_files_have_the_rows_of_simcse(labelled_corpora):
    assert {each.name: len(each.scores) for each in read_sts(labelled_corpora / "sts")} == SIZES
    assert len(read_sts_dev(labelled_corpora / "sts").scores) == 1500


@pytest.mark.slow
def test_minilm_on_sts_benchmark(labelled_corpora, tmp_path):
    stsb = next(each for each in read_sts(labelled_corpora / "sts") if each.name == "stsb")
    model = load_for_training("minilm", Settings(home=tmp_path, device="cpu"))
    assert sts_scores(model, [stsb]).average == 0.8203
