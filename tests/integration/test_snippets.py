"""Every snippet runs in the real library, and does what it says."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from probe_service.corpus.batching import BatchSampler
from probe_service.errors import RequestError
from probe_service.schemas import GroupedPolicy, SamplerKind
from probe_service.snippets import drop_rows, group_aware, masking_loss, training_arguments
from tests.unit.encode.checkpoints import write_checkpoint

datasets = pytest.importorskip("datasets")
theirs = pytest.importorskip("sentence_transformers.base.sampler")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

HOSTILE = "a\"); import os; os._exit(1)  # '\n\u202e{x}"
WORDS = ["the", "a", "cat", "sat", "on", "mat", "dogs", "run", "in", "park", "words", "and", "rest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, saved under a name that would end a string."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    base = write_checkpoint(tmp_path_factory.mktemp("base"), "some/base", "bert", weights="model.safetensors")
    model = SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, "mean")], device="cpu")
    saved = tmp_path_factory.mktemp("saved") / "it's a \"guide\"\n'"
    model.save(str(saved), create_model_card=False)
    return saved


@pytest.fixture(scope="module")
def model(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu").eval()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def rows():
    """Pairs with repeated texts; the columns that are not trained on come first and in between."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(70)]
    return datasets.Dataset.from_dict(
        {
            "id": list(range(90)),
            HOSTILE: [texts[place] for place in rng.integers(0, 70, 90)],
            "label": [f"intent {place}" if place < 14 else None for place in rng.integers(0, 20, 90)],
            "answer": [f"{WORDS[place % 13]} {place}" for place in range(90)],
            "source'": ["one"] * 40 + ["two", None] * 25,
        }
    )


COLUMNS = (HOSTILE, "answer")


def run(code, **names):
    exec(compile(code, "<snippet>", "exec"), names)
    return names


def batches_of(found, model):
    """The batches that the trainer makes of it in one epoch, as rows of the data set."""
    from sentence_transformers import SentenceTransformerTrainer

    trainer = SentenceTransformerTrainer(
        model=model, args=found["args"], train_dataset=found["train_dataset"], loss=found["loss"]
    )
    loader = trainer.get_train_dataloader()
    return [list(map(int, batch)) for batch in loader.batch_sampler]


def described(kind, **more):
    return BatchSampler(kind, 8, **more)


def arguments(sampler, **more):
    return training_arguments(
        sampler, temperature=0.05, text_columns=COLUMNS, source_column="source'", **more
    )


def test_random(rows, model):
    found = run(arguments(described(SamplerKind.RANDOM)), rows=rows, model=model)
    batches = batches_of(found, model)
    assert {len(batch) for batch in batches} == {8}
    assert len(batches) == 11
    assert [row for batch in batches for row in batch] != list(range(88))
    assert found["train_dataset"].column_names == list(COLUMNS)
    assert type(found["loss"]) is losses.MultipleNegativesRankingLoss
    assert found["loss"].scale == 20.0
    assert found["loss"].gather_across_devices is False
    assert found["args"].batch_sampler is theirs.BatchSamplers.BATCH_SAMPLER
    kept = run(arguments(described(SamplerKind.RANDOM, drop_last=False)), rows=rows, model=model)
    assert sorted(map(len, batches_of(kept, model))) == [2] + [8] * 11


def test_no_duplicates_on_four_devices_with_a_cached_loss(rows, model):
    sampler = described(SamplerKind.NO_DUPLICATES, world_size=4, gather=True)
    code = training_arguments(sampler, temperature=0.07, text_columns=COLUMNS, mini_batch_size=4)
    assert "# 32 rows are contrasted with each other." in code
    assert "torchrun --nproc-per-node 4" in code
    found = run(code, rows=rows, model=model)
    for batch in batches_of(found, model):
        texts = [text for row in batch for text in set(found["train_dataset"][row].values())]
        assert len(set(texts)) == len(texts)
    assert type(found["loss"]) is losses.CachedMultipleNegativesRankingLoss
    assert found["loss"].mini_batch_size == 4
    assert found["loss"].scale == pytest.approx(1 / 0.07)
    assert found["loss"].gather_across_devices is True
    assert found["args"].per_device_train_batch_size == 8
    assert found["args"].dataloader_drop_last is True


def test_sequential_of_one_column(rows, model):
    code = training_arguments(described(SamplerKind.SEQUENTIAL), temperature=0.05, text_columns=["answer"])
    found = run(code, rows=rows, model=model)
    assert batches_of(found, model) == [list(range(first, first + 8)) for first in range(0, 88, 8)]
    # A sentence is its own positive.
    assert [set(row.values()) for row in found["train_dataset"]] == [{text} for text in rows["answer"]]
    assert len(found["train_dataset"].column_names) == 2


@pytest.mark.parametrize("policy", list(GroupedPolicy))
@pytest.mark.parametrize("within", [SamplerKind.RANDOM, SamplerKind.NO_DUPLICATES])
def test_grouped(rows, model, policy, within):
    sampler = described(SamplerKind.GROUPED, policy=policy, within_source=within)
    found = run(arguments(sampler), rows=rows, model=model)
    assert {name: len(part) for name, part in found["train_dataset"].items()} == {
        "one": 40,
        "two": 25,
        "None": 25,
    }
    ends = np.cumsum([40, 25, 25])
    batches = batches_of(found, model)
    assert {len({int(np.searchsorted(ends, row, "right")) for row in batch}) for batch in batches} == {1}
    assert found["args"].multi_dataset_batch_sampler.value == policy.value
    if within is SamplerKind.NO_DUPLICATES:
        joined = datasets.concatenate_datasets(list(found["train_dataset"].values()))
        for batch in batches:
            anchors = joined.select(batch)[HOSTILE]
            assert len(set(anchors)) == len(batch)


@pytest.mark.parametrize(("world_size", "gather"), [(1, False), (2, True), (2, False)])
def test_group_aware(rows, model, world_size, gather):
    sampler = BatchSampler(SamplerKind.RANDOM, 4, world_size=world_size, gather=gather)
    code = group_aware(sampler, temperature=0.05, text_columns=COLUMNS, group_column="label")
    found = run(code, rows=rows, model=model)
    batches = batches_of(found, model)
    contrasted = batches
    if gather:
        from accelerate.data_loader import BatchSamplerShard

        # As accelerate deals them, each device's batches: what meets is one step of both.
        own = found["args"].batch_sampler(
            found["train_dataset"], 4, True, generator=torch.Generator(), seed=1
        )
        assert len(own) == 2 * (90 // 8)
        dealt = [list(BatchSamplerShard(own, 2, device, even_batches=False)) for device in range(2)]
        contrasted = [first + second for first, second in zip(*dealt, strict=True)]
        assert {len(rows) for rows in contrasted} == {8}
    assert len(batches) >= 16
    assert {len(batch) for batch in batches} == {4}
    for batch in contrasted:
        groups = [rows[row]["label"] for row in batch if rows[row]["label"] is not None]
        assert len(set(groups)) == len(groups)
        assert len({rows[row][HOSTILE] for row in batch}) == len(batch)
    # Rows without a group do meet; and epochs differ.
    assert any(sum(rows[row]["label"] is None for row in batch) > 1 for batch in contrasted)
    again = found["args"].batch_sampler(found["train_dataset"], 4, True, generator=torch.Generator(), seed=1)
    first = list(again)
    again.set_epoch(1)
    assert first != list(again)


def loss_by_hand(guide, left_out, temperature):
    """Mean over anchors of log Σ_j exp(s_ij/T) − s_ii/T over the candidates that stay."""
    size = len(guide)
    total = 0.0
    for i in range(size):
        stay = [j for j in range(size) if j == i or not left_out(guide[i][j], guide[i][i])]
        total += math.log(sum(math.exp(guide[i][j] / temperature) for j in stay)) - guide[i][i] / temperature
    return total / size


@pytest.mark.parametrize("mini_batch_size", [None, 2])
@pytest.mark.parametrize(("strategy", "margin"), [("absolute", 0.1), ("relative", 0.2), ("absolute", -0.3)])
def test_masking_loss(model, folder, strategy, margin, mini_batch_size):
    code = masking_loss(
        margin,
        guide=str(folder),
        temperature=0.1,
        margin_strategy=strategy,
        gather=True,
        mini_batch_size=mini_batch_size,
    )
    found = run(code, model=model)
    loss = found["loss"]
    assert type(loss) is (losses.GISTEmbedLoss if mini_batch_size is None else losses.CachedGISTEmbedLoss)
    assert loss.gather_across_devices is True
    anchors = ["the cat sat", "dogs run in the park", "a mat", "words and the rest", "cat"]
    positives = ["a cat sat on the mat", "the dogs run", "the mat", "rest and words", "park"]
    cosines = model.similarity(model.encode(anchors), model.encode(positives)).double().tolist()

    def left_out(similarity, positive):
        return similarity > positive - margin * (1 if strategy == "absolute" else abs(positive))

    masked = sum(left_out(cosines[i][j], cosines[i][i]) for i in range(5) for j in range(5) if i != j)
    assert 0 < masked < 20
    features = [model.preprocess(anchors), model.preprocess(positives)]
    with torch.no_grad():
        value = float(loss(features, None))
    assert value == pytest.approx(loss_by_hand(cosines, left_out, 0.1), rel=1e-4)


def test_masking_loss_with_known_encoders():
    assert "'sentence-transformers/all-MiniLM-L6-v2'" in masking_loss(0.1, guide="minilm", temperature=0.05)
    assert "revision='1110a243fdf4706b3f48f1d95db1a4f5529b4d41'" in masking_loss(
        0.1, guide="minilm", temperature=0.05
    )
    with pytest.raises(RequestError) as caught:
        masking_loss(0.1, guide="princeton-nlp/sup-simcse-roberta-large", temperature=0.05)
    assert caught.value.code == "encoder_no_guide"


@pytest.mark.parametrize("dropped", [[], [1], [90, 3, 3, 17], range(1, 80)])
def test_drop_rows(rows, dropped):
    found = run(drop_rows(dropped, rows_read=90), rows=rows)
    assert found["rows"]["id"] == [number - 1 for number in range(1, 91) if number not in dropped]
    with pytest.raises(ValueError, match="the probed corpus had 90 rows, not 89"):
        run(drop_rows(dropped, rows_read=90), rows=rows.select(range(89)))
    assert max(map(len, drop_rows(dropped, rows_read=90).splitlines())) <= 100


def test_pasted_one_after_the_other_they_train(folder, rows):
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

    model = SentenceTransformer(str(folder), device="cpu")
    before = model[0].auto_model.embeddings.word_embeddings.weight.detach().clone()
    pasted = [
        drop_rows([1, 2], rows_read=90),
        group_aware(
            BatchSampler(SamplerKind.RANDOM, 4), temperature=0.05, text_columns=COLUMNS, group_column="label"
        ),
        masking_loss(0.0, guide=str(folder), temperature=0.05),
    ]
    found = run("".join(pasted), model=model, rows=rows)
    assert len(found["train_dataset"]) == 88
    args = found["args"]
    args.max_steps, args.save_strategy, args.disable_tqdm = 2, "no", True
    args.dataloader_pin_memory = False  # torch warns of it where there is no accelerator
    SentenceTransformerTrainer(
        model=model, args=args, train_dataset=found["train_dataset"], loss=found["loss"]
    ).train()
    assert not torch.equal(model[0].auto_model.embeddings.word_embeddings.weight, before)


def test_importing_loads_nothing_heavy():
    look = (
        "import sys, probe_service.snippets; print({'torch', 'datasets', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "set()", found.stderr


def test_numbers_that_are_none_are_refused():
    sampler = described(SamplerKind.RANDOM)
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="not"):
            training_arguments(sampler, temperature=temperature, text_columns=["a"])
    with pytest.raises(ValueError, match="finite"):
        masking_loss(math.inf, guide="minilm", temperature=0.05)
    for numbers in ([0], [91], [-1, 5]):
        with pytest.raises(ValueError, match="not all among 90 rows"):
            drop_rows(numbers, rows_read=90)


def test_texts_of_the_corpus_are_literals_and_nothing_else():
    """Each hostile name stands in the code as one string constant; comments hold none of it."""
    sampler = BatchSampler(SamplerKind.GROUPED, 8)
    snippets = [
        training_arguments(sampler, temperature=0.05, text_columns=[HOSTILE], source_column=HOSTILE),
        group_aware(sampler, temperature=0.05, text_columns=["a", HOSTILE], group_column=HOSTILE),
        masking_loss(0.1, guide=HOSTILE, temperature=0.05),
    ]
    for code, times in zip(snippets, (3, 2, 1), strict=True):
        constants = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
        assert constants.count(HOSTILE) == times
        assert not any("os._exit" in line for line in code.splitlines() if line.startswith("#"))
        assert "\u202e" not in code
        json.dumps(code)
