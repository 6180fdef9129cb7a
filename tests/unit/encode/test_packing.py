"""Packed layers give the cosines of the plain ones; bfloat16 says by how much it does not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from probe_service.encode import CheckedEncoder, load_encoder
from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.packing import pack
from probe_service.encode.weights import locate_known
from probe_service.errors import EncoderError
from probe_service.known_encoders import KNOWN_ENCODERS
from probe_service.settings import Settings
from tests.unit.encode.checkpoints import SENTENCES, random_model, write_checkpoint

has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="this CPU has no bfloat16")


def build(folder: Path, kind: str, activation: str = "gelu", scale: float = 0.3) -> ModuleEncoder:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model = random_model(kind)
    model.config.hidden_act = activation
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1.0)
    saved = write_checkpoint(folder, f"some/{kind}", kind, weights="model.safetensors", model=model)
    modules = [Transformer(str(saved), max_seq_length=64), Pooling(32, "mean")]
    return ModuleEncoder(SentenceTransformer(modules=modules, device="cpu"))


def cosines(vectors: np.ndarray) -> np.ndarray:
    rows = vectors.astype(np.float64)
    return (rows @ rows.T)[np.triu_indices(len(rows), 1)]


def linear_layers(encoder: ModuleEncoder) -> int:
    return sum(type(module) is nn.Linear for module in encoder.model[0].modules())


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_cosines_stay_and_no_layer_is_left_out(tmp_path: Path, kind: str, activation: str) -> None:
    encoder = build(tmp_path, kind, activation)
    before = encoder.encode(SENTENCES).vectors
    assert linear_layers(encoder) == 13  # six in each of two layers, and the pooler's

    said = pack(encoder, "float32")

    assert linear_layers(encoder) == 0
    padded = encoder.model.encode(SENTENCES, normalize_embeddings=True, show_progress_bar=False)
    for after in (encoder.encode(SENTENCES).vectors, padded):
        errors = np.abs(cosines(after) - cosines(before))
        assert errors.mean() <= 1e-6
        assert errors.max() <= 1e-5
    assert said == "linear layers packed, cosines of 32 texts within 1e-05 of the unpacked"


def test_layers_that_cannot_be_packed_stay_and_the_report_says_so(tmp_path: Path) -> None:
    class ReadsItsWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(32, 32)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states @ self.dense.weight

    encoder = build(tmp_path, "bert")
    encoder.model[0].auto_model.pooler = ReadsItsWeight()
    before = encoder.encode(SENTENCES).vectors

    said = pack(encoder, "float32")

    assert said.startswith("linear layers not packed: ")
    assert "weight" in said
    assert linear_layers(encoder) == 13
    np.testing.assert_array_equal(encoder.encode(SENTENCES).vectors, before)


@needs_bfloat16
def test_bfloat16_that_changes_the_cosines_is_refused(tmp_path: Path) -> None:
    # Weights so large that every softmax picks one token, and another one after rounding.
    with pytest.raises(EncoderError, match="moves a cosine by") as caught:
        pack(build(tmp_path, "bert", scale=8.0), "bfloat16")

    assert caught.value.code == "encoder_dtype_unavailable"


def test_cpu_without_bfloat16_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    with pytest.raises(EncoderError, match="AVX512-BF16") as caught:
        pack(build(tmp_path, "bert"), "bfloat16")

    assert caught.value.code == "encoder_dtype_unavailable"


@pytest.fixture(scope="module")
def exact() -> CheckedEncoder:
    return load_encoder("minilm", Settings(device="cpu"))


def random_texts(count: int) -> list[str]:
    """Of 1 to 300 words, most of them short: the longest are cut at 256 tokens."""
    rng = np.random.default_rng(0)
    words = [
        f"{a}{b}" for a in ("re", "un", "net", "log", "") for b in ("set", "word", "able", "cat", "7", "é")
    ]
    lengths = np.concatenate([np.minimum(rng.geometric(0.1, size=count - 2), 300), [1, 300]])
    return [" ".join(rng.choice(words, size=int(length))) for length in lengths]


def test_minilm_is_that_of_sentence_transformers(exact: CheckedEncoder) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [*random_texts(60), "", " ", "😀", "the same text", "the same text"]
    peer = SentenceTransformer(str(locate_known(KNOWN_ENCODERS["minilm"]).folder), device="cpu")
    peer.max_seq_length = 256
    expected = peer.encode(texts, batch_size=32, show_progress_bar=False)

    errors = np.abs(cosines(exact.encoder.encode(texts).vectors) - cosines(expected))

    assert "packed" in exact.info.check
    assert errors.mean() <= 1e-6
    assert errors.max() <= 1e-5


@needs_bfloat16
def test_bfloat16_is_close_and_says_so(exact: CheckedEncoder) -> None:
    fast = load_encoder("minilm", Settings(device="cpu", encode_dtype="bfloat16"))
    texts = random_texts(80)

    found, expected = (cosines(loaded.encoder.encode(texts).vectors) for loaded in (fast, exact))

    assert 0.0 < np.abs(found - expected).mean() <= 5e-4
    assert abs(np.sort(found)[-4:].mean() - np.sort(expected)[-4:].mean()) <= 1e-3
    assert (exact.info.dtype, fast.info.dtype) == ("float32", "bfloat16")
    assert exact.info.fingerprint != fast.info.fingerprint
    assert re.search(
        r"bfloat16, which moves cosines of 32 texts by [345]\.\de-04 on average", fast.info.check
    )
