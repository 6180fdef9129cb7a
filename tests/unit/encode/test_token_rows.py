"""Tokens read from the tokenizer itself are those that sentence-transformers makes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.token_rows import RowTokenizer, TokenRows
from probe_service.encode.weights import locate_known
from probe_service.known_encoders import KNOWN_ENCODERS
from tests.unit.encode.checkpoints import SENTENCES, write_checkpoint


def build(folder: Path, kind: str, max_length: int = 20) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    saved = write_checkpoint(folder, f"some/{kind}", kind, weights="model.safetensors")
    return SentenceTransformer(
        modules=[Transformer(str(saved), max_seq_length=max_length), Pooling(32)], device="cpu"
    )


def check(model: Any, prompt: str | None, texts: list[str]) -> TokenRows:
    tokenizer = RowTokenizer(model, prompt, model.max_seq_length)
    found = tokenizer.rows(texts)
    expected = model.preprocess(texts, prompt=prompt)
    rows = np.arange(len(texts))
    features = tokenizer.features(found, rows)
    assert features.keys() == expected.keys()
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        if name in expected:
            assert (features[name] == expected[name]).all()
            assert features[name].dtype == expected[name].dtype
    fed = [
        ids[mask.bool()].numpy()
        for ids, mask in zip(expected["input_ids"], expected["attention_mask"], strict=True)
    ]
    for digest, ids in zip(found.digests(), fed, strict=True):
        assert digest.tobytes() == hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=16).digest()
    return found


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("prompt", [None, "the cat "])
def test_ids_mask_digests_and_cuts(tmp_path: Path, kind: str, prompt: str | None) -> None:
    at_the_limit, above = "cat " * (18 - 2 * bool(prompt)), "cat " * (19 - 2 * bool(prompt))
    texts = [*SENTENCES, "<pad> [PAD] the", at_the_limit, above]

    found = check(build(tmp_path, kind), prompt, texts)

    assert found.was_truncated.tolist() == [text in (SENTENCES[4], above) for text in texts]


def test_minilm() -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(locate_known(KNOWN_ENCODERS["minilm"]).folder), device="cpu")
    check(
        model,
        None,
        ["", " ", "É😀\n\t", "[CLS] [MASK]", "word " * 600, "the tokenizer un-splits nothing, ever"],
    )


def test_a_tokenizer_that_does_something_else_is_not_believed(tmp_path: Path) -> None:
    model = build(tmp_path, "bert")
    plain = model.preprocess
    model.preprocess = lambda texts, **further: plain([text.upper() for text in texts], **further)

    with pytest.raises(ValueError, match="ids are not those"):
        RowTokenizer(model, None, 20)
    # And the encoder goes on with what sentence-transformers makes.
    encoder = ModuleEncoder(model)
    np.testing.assert_allclose(
        encoder.encode(["the cat", "a cat sat"]).vectors,
        model.encode(["THE CAT", "A CAT SAT"], normalize_embeddings=True),
        atol=1e-6,
    )
    assert (
        encoder.encode(["the cat"]).input_digests.tolist()
        == encoder.encode(["THE CAT"]).input_digests.tolist()
    )
