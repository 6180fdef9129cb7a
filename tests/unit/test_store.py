"""Stored corpora: whole or not at all, equal bytes once, limits and a full disk refused."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest

from probe_service.errors import RequestError, ServiceError
from probe_service.store import HEAD_BYTES, CorpusStore


@pytest.fixture
def store(tmp_path):
    return CorpusStore(tmp_path, limit_bytes=200_000)


def put(store, content: bytes, name: str = "c.txt"):
    with store.writer() as writer:
        for start in range(0, len(content), 1000):
            writer.write(content[start : start + 1000])
        return writer.commit(name, "txt")


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_corpus_is_kept_under_the_sha256_of_its_bytes(store, tmp_path):
    content = b"first line\nsecond line\n" * 999
    stored = put(store, content)
    assert stored.id == hashlib.sha256(content).hexdigest()
    assert stored.size_bytes == len(content) == 22_977
    assert store.content_path(stored.id).read_bytes() == content
    assert store.get(stored.id) == stored
    assert files_below(tmp_path / "corpora") == [f"{stored.id}/content", f"{stored.id}/meta.json"]


def test_equal_bytes_are_stored_once_and_keep_their_first_name(store, tmp_path):
    first, second = put(store, b"same", "one.txt"), put(store, b"same", "two.txt")
    assert first.id == second.id
    assert [corpus.name for corpus in store.list()] == ["one.txt"]
    assert len(list((tmp_path / "corpora").iterdir())) == 1


def test_an_upload_without_commit_leaves_nothing(store, tmp_path):
    with store.writer() as writer:
        writer.write(b"half a cor")
        assert len(list((tmp_path / "corpora").iterdir())) == 1
    assert list((tmp_path / "corpora").iterdir()) == []
    assert store.list() == []


def test_one_byte_above_the_limit_is_refused_and_leaves_nothing(store, tmp_path):
    assert put(store, b"x" * 200_000).size_bytes == 200_000
    with pytest.raises(ServiceError, match="200,000 bytes") as refused:
        put(store, b"y" * 200_001)
    assert refused.value.code == "payload_too_large"
    assert len(list((tmp_path / "corpora").iterdir())) == 1


def test_the_head_is_the_first_64_kib_however_the_bytes_arrive(store):
    content = os.urandom(150_000)
    with store.writer() as writer:
        for start in range(0, len(content), 7_777):
            writer.write(content[start : start + 7_777])
        assert writer.head == content[:65_536]
        assert len(writer.head) == HEAD_BYTES


def test_a_full_disk_is_storage_failed_with_its_cause(store, tmp_path):
    class FullDisk:
        def write(self, chunk):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    with store.writer() as writer:
        writer._file.close()
        writer._file = FullDisk()
        with pytest.raises(ServiceError, match="No space left on device") as failed:
            writer.write(b"x")
    assert failed.value.code == "storage_failed"
    assert isinstance(failed.value.__cause__, OSError)
    assert list((tmp_path / "corpora").iterdir()) == []


@pytest.mark.parametrize("corpus_id", ["", "..", "../jobs", "0" * 63, "0" * 64, "A" * 64, "0" * 63 + "/"])
def test_unknown_and_malformed_ids_are_not_found(store, corpus_id):
    for ask in (store.get, store.content_path, store.delete):
        with pytest.raises(RequestError) as missing:
            ask(corpus_id)
        assert missing.value.code == "corpus_not_found"


def test_deleted_corpora_are_gone_and_the_others_stay(store, tmp_path):
    one, two = put(store, b"one"), put(store, b"two")
    store.delete(one.id)
    assert [corpus.id for corpus in store.list()] == [two.id]
    assert len(list((tmp_path / "corpora").iterdir())) == 1
    with pytest.raises(RequestError):
        store.delete(one.id)


def test_only_a_corpus_uploaded_for_its_own_sake_is_kept(store):
    corpus = put(store, b"kept or not")
    assert not store.is_kept(corpus.id)
    store.keep(corpus.id)
    assert store.is_kept(corpus.id)


def test_only_uploads_abandoned_for_a_day_are_swept(store, tmp_path):
    put(store, b"whole")
    old, young = tmp_path / "corpora" / ".incoming-old", tmp_path / "corpora" / ".incoming-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "content").write_bytes(b"half")
    os.utime(old, (0, 0))
    assert store.remove_abandoned_uploads() == 1
    assert young.is_dir()
    assert not old.exists()
    assert len(store.list()) == 1


@pytest.mark.parametrize("job_id", ["..", "../../etc", "x", ""])
def test_a_job_folder_needs_a_uuid(store, job_id):
    with pytest.raises(ValueError, match="badly formed"):
        store.job_folder(job_id)
