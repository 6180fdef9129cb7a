"""The sample is uniform, depends on the seed and the rows alone, and reading stops when told to."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from probe_service.corpus import read_corpus
from probe_service.corpus.reservoir import Reservoir
from tests.unit.corpus_files import jsonl, options, read, write


def sample(size: int, count: int, rng: np.random.Generator, step: int) -> list[int]:
    reservoir: Reservoir[int] = Reservoir(size, rng)
    for start in range(0, count, step):
        for draw in reservoir.draw(min(step, count - start)):
            reservoir.keep(draw, start + draw.position)
    return reservoir.items


def test_every_row_is_equally_likely() -> None:
    rng = np.random.default_rng(2024)
    counts = np.zeros(50)
    for _ in range(4000):
        drawn = sample(7, 50, rng, 13)
        assert len(set(drawn)) == 7
        counts[drawn] += 1
    # Rows drawn without replacement are a little less variable than the test supposes: it is conservative.
    assert stats.chisquare(counts).pvalue > 0.01


def test_every_pair_of_rows_is_equally_likely() -> None:
    rng = np.random.default_rng(11)
    counts = np.zeros((6, 6))
    for _ in range(6000):
        first, second = sorted(sample(2, 6, rng, 4))
        counts[first, second] += 1
    assert stats.chisquare(counts[np.triu_indices(6, 1)]).pvalue > 0.01


def test_the_sample_does_not_depend_on_the_batches() -> None:
    samples = [sample(20, 5000, np.random.default_rng(3), step) for step in (1, 7, 100, 5000)]
    assert all(one == other for one, other in pairwise(samples))


def test_everything_is_kept_where_it_fits_and_no_randomness_is_used() -> None:
    rng = np.random.default_rng(0)
    assert sample(10, 10, rng, 3) == list(range(10))
    assert rng.random() == np.random.default_rng(0).random()


def test_long_streams_end() -> None:
    reservoir: Reservoir[int] = Reservoir(1, np.random.default_rng(5))
    for draw in reservoir.draw(10**15):
        reservoir.keep(draw, draw.position)
    assert len(reservoir.items) == 1


def thousand(tmp_path: Path) -> Path:
    return write(tmp_path, "a.jsonl", jsonl(*({"text": f"text {i}", "id": i} for i in range(1, 1001))))


def test_a_sampled_corpus_is_in_file_order_and_counts_all_rows(tmp_path: Path) -> None:
    path = thousand(tmp_path)
    corpus = read(path, sample_size=50)
    assert len(corpus) == 50
    numbers = corpus.row_numbers.tolist()
    assert numbers == sorted(set(numbers))
    assert corpus.anchors == [f"text {number}" for number in numbers]
    assert corpus.ids == [str(number) for number in numbers]
    assert (corpus.info.rows_usable, corpus.info.rows_encoded) == (1000, 50)
    assert corpus.info.sha256 == read(path).info.sha256


def test_the_seed_decides_the_sample_whatever_the_format(tmp_path: Path) -> None:
    path = thousand(tmp_path)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(1, 1001)]}), buffer, row_group_size=77)
    other = write(tmp_path, "a.parquet", buffer.getvalue())

    def drawn(path: Path, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return read_corpus(path, options(), sample_size=40, rng=rng).row_numbers.tolist()  # type: ignore[no-any-return]

    assert drawn(path, 1) == drawn(path, 1) == drawn(other, 1)
    assert drawn(path, 1) != drawn(path, 2)


def test_max_rows_limits_the_sample(tmp_path: Path) -> None:
    assert len(read(thousand(tmp_path), max_rows=30)) == 30


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.csv", "a.parquet", "a.npy"])
def test_progress_is_reported_and_may_end_the_reading(tmp_path: Path, name: str) -> None:
    buffer = io.BytesIO()
    text = "a longer text, so that the file takes several chunks"
    if name == "a.parquet":
        pq.write_table(pa.table({"text": [f"{text} {i}" for i in range(30_000)]}), buffer)
    elif name == "a.npy":
        np.save(buffer, np.ones((200_000, 4), np.float32))
    else:
        buffer.write(b"text\n" + b"".join(f'"{text} {i}"\n'.encode() for i in range(30_000)))
    path = write(tmp_path, name, buffer.getvalue())
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    read_corpus(path, options(), sample_size=5, rng=np.random.default_rng(0), on_progress=note)
    assert {total for _, total in seen} == {path.stat().st_size}
    assert len({done for done, _ in seen}) >= 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]

    class CancelledError(Exception):
        pass

    def cancel(done: int, total: int) -> None:
        raise CancelledError

    with pytest.raises(CancelledError):
        read_corpus(path, options(), sample_size=5, rng=np.random.default_rng(0), on_progress=cancel)
