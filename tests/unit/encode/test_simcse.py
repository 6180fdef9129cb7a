"""The SimCSE recipes on tiny random checkpoints, against transformers' own pooler output."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from probe_service.encode import load as load_module
from probe_service.encode import load_encoder
from probe_service.encode.transformer import build_known, check_structure
from probe_service.encode.weights import locate_known
from probe_service.errors import EncoderError
from probe_service.known_encoders import KNOWN_ENCODERS
from probe_service.settings import Settings
from tests.unit.encode.checkpoints import (
    COMMIT,
    SENTENCES,
    random_model,
    vectors_of_transformers,
    write_checkpoint,
)

CPU = Settings(device="cpu")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no encoder loaded yet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(load_module, "_checked", {})
    return tmp_path / "hub"


def refusal(name: str) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        load_encoder(name, CPU)
    return caught.value


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(
    ("name", "kind"), [("simcse-roberta-large", "roberta"), ("simcse-bert-base", "bert")]
)
def test_supervised_vectors_are_the_pooler_output(
    hub_cache: Path, name: str, kind: str, weights: str
) -> None:
    folder = write_checkpoint(hub_cache, KNOWN_ENCODERS[name].hub_name, kind, weights=weights)

    loaded = load_encoder(name, CPU)
    encoded = loaded.encoder.encode(SENTENCES)

    # 66 rows of RoBERTa's position table are 64 tokens: it begins after the padding index 1.
    expected = vectors_of_transformers(folder, SENTENCES, 64, "pooler_output")
    np.testing.assert_allclose(encoded.vectors, expected, atol=5e-6)
    assert loaded.info.max_length == 64
    assert encoded.was_truncated.tolist() == [False] * 4 + [True] + [False] * 3
    assert loaded.info.revision == COMMIT
    assert not loaded.info.revision_pinned
    assert loaded.info.pooling == "cls_dense_tanh"


@pytest.mark.parametrize(
    ("name", "kind"), [("unsup-simcse-roberta-base", "roberta"), ("unsup-simcse-bert-large", "bert")]
)
def test_unsupervised_vectors_are_the_first_token_before_the_pooler(
    hub_cache: Path, name: str, kind: str
) -> None:
    folder = write_checkpoint(hub_cache, KNOWN_ENCODERS[name].hub_name, kind)

    encoded = load_encoder(name, CPU).encoder.encode(SENTENCES)

    np.testing.assert_allclose(
        encoded.vectors, vectors_of_transformers(folder, SENTENCES, 64, "first_token"), atol=5e-6
    )
    assert (
        np.abs(encoded.vectors - vectors_of_transformers(folder, SENTENCES, 64, "pooler_output")).max() > 0.1
    )


def test_full_hub_name_gets_the_same_recipe(hub_cache: Path) -> None:
    folder = write_checkpoint(hub_cache, "princeton-nlp/sup-simcse-roberta-large", "roberta")

    loaded = load_encoder("princeton-nlp/sup-simcse-roberta-large", CPU)

    np.testing.assert_allclose(
        loaded.encoder.encode(SENTENCES).vectors,
        vectors_of_transformers(folder, SENTENCES, 64, "pooler_output"),
        atol=5e-6,
    )


def test_names_with_a_base_prefix_are_understood(hub_cache: Path) -> None:
    name = KNOWN_ENCODERS["simcse-bert-base"].hub_name
    folder = write_checkpoint(hub_cache, name, "bert", rename=lambda tensor: f"bert.{tensor}")

    encoded = load_encoder("simcse-bert-base", CPU).encoder.encode(SENTENCES)

    np.testing.assert_allclose(
        encoded.vectors, vectors_of_transformers(folder, SENTENCES, 64, "pooler_output"), atol=5e-6
    )


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(
    "left_out", ["pooler.dense.weight", "pooler.dense.bias", "encoder.layer.1.output.dense.weight"]
)
def test_checkpoint_without_a_needed_weight_is_refused(hub_cache: Path, left_out: str, weights: str) -> None:
    write_checkpoint(
        hub_cache,
        KNOWN_ENCODERS["simcse-roberta-large"].hub_name,
        "roberta",
        weights=weights,
        rename=lambda name: None if name == left_out else name,
    )

    error = refusal("simcse-roberta-large")

    assert error.code == "encoder_checkpoint_incomplete"
    assert left_out in error.message


def test_unsupervised_does_not_need_a_pooler(hub_cache: Path) -> None:
    name = KNOWN_ENCODERS["unsup-simcse-bert-base"].hub_name
    write_checkpoint(hub_cache, name, "bert", rename=lambda tensor: None if "pooler" in tensor else tensor)

    assert load_encoder("unsup-simcse-bert-base", CPU).encoder.encode(["the cat"]).vectors.shape == (1, 32)


@pytest.mark.parametrize("mistake", ["mean", "no_dense", "random_dense", "no_tanh"])
def test_wrong_structure_is_refused(hub_cache: Path, mistake: str) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

    known = KNOWN_ENCODERS["simcse-roberta-large"]
    write_checkpoint(hub_cache, known.hub_name, "roberta", weights="model.safetensors")
    good = list(build_known(known, locate_known(known), "cpu"))
    tensors = random_model("roberta").state_dict()
    modules = {
        "mean": [good[0], Pooling(32, "mean"), good[2], good[3]],
        "no_dense": [good[0], good[1], good[3]],
        "random_dense": [good[0], good[1], Dense(32, 32), good[3]],
        "no_tanh": [
            good[0],
            good[1],
            Dense(
                32,
                32,
                activation_function=torch.nn.Identity(),
                init_weight=tensors["pooler.dense.weight"],
                init_bias=tensors["pooler.dense.bias"],
            ),
            Normalize(),
        ],
    }[mistake]

    check_structure(SentenceTransformer(modules=good, device="cpu"), known, tensors)
    with pytest.raises(EncoderError) as caught:
        check_structure(SentenceTransformer(modules=modules, device="cpu"), known, tensors)

    assert caught.value.code == "encoder_structure_mismatch"


def test_weights_changed_after_loading_are_noticed(hub_cache: Path) -> None:
    known = KNOWN_ENCODERS["simcse-roberta-large"]
    write_checkpoint(hub_cache, known.hub_name, "roberta")
    model = build_known(known, locate_known(known), "cpu")
    other = {name: tensor.clone() for name, tensor in random_model("roberta").state_dict().items()}
    other["pooler.dense.weight"][0, 0] += 1e-6

    with pytest.raises(EncoderError, match=r"pooler\.dense\.weight"):
        check_structure(model, known, other)


class Touch:
    """Unpickled without care, this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_does_not_run(hub_cache: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(hub_cache, KNOWN_ENCODERS["simcse-bert-base"].hub_name, "bert")
    torch.save({"pooler.dense.weight": Touch(tmp_path / "touched")}, folder / "pytorch_model.bin")

    assert refusal("simcse-bert-base").code == "encoder_load_failed"
    assert not (tmp_path / "touched").exists()
    # The trap is real: plain unpickling springs it.
    pickle.loads(pickle.dumps(Touch(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()


def test_absent_weights_without_a_network_say_what_to_do(hub_cache: Path) -> None:
    error = refusal("simcse-roberta-large")

    assert error.code == "encoder_unavailable"
    assert "princeton-nlp/sup-simcse-roberta-large" in error.message
    assert "HF_HUB_OFFLINE" in error.message
    assert error.__cause__ is not None


def test_fingerprint_follows_the_weights_and_the_pooling(hub_cache: Path) -> None:
    model = random_model("roberta")
    write_checkpoint(hub_cache, KNOWN_ENCODERS["simcse-roberta-large"].hub_name, "roberta", model=model)
    write_checkpoint(hub_cache, KNOWN_ENCODERS["unsup-simcse-roberta-large"].hub_name, "roberta", model=model)
    with torch.no_grad():
        model.pooler.dense.bias[0] += 1e-3
    write_checkpoint(hub_cache, KNOWN_ENCODERS["simcse-roberta-base"].hub_name, "roberta", model=model)

    infos = [
        load_encoder(name, CPU).info
        for name in ("simcse-roberta-large", "unsup-simcse-roberta-large", "simcse-roberta-base")
    ]

    assert infos[0].weights_sha256 == infos[1].weights_sha256 != infos[2].weights_sha256
    assert len({info.fingerprint for info in infos}) == 3
