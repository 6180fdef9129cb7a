"""Read a generated jsonl corpus of 100 MB and one of 1 GB: seconds, MB/s, and peak memory, which must be flat.

    python benchmarks/read_large_jsonl.py [--megabytes 100 1000] [--sample-size 20480] [--folder FOLDER]

Each reading runs in a process of its own, so that its peak of resident memory is its own. As a peer, a process that
only parses the lines with the standard library and keeps nothing reads the smallest file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from probe_service.corpus import read_corpus
from probe_service.schemas import CorpusOptions


@dataclass(frozen=True)
class Reading:
    """One reading of a file, in a fresh process."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    rows: int


def generate(path: Path, megabytes: int) -> None:
    """Write help-desk-like rows of 120 to 260 bytes, one in twenty a repeat, until the file is large enough."""
    rng = np.random.default_rng(0)
    words = np.array(
        [
            f"{a}{b}"
            for a in ("re", "un", "pass", "log", "net", "mail", "dis")
            for b in ("set", "word", "in", "work", "able")
        ]
    )
    written_bytes = 0
    earlier = "How do I reset my password?"
    with path.open("w", encoding="utf-8") as file:
        while written_bytes < megabytes * 1_000_000:
            lines = []
            lengths = rng.integers(8, 30, size=5000)
            picks = iter(words[rng.integers(len(words), size=int(lengths.sum()))].tolist())
            repeats = rng.random(5000) < 0.05
            for length, repeated in zip(lengths.tolist(), repeats.tolist(), strict=True):
                text = " ".join(next(picks) for _ in range(length)).capitalize() + "?"
                text, earlier = (earlier, earlier) if repeated else (text, text)
                lines.append(
                    json.dumps({"text": text, "group": f"g{hash(text) % 10_000}", "source": "helpdesk"})
                )
            written_bytes += file.write("\n".join(lines) + "\n")


def read(path: Path, sample_size: int) -> int:
    corpus = read_corpus(path, CorpusOptions(), sample_size=sample_size, rng=np.random.default_rng(0))
    assert len(corpus) == min(sample_size, corpus.info.rows_usable)
    return corpus.info.rows_usable


def only_parse(path: Path, _: int) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if json.loads(line))


def measure(job: str, path: Path, sample_size: int) -> Reading:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (job, path, sample_size))


def _measured(job: str, path: Path, sample_size: int) -> Reading:
    start, cpu_start = time.perf_counter(), time.process_time()
    rows = {"read": read, "only_parse": only_parse}[job](path, sample_size)
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    return Reading(seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--sample-size", type=int, default=20_480)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    peaks = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for place, megabytes in enumerate(arguments.megabytes):
            path = Path(folder) / "large.jsonl"
            generate(path, megabytes)
            size = path.stat().st_size / 1e6
            reading = measure("read", path, arguments.sample_size)
            peaks.append(reading.peak_bytes)
            print(
                f"read_corpus   {size:7.0f} MB  {reading.rows:9,} rows  {reading.seconds:6.1f} s"
                f"  {size / reading.seconds:6.1f} MB/s"
                f"  ({reading.cpu_seconds:.1f} s of CPU, {size / reading.cpu_seconds:.1f} MB/s)"
                f"  peak {reading.peak_bytes / 2**20:6.0f} MiB"
            )
            if place == 0:
                peer = measure("only_parse", path, 0)
                print(
                    f"json.loads    {size:7.0f} MB  {peer.rows:9,} rows  {peer.seconds:6.1f} s"
                    f"  {size / peer.seconds:6.1f} MB/s  ratio of CPU seconds {reading.cpu_seconds / peer.cpu_seconds:.2f}"
                )
    print(f"peak of the largest over the smallest: {peaks[-1] / peaks[0]:.2f}")


if __name__ == "__main__":
    main()
