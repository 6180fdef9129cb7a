"""Batches of one length on several threads give what sentence-transformers gives, and end when they should."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.errors import EncoderError
from tests.unit.encode.checkpoints import SENTENCES, random_model, write_checkpoint

WORDS = ("the", "a", "cat", "sat", "on", "mat", "dogs", "run", "in", "park", "words", "zebra")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Any]:
    """Put a tiny model together, of weights so small that float32 sums barely differ by their order."""

    def put_together(kind: str, pooling: str = "mean", *, padding_side: str = "right") -> Any:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        model = random_model(kind)
        for parameter in model.parameters():
            parameter.data.mul_(0.3 if parameter.ndim > 1 else 1.0)
        folder = write_checkpoint(tmp_path, f"some/{kind}", kind, weights="model.safetensors", model=model)
        transformer = Transformer(str(folder), max_seq_length=40)
        transformer.tokenizer.padding_side = padding_side
        return SentenceTransformer(modules=[transformer, Pooling(32, pooling)], device="cpu")

    return put_together


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, size=int(length))) for length in rng.integers(0, 45, size=count)]


def cosines(vectors: np.ndarray) -> np.ndarray:
    rows = vectors.astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows @ rows.T


def assert_same_cosines(found: np.ndarray, expected: np.ndarray) -> None:
    errors = np.abs(cosines(found) - cosines(expected))
    assert errors.mean() <= 1e-6
    assert errors.max() <= 1e-5


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_cosines_are_those_of_padded_batches(build, kind: str, pooling: str) -> None:
    model = build(kind, pooling)
    texts = [*random_texts(120), *SENTENCES, " ", "\t", "the", "the"]
    padded = model.encode(texts, batch_size=16, show_progress_bar=False)

    encoder = ModuleEncoder(model)
    found = encoder.encode(texts)

    assert_same_cosines(found.vectors, padded)
    order = np.random.default_rng(1).permutation(len(texts))
    shuffled = encoder.encode([texts[row] for row in order])
    np.testing.assert_allclose(shuffled.vectors, found.vectors[order], atol=1e-6)
    assert (shuffled.input_digests == found.input_digests[order]).all()
    assert (shuffled.was_truncated == found.was_truncated[order]).all()
    assert found.was_truncated.tolist() == [len(text.split()) > 38 for text in texts]
    alone = encoder.encode(texts[:1])
    np.testing.assert_allclose(alone.vectors, found.vectors[:1], atol=1e-6)
    assert len(encoder.encode([])) == 0


def test_padding_on_the_left_is_left_out_as_well(build) -> None:
    model = build("bert", padding_side="left")
    texts = random_texts(30)

    one_by_one = np.concatenate([model.encode([text], show_progress_bar=False) for text in texts])

    assert_same_cosines(ModuleEncoder(model).encode(texts).vectors, one_by_one)


def test_every_row_comes_once_and_nothing_is_padded(build) -> None:
    model = build("bert")
    seen = watch(model, lambda features: features["attention_mask"].clone())
    texts = random_texts(300)

    encoder = ModuleEncoder(model)
    rows = np.concatenate([rows for rows, _ in encoder.stream(texts)])

    assert sorted(rows.tolist()) == list(range(300))
    assert all(mask.all() for mask in seen)
    assert max(mask.numel() for mask in seen) <= 512
    assert len(seen) < 80


def test_closing_the_stream_ends_the_work(build) -> None:
    model = build("bert")
    seen = watch(model, lambda features: None)
    texts = random_texts(600)

    coming = ModuleEncoder(model).stream(texts)
    next(coming)
    coming.close()

    # Five calls had been handed out to two threads when the first rows came.
    assert len(seen) <= 5


def test_threads_that_begin_later_keep_their_number_of_cores(build) -> None:
    ModuleEncoder(build("bert")).encode(SENTENCES)

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()

    assert found == [2]
    assert torch.get_num_threads() == 2


def test_a_batch_too_large_for_the_memory_is_halved(build) -> None:
    model = build("bert")
    texts = random_texts(60)
    expected = ModuleEncoder(model).encode(texts).vectors
    seen = watch(model, refuse_more_rows_than(3))

    np.testing.assert_allclose(ModuleEncoder(model).encode(texts).vectors, expected, atol=1e-6)
    assert seen

    watch(model, refuse_more_rows_than(0))
    with pytest.raises(EncoderError) as caught:
        ModuleEncoder(model).encode(texts)
    assert caught.value.code == "encoder_out_of_memory"


def test_a_fault_on_a_thread_reaches_the_caller(build) -> None:
    model = build("bert")

    def fail(features: dict[str, Any]) -> None:
        raise IndexError("index out of range in self")

    watch(model, fail)

    with pytest.raises(EncoderError, match="index out of range") as caught:
        ModuleEncoder(model).encode(SENTENCES)
    assert caught.value.code == "encoder_failed"


def watch(model: Any, look: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Look at what the model is given in every call, before it runs; keep what `look` returns."""
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda module, given: seen.append(look(given[0])))
    return seen


def refuse_more_rows_than(count: int) -> Callable[[dict[str, Any]], None]:
    def look(features: dict[str, Any]) -> None:
        if len(features["input_ids"]) > count:
            raise torch.OutOfMemoryError("out of memory")

    return look
