"""The cache of vectors: what is found is not encoded again, and a killed process loses little."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pytest

from probe_service.encode import CheckedEncoder, EncodedTexts, VectorCache, encode_with_cache
from probe_service.errors import ServiceError
from probe_service.schemas import EncoderInfo

WIDTH = 8
TEXTS_PER_CALL = 32


class HashEncoder:
    """A real encoder whose vectors follow from the text's SHA-256; it keeps the calls that were made."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        self.calls.append(list(texts))
        raw = [hashlib.sha256(text.encode()).digest() for text in texts]
        vectors = np.array([np.frombuffer(digest, dtype=np.int8)[:WIDTH] for digest in raw], dtype=np.float32)
        vectors = vectors.reshape(len(texts), WIDTH)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        digests = np.array([np.frombuffer(digest[:16], dtype=np.uint8) for digest in raw], dtype=np.uint8)
        return EncodedTexts(vectors, np.array([len(text) > 20 for text in texts]), digests.reshape(-1, 16))

    def stream(self, texts: Sequence[str]) -> Generator[tuple[np.ndarray, EncodedTexts], None, None]:
        for start in range(0, len(texts), TEXTS_PER_CALL):
            call = texts[start : start + TEXTS_PER_CALL]
            yield np.arange(start, start + len(call)), self.encode(call)

    @property
    def texts_encoded(self) -> int:
        return sum(map(len, self.calls))


def loaded_hash_encoder(device: str = "cpu") -> tuple[CheckedEncoder, HashEncoder]:
    encoder = HashEncoder()
    info = EncoderInfo(
        name="hash",
        backend="test",
        location="here",
        revision=None,
        revision_pinned=True,
        weights_sha256=None,
        pooling="none",
        normalized=True,
        max_length=None,
        dimension=WIDTH,
        dtype="float32",
        device=device,
        prompt=None,
        check="none",
        fingerprint="f" * 64,
    )
    return CheckedEncoder(info, lambda: encoder), encoder


def texts_of(count: int) -> list[str]:
    return [f"text {number} " + "long " * (number % 7) for number in range(count)]


def test_second_call_encodes_nothing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    loaded, encoder = loaded_hash_encoder()
    texts = [*texts_of(150), "text 3 long long long ", "\ud800", "a 😀 שלום \x00"][:151]

    first = encode_with_cache(loaded, texts, VectorCache(tmp_path, "f", WIDTH))
    encoded_once = encoder.texts_encoded
    second = encode_with_cache(loaded, texts, VectorCache(tmp_path, "f", WIDTH))

    assert encoded_once == 150  # one text occurs twice
    assert encoder.texts_encoded == 150
    direct = HashEncoder().encode(texts)
    for given in (first, second):
        assert given.vectors.tobytes() == direct.vectors.tobytes()
        assert given.was_truncated.tolist() == direct.was_truncated.tolist()
        assert given.input_digests.tobytes() == direct.input_digests.tobytes()


def test_only_new_rows_are_encoded(tmp_path: Path) -> None:
    loaded, encoder = loaded_hash_encoder()
    cache = VectorCache(tmp_path, "f", WIDTH)
    encode_with_cache(loaded, texts_of(100), cache)

    encode_with_cache(loaded, [*texts_of(100), "one new row"], cache)

    assert encoder.calls[-1] == ["one new row"]
    assert encoder.texts_encoded == 101


def test_cancel_between_calls_keeps_what_is_done(tmp_path: Path) -> None:
    loaded, encoder = loaded_hash_encoder()
    cache = VectorCache(tmp_path, "f", WIDTH)
    texts = texts_of(200)

    class CancelledError(Exception):
        pass

    def cancel_after_three_calls() -> None:
        if len(encoder.calls) == 3:
            raise CancelledError

    with pytest.raises(CancelledError):
        encode_with_cache(loaded, texts, cache, checkpoint=cancel_after_three_calls)

    assert encoder.texts_encoded == 96
    assert int(cache.get(texts).was_found.sum()) == 96
    encode_with_cache(loaded, texts, cache)
    assert encoder.texts_encoded == 200


def test_killed_process_loses_about_a_second(tmp_path: Path, repository: Path) -> None:
    script = f"""
import os, pathlib, signal, time
from tests.unit.encode.test_cache import WIDTH, loaded_hash_encoder, texts_of
from probe_service.encode import VectorCache, encode_with_cache
loaded, encoder = loaded_hash_encoder()
def be_slow_and_die() -> None:
    time.sleep(0.4)
    if len(encoder.calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
cache = VectorCache(pathlib.Path({str(tmp_path)!r}), "f", WIDTH)
encode_with_cache(loaded, texts_of(400), cache, checkpoint=be_slow_and_die)
"""
    died = subprocess.run([sys.executable, "-c", script], cwd=repository, check=False)
    assert died.returncode == -9

    kept = VectorCache(tmp_path, "f", WIDTH).get(texts_of(400))

    # Of five calls of 32, .4 s apart; the write after 1.2 s holds four of them, or three where all is slower.
    assert int(kept.was_found.sum()) >= 96
    expected = HashEncoder().encode(texts_of(400))
    assert np.array_equal(kept.encoded.vectors[kept.was_found], expected.vectors[kept.was_found])


def test_two_processes_write_the_same_cache(tmp_path: Path, repository: Path) -> None:
    script = f"""
import pathlib
from tests.unit.encode.test_cache import WIDTH, loaded_hash_encoder, texts_of
from probe_service.encode import VectorCache, encode_with_cache
loaded, _ = loaded_hash_encoder()
for count in range(100, 1100, 100):
    encode_with_cache(loaded, texts_of(count), VectorCache(pathlib.Path({str(tmp_path)!r}), "f", WIDTH))
"""
    both = [subprocess.Popen([sys.executable, "-c", script], cwd=repository) for _ in range(2)]

    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert VectorCache(tmp_path, "f", WIDTH).get(texts_of(1000)).found_share == 1.0


def test_no_texts(tmp_path: Path) -> None:
    loaded, encoder = loaded_hash_encoder()

    encoded = encode_with_cache(loaded, [], VectorCache(tmp_path, "f", WIDTH))

    assert encoded.vectors.shape == (0, WIDTH)
    assert encoder.calls == []


def test_zero_and_non_finite_rows_come_back_as_they_were(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path, "f", WIDTH)
    vectors = np.zeros((2, WIDTH), dtype=np.float32)
    vectors[1] = np.nan

    cache.put(["zero", "nan"], EncodedTexts(vectors, np.zeros(2, bool), np.zeros((2, 16), np.uint8)))

    found = cache.get(["nan", "zero", "absent"])
    assert found.was_found.tolist() == [True, True, False]
    assert np.isnan(found.encoded.vectors[0]).all()
    assert not found.encoded.vectors[1].any()


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.sqlite").write_bytes(b"this is not a database" * 100)

    with pytest.raises(ServiceError) as caught:
        VectorCache(tmp_path, "broken", WIDTH)

    assert caught.value.code == "storage_failed"
    assert str(tmp_path / "broken.sqlite") in caught.value.message


def test_damage_in_a_page_is_named(tmp_path: Path) -> None:
    loaded, _ = loaded_hash_encoder()
    cache = VectorCache(tmp_path, "f", WIDTH)
    encode_with_cache(loaded, texts_of(300), cache)
    with sqlite3.connect(cache.path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    content = bytearray(cache.path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    cache.path.write_bytes(content)

    with pytest.raises(ServiceError) as caught:
        cache.get(texts_of(300))

    assert caught.value.code == "storage_failed"
    assert str(cache.path) in caught.value.message


def test_another_width_is_refused(tmp_path: Path) -> None:
    VectorCache(tmp_path, "f", WIDTH)

    with pytest.raises(ServiceError, match="width 8, not 16"):
        VectorCache(tmp_path, "f", 16)


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ServiceError, match="storage_failed") as caught:
        VectorCache(tmp_path / "file", "f", WIDTH)

    assert str(tmp_path / "file") in caught.value.message
