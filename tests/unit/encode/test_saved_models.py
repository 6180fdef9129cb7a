"""Any sentence-transformers model, by folder or hub name: what is loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from probe_service.encode import load as load_module
from probe_service.encode import load_encoder
from probe_service.errors import EncoderError
from probe_service.known_encoders import check_encoder_allowed
from probe_service.settings import Settings
from tests.unit.encode.checkpoints import COMMIT, SENTENCES, write_checkpoint

CPU = Settings(device="cpu")


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(load_module, "_checked", {})
    return tmp_path / "hub"


def save_model(folder: Path, *, prompt: str | None = None) -> Path:
    """Save a tiny RoBERTa with max pooling and no Normalize, as sentence-transformers would."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    base = write_checkpoint(folder.parent / "base", "some/base", "roberta", weights="model.safetensors")
    model = SentenceTransformer(
        modules=[Transformer(str(base)), Pooling(32, "max")],
        device="cpu",
        prompts={"query": prompt} if prompt else None,
        default_prompt_name="query" if prompt else None,
    )
    model.save(str(folder), create_model_card=False)
    return folder


def max_pooled_by_hand(folder: Path, texts: list[str]) -> np.ndarray:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        tokens.pop("token_type_ids", None)
        with torch.no_grad():
            row = model(**tokens).last_hidden_state[0].max(dim=0).values.double().numpy()
        rows.append(row / np.sqrt((row**2).sum()))
    return np.array(rows)


def refusal(name: str) -> EncoderError:
    with pytest.raises(EncoderError) as caught:
        load_encoder(name, CPU)
    return caught.value


def test_local_folder_with_its_own_pooling_is_normalised(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")

    loaded = load_encoder(str(folder), CPU)

    # "cat " * 90 is longer than the 64 positions of the model; without a cap torch would fail on it.
    np.testing.assert_allclose(
        loaded.encoder.encode(SENTENCES).vectors, max_pooled_by_hand(folder, SENTENCES), atol=5e-6
    )
    info = loaded.info
    assert (info.pooling, info.dimension, info.max_length, info.revision) == ("max", 32, 64, None)
    assert info.location == str(folder)
    assert not info.revision_pinned


def test_default_prompt_is_used_and_reported(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", prompt="dogs run ")

    loaded = load_encoder(str(folder), CPU)

    assert loaded.info.prompt == "dogs run "
    with_prompt = max_pooled_by_hand(folder, [f"dogs run {text}" for text in SENTENCES])
    np.testing.assert_allclose(loaded.encoder.encode(SENTENCES).vectors, with_prompt, atol=5e-6)


def test_hub_name_from_the_cache_reports_the_commit(tmp_path: Path, hub_cache: Path) -> None:
    repository = hub_cache / "models--some-team--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.move(save_model(tmp_path / "model"), repository / "snapshots" / COMMIT)

    info = load_encoder("some-team/some-model", CPU).info

    assert (info.location, info.revision, info.revision_pinned) == ("some-team/some-model", COMMIT, False)


def test_model_without_a_transformer(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "cat": 1, "dog": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 2.0]], dtype=np.float32)
    module = StaticEmbedding(tokenizer, embedding_weights=table)
    SentenceTransformer(modules=[module], device="cpu").save(
        str(tmp_path / "static"), create_model_card=False
    )

    loaded = load_encoder(str(tmp_path / "static"), CPU)
    encoded = loaded.encoder.encode(["dog", "cat", "cat dog", "zebra"])

    # Mean of (3, 4) and (0, 2) is (1.5, 3); the unknown word has the zero vector, which stays as it is.
    root_five = np.sqrt(5.0)
    expected = [[0.0, 1.0], [0.6, 0.8], [1.0 / root_five, 2.0 / root_five], [0.0, 0.0]]
    np.testing.assert_allclose(encoded.vectors, expected, atol=1e-6)
    assert loaded.info.max_length is None
    assert not encoded.was_truncated.any()
    assert len({bytes(row) for row in encoded.input_digests}) == 4


def test_half_precision_weights_run_in_float32(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "model")
    halves = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}))

    loaded = load_encoder(str(folder), CPU)

    assert {parameter.dtype for parameter in loaded.encoder.model.parameters()} == {torch.float32}
    assert loaded.info.dtype == "float32"


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save_model(tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    assert load_encoder(str(folder), CPU).info.dimension == 32  # the safetensors file beside it is used

    (folder / "model.safetensors").unlink()
    load_module._checked.clear()

    assert refusal(str(folder)).code == "encoder_weights_pickled"


def test_pickled_weights_in_the_hub_cache_are_refused(hub_cache: Path) -> None:
    folder = write_checkpoint(hub_cache, "some/model", "bert", weights="pytorch_model.bin")
    (folder / "modules.json").write_text("[]")

    assert refusal("some/model").code == "encoder_weights_pickled"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_repository_is_refused(tmp_path: Path, file: str) -> None:
    folder = save_model(tmp_path / "model")
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.OwnModel"}}))

    assert refusal(str(folder)).code == "encoder_remote_code"


def test_module_of_the_repository_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "custom_pooling.OwnPooling"
    (folder / "modules.json").write_text(json.dumps(modules))

    error = refusal(str(folder))

    assert error.code == "encoder_remote_code"
    assert "custom_pooling.OwnPooling" in error.message


def test_checkpoint_that_does_not_say_how_to_pool_is_refused(hub_cache: Path) -> None:
    write_checkpoint(hub_cache, "some/plain-bert", "bert", weights="model.safetensors")

    assert refusal("some/plain-bert").code == "encoder_pooling_unknown"


def test_damaged_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)

    assert refusal(str(folder)).code == "encoder_load_failed"


def test_no_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()

    assert refusal(str(folder)).code == "encoder_checkpoint_incomplete"


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    error = refusal(str(folder))

    assert error.code == "encoder_checkpoint_incomplete"
    assert "encoder.layer.1.output.dense.weight" in error.message


@pytest.mark.parametrize("name", ["no-such-encoder", "./no/such/folder", "a/b/c", ""])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    error = refusal(name)

    assert error.code == "encoder_unknown"
    assert "minilm" in error.message


def test_hub_name_that_is_not_cached(tmp_path: Path) -> None:
    assert refusal("nobody/nothing").code == "encoder_unavailable"


def test_wrong_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> None:
    from probe_service.encode import weights
    from probe_service.known_encoders import KNOWN_ENCODERS

    monkeypatch.setattr(weights, "_MINILM_PACKAGE", "a-package-that-is-not-installed")
    minilm = KNOWN_ENCODERS["minilm"]
    folder = write_checkpoint(hub_cache, minilm.hub_name, "bert", weights="model.safetensors")
    folder.rename(folder.with_name(str(minilm.revision)))

    assert refusal("minilm").code == "encoder_checksum_mismatch"


def test_device_that_is_not_there() -> None:
    with pytest.raises(EncoderError) as caught:
        load_encoder("minilm", Settings(device="cuda:99"))

    assert caught.value.code == "encoder_device_unavailable"


@pytest.mark.parametrize(
    ("name", "settings", "allowed"),
    [
        ("minilm", Settings(), True),
        ("sentence-transformers/all-MiniLM-L6-v2", Settings(), True),
        ("some/model", Settings(), False),
        ("/etc", Settings(), False),
        ("openai:m@http://host/v1", Settings(), False),
        ("some/model", Settings(allowed_encoders=("some/model",)), True),
        ("minilm", Settings(allowed_encoders=("some/model",)), False),
        (
            "princeton-nlp/sup-simcse-bert-base-uncased",
            Settings(allowed_encoders=("simcse-bert-base",)),
            True,
        ),
        ("/models/own", Settings(encoder="/models/own"), True),
    ],
)
def test_what_a_server_may_be_asked_for(name: str, settings: Settings, allowed: bool) -> None:
    if allowed:
        check_encoder_allowed(name, settings)
        return
    with pytest.raises(EncoderError) as caught:
        check_encoder_allowed(name, settings)
    assert caught.value.code == "encoder_not_allowed"
