"""What passed its check is not loaded again to know what it is, and never taken for something else."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from probe_service.encode import CheckedEncoder, VectorCache, encode_with_cache, load_encoder
from probe_service.encode import load as load_module
from probe_service.encode.record import CheckRecord
from probe_service.encode.weights import CheckpointFiles
from probe_service.errors import EncoderError
from probe_service.known_encoders import KNOWN_ENCODERS
from probe_service.probe import probe
from probe_service.settings import Settings
from tests.unit.encode.checkpoints import SENTENCES
from tests.unit.encode.test_saved_models import save_model

TEXTS = [
    f"{verb} the {noun}" for verb in ("open", "close", "paint") for noun in ("door", "box", "gate", "lid")
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "model", prompt="the ")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", device="cpu")


def load_as_new_process(name: Path | str, settings: Settings) -> CheckedEncoder:
    """Load with nothing loaded before in this process."""
    load_module._checked.clear()
    return load_encoder(str(name), settings)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_checked", {})


def records(settings: Settings) -> dict[str, int]:
    """Inode of each record: a real load writes it anew, into another file."""
    return {path.name: path.stat().st_ino for path in (settings.home / "vectors").glob("checked-*")}


def exchange_weights(model: Path) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    name = "embeddings.word_embeddings.weight"
    save_file({**weights, name: weights[name].flip(0).contiguous()}, file, metadata={"format": "pt"})


def test_a_second_process_with_all_vectors_imports_no_encoder(tmp_path: Path, repository: Path) -> None:
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    options = {"encoder": "minilm", "batch_sizes": [2, 4], "num_repeats": 20}
    script = f"""
import pathlib, sys
from probe_service.probe import probe
from probe_service.settings import Settings
settings = Settings(home=pathlib.Path({str(tmp_path / "home")!r}), device="cpu")
report = probe(pathlib.Path({str(corpus)!r}), settings=settings, **{options!r})
assert not {{"sentence_transformers", "transformers"}} & set(sys.modules)
print(report.model_dump_json(exclude={{"run", "timings"}}))
"""

    cold = probe(corpus, settings=Settings(home=tmp_path / "home", device="cpu"), **options)
    warm = subprocess.run([sys.executable, "-c", script], cwd=repository, capture_output=True, text=True)

    assert warm.returncode == 0, warm.stderr
    assert "canary cosines" in cold.encoder.check
    assert warm.stdout.strip() == cold.model_dump_json(exclude={"run", "timings"})


def test_a_recalled_encoder_is_the_loaded_one(model: Path, settings: Settings) -> None:
    loaded = load_as_new_process(model, settings)
    kept = records(settings)

    recalled = load_as_new_process(model, settings)

    assert recalled.info == loaded.info
    assert recalled.info.prompt == "the "
    assert records(settings) == kept
    expected = loaded.encoder.encode(SENTENCES)
    found = recalled.encoder.encode(SENTENCES)
    np.testing.assert_array_equal(found.vectors, expected.vectors)
    np.testing.assert_array_equal(found.input_digests, expected.input_digests)
    assert recalled.encoder is recalled.encoder
    assert load_encoder(str(model), settings) is recalled


def test_only_what_the_cache_lacks_needs_the_encoder(model: Path, settings: Settings, tmp_path: Path) -> None:
    first = load_as_new_process(model, settings)
    cache = VectorCache(tmp_path / "vectors", first.info.fingerprint, first.info.dimension)
    encode_with_cache(first, SENTENCES[:5], cache)
    assert cache.holds([*SENTENCES[:5], SENTENCES[0]])
    assert not cache.holds(SENTENCES)

    def refuse() -> None:
        raise AssertionError("the encoder is not needed")

    unloadable = CheckedEncoder(first.info, refuse)
    expected = first.encoder.encode(SENTENCES).vectors
    np.testing.assert_array_equal(encode_with_cache(unloadable, SENTENCES[:5], cache).vectors, expected[:5])
    with pytest.raises(AssertionError, match="not needed"):
        encode_with_cache(unloadable, SENTENCES, cache)
    recalled = load_as_new_process(model, settings)
    np.testing.assert_array_equal(encode_with_cache(recalled, SENTENCES, cache).vectors, expected)


def change_prompt(model: Path) -> None:
    file = model / "config_sentence_transformers.json"
    file.write_text(file.read_text("utf-8").replace('"the "', '"dogs run "'), "utf-8")


@pytest.mark.parametrize("change", [exchange_weights, change_prompt])
def test_other_files_are_loaded(change, model: Path, settings: Settings) -> None:
    before = load_as_new_process(model, settings)
    kept = records(settings)
    change(model)

    after = load_as_new_process(model, settings)

    assert len(records(settings)) == len(kept) + 1
    assert after.info.fingerprint != before.info.fingerprint
    assert not np.allclose(after.encoder.encode(SENTENCES).vectors, before.encoder.encode(SENTENCES).vectors)


def test_other_libraries_mean_a_load(
    model: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_new_process(model, settings)
    versions = importlib.metadata.version
    for library in ("torch", "transformers", "sentence-transformers", "tokenizers"):
        kept = records(settings)
        with monkeypatch.context() as patched:
            patched.setattr(
                importlib.metadata,
                "version",
                lambda name, other=library: versions(name) + "+1" * (name == other),
            )
            load_as_new_process(model, settings)
        assert len(records(settings)) == len(kept) + 1


def test_a_record_answers_for_what_it_rests_on_alone(model: Path, settings: Settings) -> None:
    info = load_as_new_process(model, settings).info
    files = CheckpointFiles(model, "somewhere", "1" * 40, revision_pinned=True)
    asked = {
        "name": "minilm",
        "known": KNOWN_ENCODERS["minilm"],
        "files": files,
        "device": "cpu",
        "dtype": "float32",
    }
    folder = settings.home / "records"

    CheckRecord(folder, **asked).write(info)

    assert CheckRecord(folder, **asked).read() == info
    for other in (
        {"name": "another"},
        {"known": None},
        {"known": dataclasses.replace(KNOWN_ENCODERS["minilm"], max_length=128)},
        {"files": dataclasses.replace(files, location="elsewhere")},
        {"files": dataclasses.replace(files, revision="2" * 40)},
        {"files": dataclasses.replace(files, revision_pinned=False)},
        {"device": "meta"},
        {"dtype": "bfloat16"},
    ):
        assert CheckRecord(folder, **(asked | other)).read() is None


def test_a_damaged_record_counts_for_nothing(model: Path, settings: Settings) -> None:
    info = load_as_new_process(model, settings).info
    ((name, _),) = records(settings).items()
    file = settings.home / "vectors" / name
    whole = file.read_bytes()
    another_field = whole[:-1] + b',"extra":1}'
    for damaged in (b"", b"{", b"\xff\xfe\x00", b"null", b"{}", b"[" * 9999, whole[:-9], another_field):
        file.write_bytes(damaged)

        assert load_as_new_process(model, settings).info == info
        assert file.read_bytes() == whole


def test_what_must_not_be_loaded_is_refused_with_a_record_too(model: Path, settings: Settings) -> None:
    load_as_new_process(model, settings)
    torch.save({}, model / "1_Pooling" / "pytorch_model.bin")

    with pytest.raises(EncoderError) as caught:
        load_as_new_process(model, settings)

    assert caught.value.code == "encoder_weights_pickled"


def test_files_exchanged_before_the_first_use_are_noticed(model: Path, settings: Settings) -> None:
    load_as_new_process(model, settings)
    recalled = load_as_new_process(model, settings)
    exchange_weights(model)

    with pytest.raises(EncoderError, match="weights_sha256, fingerprint") as caught:
        _ = recalled.encoder

    assert caught.value.code == "encoder_changed"
    again = load_encoder(str(model), settings)
    assert again.info.weights_sha256 != recalled.info.weights_sha256
    assert np.isfinite(again.encoder.encode(SENTENCES).vectors).all()


def test_a_false_record_is_dropped_at_first_use(model: Path, settings: Settings) -> None:
    info = load_as_new_process(model, settings).info
    ((name, _),) = records(settings).items()
    file = settings.home / "vectors" / name
    file.write_text(info.model_copy(update={"pooling": "cls"}).model_dump_json(), "utf-8")

    with pytest.raises(EncoderError, match="another pooling"):
        _ = load_as_new_process(model, settings).encoder

    assert not records(settings)
    assert load_encoder(str(model), settings).info == info


def test_a_check_worded_otherwise_was_passed_all_the_same(model: Path, settings: Settings) -> None:
    info = load_as_new_process(model, settings).info
    ((name, _),) = records(settings).items()
    file = settings.home / "vectors" / name
    file.write_text(info.model_copy(update={"check": "moves cosines by 1e-4"}).model_dump_json(), "utf-8")

    recalled = load_as_new_process(model, settings)

    assert recalled.encoder.encode(SENTENCES).dimension == info.dimension
    assert recalled.info.check == "moves cosines by 1e-4"


def test_a_folder_that_cannot_be_written_means_a_load_each_time(model: Path, settings: Settings) -> None:
    settings.home.mkdir()
    (settings.home / "vectors").write_text("in the way")

    infos = [load_as_new_process(model, settings).info for _ in range(2)]

    assert infos[0] == infos[1]
    assert [path.name for path in settings.home.iterdir()] == ["vectors"]


def test_threads_that_ask_at_once_share_one_load(model: Path, settings: Settings) -> None:
    loaded = load_as_new_process(model, settings)
    loads = []
    together = threading.Barrier(4)

    def load():
        loads.append(threading.get_ident())
        time.sleep(0.05)
        if len(loads) == 1:
            raise EncoderError("encoder_out_of_memory", "the first time")
        return loaded.encoder

    checked = CheckedEncoder(loaded.info, load)

    def ask(_: int) -> object:
        together.wait()
        try:
            return checked.encoder
        except EncoderError as error:
            return error.code

    with ThreadPoolExecutor(4) as threads:
        given = list(threads.map(ask, range(4)))

    assert len(loads) == 2  # one failed, the next succeeded, and served all others
    assert given.count("encoder_out_of_memory") == 1
    assert given.count(loaded.encoder) == 3


def test_the_folder_of_a_copy_is_another(model: Path, settings: Settings, tmp_path: Path) -> None:
    load_as_new_process(model, settings)
    shutil.copytree(model, tmp_path / "copy")

    copied = load_as_new_process(tmp_path / "copy", settings)

    assert copied.info.location == str(tmp_path / "copy")
    assert len(records(settings)) == 2
