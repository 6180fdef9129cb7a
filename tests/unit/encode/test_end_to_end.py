"""Rows laid end to end, as on a GPU, give the padded model's vectors; tested on a CPU, where only the attention differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe_service.encode import packing
from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.packing import EndToEnd, lay_end_to_end
from probe_service.errors import EncoderError
from tests.unit.encode.checkpoints import SENTENCES, random_model, write_checkpoint

WORDS = ("the", "a", "cat", "sat", "on", "mat", "dogs", "run", "in", "park", "words", "zebra")


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., ModuleEncoder]:
    """An encoder that mixes rows of several lengths in a call, as on a GPU."""

    def put_together(kind: str, pooling: str = "mean", scale: float = 0.3) -> ModuleEncoder:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        model = random_model(kind)
        for parameter in model.parameters():
            parameter.data.mul_(scale if parameter.ndim > 1 else 1.0)
        folder = write_checkpoint(tmp_path, f"some/{kind}", kind, weights="model.safetensors", model=model)
        modules = [Transformer(str(folder), max_seq_length=40), Pooling(32, pooling)]
        return as_on_gpu(ModuleEncoder(SentenceTransformer(modules=modules, device="cpu")))

    return put_together


def as_on_gpu(encoder: ModuleEncoder) -> ModuleEncoder:
    encoder._kind = "gpu"
    return encoder


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, size=int(length))) for length in rng.integers(0, 45, size=count)]


def watch(model: Any) -> list[torch.Tensor]:
    """The masks that the transformer is given."""
    seen: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]["attention_mask"]))
    return seen


@pytest.mark.parametrize(("kind", "pooling"), [("bert", "mean"), ("roberta", "cls"), ("roberta", "max")])
def test_vectors_are_those_of_the_padded_model(build, kind: str, pooling: str) -> None:
    encoder = build(kind, pooling)
    texts = [*random_texts(60), *SENTENCES]
    expected = encoder.model.encode(texts, batch_size=8, normalize_embeddings=True, show_progress_bar=False)

    said = lay_end_to_end(encoder, "float32")
    masks = watch(encoder.model)

    np.testing.assert_allclose(encoder.encode(texts).vectors, expected, atol=3e-6)
    assert not masks[0].all()  # rows of several lengths did share a call
    assert isinstance(encoder.model[0].auto_model, EndToEnd)
    assert said == "rows end to end without padding, cosines of 32 texts within 1e-05 of the padded"
    # Also when it is called as sentence-transformers calls it.
    direct = encoder.model.encode(texts, batch_size=8, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(direct, expected, atol=3e-6)


def test_bfloat16_says_how_far_it_moves_cosines(build) -> None:
    encoder = build("roberta")
    texts = random_texts(40)
    before = encoder.encode(texts).vectors.astype(np.float64)

    said = lay_end_to_end(encoder, "bfloat16")

    after = encoder.encode(texts).vectors.astype(np.float64)
    assert 0.0 < np.abs(after @ after.T - before @ before.T).max() < 2e-2
    assert {parameter.dtype for parameter in encoder.model[0].parameters()} == {torch.bfloat16}
    assert "which moves cosines of 32 texts by" in said
    # A CPU has no attention for rows of several lengths.
    assert said.endswith(
        "attention by runs of equal length (this torch has no other here: NotImplementedError)"
    )


def test_rows_that_see_each_other_are_found_out(build, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_all(query, key, value, rows):
        one = (each[None].transpose(1, 2) for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*one)[0].transpose(0, 1)

    # Few of the texts' words are in the vocabulary: with small weights all rows are nearly alike.
    encoder = build("bert", scale=1.0)
    before = encoder.encode(SENTENCES).vectors
    with monkeypatch.context() as patched:
        patched.setattr(packing, "_attend_varlen", over_all)
        assert "the other is off by" in lay_end_to_end(build("roberta"), "bfloat16")
        patched.setattr(packing, "_attend_by_length", over_all)
        said = lay_end_to_end(encoder, "float32")

    assert said.startswith("rows padded to the longest of a batch: it moves a cosine by")
    np.testing.assert_array_equal(encoder.encode(SENTENCES).vectors, before)


def test_a_model_of_another_kind_stays_padded(build) -> None:
    encoder = build("bert")
    encoder.model[0].auto_model.encoder.layer[1].intermediate.intermediate_act_fn = torch.nn.ReLU()
    before = encoder.encode(SENTENCES).vectors

    assert lay_end_to_end(encoder, "float32").endswith("its layers are not BERT's")
    np.testing.assert_array_equal(encoder.encode(SENTENCES).vectors, before)
    said = lay_end_to_end(encoder, "bfloat16")
    assert "rows padded" in said
    np.testing.assert_allclose(encoder.encode(SENTENCES).vectors, before, atol=2e-2)


def test_dropout_is_that_of_the_model(build) -> None:
    encoder = build("bert")
    first, _ = encoder.dropout_views(SENTENCES, 3)

    lay_end_to_end(encoder, "float32")

    again, other = encoder.dropout_views(SENTENCES, 3)
    np.testing.assert_array_equal(again, first)
    assert (again != other).any()


def test_replicas_share_the_calls_and_agree(build, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = build("bert")
    texts = random_texts(200)
    lay_end_to_end(encoder, "float32")
    expected = encoder.encode(texts)
    other = as_on_gpu(ModuleEncoder(encoder.model))
    replica = copy.deepcopy(encoder.model)
    other._most_tokens = 200
    other.add_replicas([replica])
    meeting = [watch(encoder.model), watch(replica)]

    found = other.encode(texts)

    np.testing.assert_allclose(found.vectors, expected.vectors, atol=3e-6)
    assert (found.input_digests == expected.input_digests).all()
    assert min(map(len, meeting)) > 2
    assert sum(mask.sum() for masks in meeting for mask in masks) == sum(
        min(len(text.split()), 38) + 2 for text in texts
    )


def test_batches_shrink_to_what_the_memory_holds(build) -> None:
    encoder = build("bert")
    lay_end_to_end(encoder, "float32")
    texts = random_texts(400)
    expected = encoder.encode(texts).vectors
    encoder._most_tokens = 4096
    refused: list[int] = []

    def refuse(_: Any, given: Any) -> None:
        if given[0]["attention_mask"].numel() > 900:
            refused.append(given[0]["attention_mask"].numel())
            raise torch.OutOfMemoryError("out of memory")

    encoder.model[0].register_forward_pre_hook(refuse)

    np.testing.assert_allclose(encoder.encode(texts).vectors, expected, atol=3e-6)
    assert refused
    assert encoder._most_tokens <= 900
    refused.clear()
    encoder.encode(texts)
    assert refused == []


def test_too_little_memory_for_one_row_is_said(build) -> None:
    encoder = build("bert")
    encoder.model[0].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("out"))
    )

    with pytest.raises(EncoderError) as caught:
        encoder.encode(SENTENCES)
    assert caught.value.code == "encoder_out_of_memory"
