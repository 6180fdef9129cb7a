"""minilm against transformers with mean pooling written out here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from probe_service.encode import CheckedEncoder, default_encoder_name, load_encoder, record_canaries
from probe_service.encode.canaries import canaries_of, check_canaries
from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.weights import locate_known
from probe_service.errors import EncoderError
from probe_service.known_encoders import KNOWN_ENCODERS
from probe_service.settings import Settings

TEXTS = [
    "How do I reset my password?",
    "x",
    "",
    "Zażółć gęślą jaźń 😀 — שלום עולם مرحبا",
    "tabs\tand\nnewlines\x00\x07 and bells",
    "word " * 300,
    "a short one",
    "the very same text",
    "the very same text",
]


@pytest.fixture(scope="module")
def minilm() -> CheckedEncoder:
    return load_encoder("minilm", Settings(device="cpu"))


def mean_pooled_by_hand(texts: list[str], max_length: int) -> np.ndarray:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = locate_known(KNOWN_ENCODERS["minilm"]).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            states = model(**tokens).last_hidden_state[0].double().numpy()
        mean = states.sum(axis=0) / len(states)
        rows.append(mean / np.sqrt((mean**2).sum()))
    return np.array(rows)


def test_vectors_equal_automodel_with_mean_pooling(minilm: CheckedEncoder) -> None:
    encoded = minilm.encoder.encode(TEXTS)

    np.testing.assert_allclose(encoded.vectors, mean_pooled_by_hand(TEXTS, 256), atol=1e-5)
    assert encoded.vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(encoded.vectors, axis=1), 1.0, atol=1e-6)


def test_cut_rows_and_equal_inputs_are_found(minilm: CheckedEncoder) -> None:
    # [CLS] + 254 words + [SEP] is 256 tokens: just fits. One word more is cut, and then equals every longer one.
    texts = ["word " * 254, "word " * 255, "word " * 255 + "and another end", "word  " * 254]

    encoded = minilm.encoder.encode(texts)

    assert encoded.was_truncated.tolist() == [False, True, True, False]
    digests = [bytes(row) for row in encoded.input_digests]
    assert digests[1] == digests[2] == digests[0] == digests[3]
    assert bytes(minilm.encoder.encode(["word"]).input_digests[0]) != digests[0]


def test_no_texts_give_no_rows(minilm: CheckedEncoder) -> None:
    assert minilm.encoder.encode([]).vectors.shape == (0, 384)


def test_lone_surrogates_do_not_fail(minilm: CheckedEncoder) -> None:
    assert np.isfinite(minilm.encoder.encode(["broken \ud800 text"]).vectors).all()


def test_info_names_the_weights(minilm: CheckedEncoder) -> None:
    info = minilm.info

    assert info.weights_sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert info.revision == "1110a243fdf4706b3f48f1d95db1a4f5529b4d41"
    assert info.revision_pinned
    assert (info.pooling, info.max_length, info.dimension, info.dtype) == ("mean", 256, 384, "float32")
    assert "canary" in info.check


def test_recorded_canaries_are_those_of_transformers() -> None:
    fresh = record_canaries("minilm", Settings(device="cpu"))
    held = canaries_of("minilm")

    assert len(held) >= 5
    assert [canary.cosine for canary in fresh] == pytest.approx([canary.cosine for canary in held], abs=1e-4)


@pytest.mark.parametrize("wrong_pooling", ["cls", "max"])
def test_canaries_refuse_wrong_pooling(wrong_pooling: str) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    transformer = Transformer(str(locate_known(KNOWN_ENCODERS["minilm"]).folder), max_seq_length=256)
    model = SentenceTransformer(modules=[transformer, Pooling(384, wrong_pooling), Normalize()], device="cpu")

    with pytest.raises(EncoderError) as caught:
        check_canaries("minilm", ModuleEncoder(model))

    assert caught.value.code == "encoder_canary_mismatch"


def test_canaries_refuse_a_wrong_maximum_length() -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    transformer = Transformer(str(locate_known(KNOWN_ENCODERS["minilm"]).folder), max_seq_length=128)
    model = SentenceTransformer(modules=[transformer, Pooling(384, "mean"), Normalize()], device="cpu")

    with pytest.raises(EncoderError, match="maximum length"):
        check_canaries("minilm", ModuleEncoder(model))


def test_loaded_once_per_process(minilm: CheckedEncoder) -> None:
    assert load_encoder("minilm", Settings(device="cpu")) is minilm


def test_default_follows_setting_then_device() -> None:
    assert default_encoder_name(Settings(encoder="unsup-simcse-bert-base")) == "unsup-simcse-bert-base"
    assert default_encoder_name(Settings(device="cpu")) == "minilm"


def test_importing_the_package_leaves_torch_alone(repository: Path) -> None:
    script = (
        "import sys, probe_service.encode; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", script], cwd=repository, check=False).returncode == 0
