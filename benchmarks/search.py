"""Search for similar pairs against faiss.knn and a flat torch matrix, in turn: speed, histograms, the sweep, and memory.

    python benchmarks/search.py --pairs 5 [--dimensions 384 1024] [--parts search histogram sweep memory]

Rows are unit vectors around random centres, so that similar pairs cluster as texts of equal meaning do. All ways run in one
process, one after the other, in every round; ratios are medians over rounds of the peer's time over ours in the same round, by
the clock and, which other work on the machine sways less, in processor time. The share of the peak is that of the products
needed, in the processor time of large ones in int8.

- search: the 4 most similar pairs of N rows. For N ≤ 256 it is 100 batches. faiss.knn looks for the 5 nearest of every row
  (one may be the row itself), whose best pairs are then merged; flat torch has the whole matrix, masks it and takes a top-k.
- histogram: counting the similarities of rows to all rows by bins of .001, over the products alone of the same tiles.
- sweep: the 4 most similar pairs of 1,000 random batches at each of ten N, from one list of the corpus's most similar pairs
  (small batches, and those for which the list is too short, each by themselves), against 100 batches at each N as in
  naive_probe.py and by the flat search above, of which a few are measured. The list's own making counts.
- memory: the most that the search adds to what its process holds, in a process of its own (Linux).

Threads are torch's: set OMP_NUM_THREADS. Prints tables in Markdown, and JSON with ``--json FILE``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import torch
from naive_probe import naive_probe

from probe_service.estimate.evidence import BatchPairs
from probe_service.similarity import (
    batch_top_k,
    measure_subsets,
    most_similar_pairs,
    row_histograms,
    top_pairs,
)

TOP_K = 4
BATCHES = 100
SMALL = (64, 128, 256)
LARGE = (512, 1024, 2048, 4096, 8192, 16_384)
SWEEP = tuple(2**e for e in range(3, 13))
SWEEP_ROWS, SWEEP_BATCHES, LISTED, SMALLEST_LISTED = 20_000, 1_000, 100_000, 128


def clustered_rows(rows: int, dimension: int, rng: np.random.Generator) -> np.ndarray:
    centres = rng.standard_normal((max(rows // 10, 1), dimension), dtype=np.float32)
    vectors = rng.standard_normal((rows, dimension), dtype=np.float32)
    vectors += np.float32(0.9) * centres[rng.integers(0, len(centres), rows)]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def flat(rows: np.ndarray) -> np.ndarray:
    """The whole matrix, the pairs i < j of it, a flat top-k."""
    vectors = torch.from_numpy(rows)
    similarities = vectors @ vectors.T
    similarities.masked_fill_(torch.ones_like(similarities, dtype=torch.bool).tril_(), -torch.inf)
    return similarities.view(-1).topk(TOP_K).values.numpy()


def nearest(rows: np.ndarray) -> np.ndarray:
    """The nearest of every row, and the best of those pairs."""
    similarities, columns = faiss.knn(rows, rows, TOP_K + 1, metric=faiss.METRIC_INNER_PRODUCT)
    # Equal rows may push a row itself out of its own list; pairs i < j are among one of the two rows' lists.
    row = np.repeat(np.arange(len(rows)), TOP_K + 1).reshape(columns.shape)
    lower, upper = np.minimum(row, columns), np.maximum(row, columns)
    proper = lower != upper
    _, first = np.unique(lower[proper] * len(rows) + upper[proper], return_index=True)
    return np.sort(similarities[proper][first])[::-1][:TOP_K]


class Seconds(NamedTuple):
    """What a piece of work took."""

    wall: float
    processor: float


def seconds(work: Callable[[], Any]) -> tuple[Seconds, Any]:
    began, begun = time.perf_counter(), time.process_time()
    result = work()
    return Seconds(time.perf_counter() - began, time.process_time() - begun), result


def peak(kind: torch.dtype, dimension: int) -> float:
    """Operations a second of a large product, the best of a few."""
    left, right = (torch.ones((2048, dimension), dtype=kind) for _ in range(2))
    multiply = torch._int_mm if kind == torch.int8 else torch.mm
    best = min(seconds(lambda: multiply(left, right.T))[0].processor for _ in range(6))
    return 2 * 2048 * 2048 * dimension / best


def in_rounds(pairs: int, ways: dict[str, Callable[[], Any]]) -> dict[str, list[Seconds]]:
    """Seconds of each way in every round; the order moves on by one each time."""
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(pairs):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(seconds(ways[name])[0])
    return found


def ratios(rounds: dict[str, list[Seconds]], peer: str) -> dict[str, float]:
    """Medians of the peer's seconds over ours."""
    pairs = list(zip(rounds[peer], rounds["ours"], strict=True))
    return {
        f"over_{peer}{name}": statistics.median(base[at] / ours[at] for base, ours in pairs)
        for at, name in enumerate(("", "_in_processor_time"))
    }


def search(size: int, dimension: int, pairs: int) -> dict[str, Any]:
    rng = np.random.default_rng(size)
    if size in SMALL:
        rows = clustered_rows(size * BATCHES, dimension, rng).reshape(BATCHES, size, dimension)
        stack = torch.from_numpy(rows)
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: batch_top_k(stack, None, k=TOP_K),
            "flat": lambda: np.stack([flat(batch) for batch in rows]),
            "faiss": lambda: np.stack([nearest(batch) for batch in rows]),
        }
    else:
        rows = clustered_rows(size, dimension, rng)
        ways = {
            "ours": lambda: top_pairs(rows, k=TOP_K).similarity,
            "flat": lambda: flat(rows),
            "faiss": lambda: nearest(rows),
        }
    values = {name: way() for name, way in ways.items()}
    for name in ("flat", "faiss"):
        np.testing.assert_allclose(values["ours"], values[name], atol=1e-5)
    rounds = in_rounds(pairs, ways)
    half = dimension * size * (size - 1) * (BATCHES if size in SMALL else 1)
    return {
        "size": size,
        "batches": BATCHES if size in SMALL else 1,
        "dimension": dimension,
        "milliseconds": 1e3 * statistics.median(each.wall for each in rounds["ours"]),
        **ratios(rounds, "flat"),
        **ratios(rounds, "faiss"),
        "share_of_half_peak_int8": half
        / statistics.median(each.processor for each in rounds["ours"])
        / peak(torch.int8, dimension),
    }


def histogram(size: int, dimension: int, pairs: int) -> dict[str, Any]:
    rows = clustered_rows(size, dimension, np.random.default_rng(size))
    none = np.empty(0, dtype=np.int64)
    vectors, columns, anchors = torch.from_numpy(rows), 2_048, 2_048

    def counted() -> None:
        for _ in row_histograms(
            rows,
            None,
            block=slice(0, anchors),
            thresholds=(0.7, 0.8, 0.9, 0.95),
            known=lambda _block: BatchPairs(none, none, none),
            unjudged=None,
            worst_case_similarity=None,
        ):
            pass

    def products() -> None:
        tile = torch.empty((256, columns))
        for first in range(0, anchors, len(tile)):
            for start in range(0, size, columns):
                torch.mm(vectors[first : first + len(tile)], vectors[start : start + columns].T, out=tile)

    counted()
    rounds = in_rounds(pairs, {"ours": counted, "products": products})
    return {
        "size": size,
        "dimension": dimension,
        "nanoseconds_a_pair": 1e9
        * statistics.median(each.processor for each in rounds["ours"])
        / anchors
        / size,
        "over_products": 1 / ratios(rounds, "products")["over_products_in_processor_time"] - 1,
    }


def sweep(dimension: int, pairs: int, direct: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = clustered_rows(SWEEP_ROWS, dimension, rng)
    vectors = torch.from_numpy(rows)
    batches = {
        size: np.stack([rng.choice(SWEEP_ROWS, size, replace=False) for _ in range(SWEEP_BATCHES)])
        for size in SWEEP
    }

    def directly(of: np.ndarray) -> np.ndarray:
        return batch_top_k(vectors[torch.from_numpy(of)], None, k=TOP_K)

    rounds: list[dict[str, Any]] = []
    for _ in range(pairs):
        building, listed = seconds(lambda: most_similar_pairs(rows, count=LISTED, checkpoint=lambda: None))
        sizes = []
        for size, of in batches.items():

            def ours(of: np.ndarray = of, size: int = size, listed: Any = listed) -> np.ndarray:
                if size < SMALLEST_LISTED:
                    return directly(of)
                found = measure_subsets(listed, of, k=TOP_K, checkpoint=lambda: None)
                if found.too_short.any():
                    found.top_k[found.too_short] = directly(of[found.too_short])
                return found.top_k

            own, values = seconds(ours)
            some = of[: max(direct, min(BATCHES, direct * 256 // size))]
            naive = seconds(lambda size=size: naive_probe(vectors, None, [size], repeats=direct))[0]
            peer, truth = seconds(lambda some=some: np.stack([flat(rows[batch]) for batch in some]))
            np.testing.assert_allclose(values[: len(some)], truth, atol=1e-5)
            alone = seconds(lambda some=some: directly(some))[0]
            sizes.append(
                {
                    "size": size,
                    "ours": own.processor,
                    "flat": peer.processor * BATCHES / len(some),
                    "naive": naive.processor * BATCHES / direct,
                    "each_by_itself": alone.processor * SWEEP_BATCHES / len(some),
                }
            )
        rounds.append({"building": building.processor, "sizes": sizes})
    own = [each["building"] + sum(size["ours"] for size in each["sizes"]) for each in rounds]
    peers = {
        name: [sum(size[name] for size in each["sizes"]) for each in rounds] for name in ("flat", "naive")
    }
    return {
        "dimension": dimension,
        "building_seconds": statistics.median(each["building"] for each in rounds),
        "ours_seconds": statistics.median(own),
        **{f"{name}_seconds": statistics.median(peer) for name, peer in peers.items()},
        **{
            f"over_{name}": statistics.median(base / ours for base, ours in zip(peer, own, strict=True))
            for name, peer in peers.items()
        },
        "sizes": [
            {
                "size": size,
                **{
                    name: statistics.median(each["sizes"][at][name] for each in rounds)
                    for name in ("ours", "each_by_itself", "flat", "naive")
                },
            }
            for at, size in enumerate(SWEEP)
        ],
    }


def peak_of_search(file: str, line: Any) -> None:
    """In a process of its own: MiB that a search adds to what is held before."""

    def held(name: str) -> float:
        (line,) = [
            each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name)
        ]
        return int(line.split()[1]) / 1024

    rows = np.load(file)
    top_pairs(rows[:512].copy(), k=TOP_K)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = held("VmRSS")
    top_pairs(rows, k=TOP_K)
    line.send(held("VmHWM") - before)


def memory(size: int, dimension: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rows.npy")
        np.save(file, clustered_rows(size, dimension, np.random.default_rng(0)))
        processes = multiprocessing.get_context("spawn")
        line, far_end = processes.Pipe()
        child = processes.Process(target=peak_of_search, args=(file, far_end))
        child.start()
        extra = line.recv()
        child.join()
    return {"size": size, "dimension": dimension, "extra_mebibytes": extra}


def table(head: str, rows: list[str]) -> None:
    print(f"\n| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row in rows:
        print(f"| {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SMALL, *LARGE])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[384, 1024])
    parser.add_argument("--parts", nargs="+", default=["search", "histogram", "sweep", "memory"])
    parser.add_argument("--direct", type=int, default=3, help="flat batches at the largest N of the sweep")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    faiss.omp_set_num_threads(torch.get_num_threads())
    found: dict[str, Any] = {
        "about": {"threads": torch.get_num_threads(), "pairs": given.pairs, "torch": torch.__version__}
    }
    if "search" in given.parts:
        found["search"] = [search(n, d, given.pairs) for d in given.dimensions for n in given.sizes]
        table(
            "top-4 of N | batches | d | ms | × faiss.knn by the clock, processor | × flat torch | share of half the int8 peak",
            [
                f"{row['size']} | {row['batches']} | {row['dimension']} | {row['milliseconds']:.1f}"
                f" | {row['over_faiss']:.1f}, {row['over_faiss_in_processor_time']:.1f}"
                f" | {row['over_flat']:.1f}, {row['over_flat_in_processor_time']:.1f}"
                f" | {row['share_of_half_peak_int8']:.0%}"
                for row in found["search"]
            ],
        )
    if "histogram" in given.parts:
        found["histogram"] = [histogram(16_384, d, given.pairs) for d in given.dimensions]
        table(
            "histograms of N | d | ns a pair | over the products alone",
            [
                f"{row['size']} | {row['dimension']} | {row['nanoseconds_a_pair']:.1f} | {row['over_products']:.0%}"
                for row in found["histogram"]
            ],
        )
    if "sweep" in given.parts:
        found["sweep"] = [sweep(d, given.pairs, given.direct) for d in given.dimensions]
        for row in found["sweep"]:
            table(
                "N | 1,000 batches, s | each by itself, s | 100 flat batches, s | 100 as naive_probe.py, s",
                [
                    f"{size['size']} | {size['ours']:.3f} | {size['each_by_itself']:.2f} | {size['flat']:.2f}"
                    f" | {size['naive']:.2f}"
                    for size in row["sizes"]
                ],
            )
            print(
                f"\nd = {row['dimension']}, processor time: list {row['building_seconds']:.2f} s, all sizes with it"
                f" {row['ours_seconds']:.2f} s; flat {row['flat_seconds']:.0f} s, × {row['over_flat']:.0f}; as naive_probe.py"
                f" {row['naive_seconds']:.0f} s, × {row['over_naive']:.0f}"
            )
    if "memory" in given.parts:
        found["memory"] = [memory(16_384, d) for d in given.dimensions]
        table(
            "N | d | extra MiB",
            [f"{row['size']} | {row['dimension']} | {row['extra_mebibytes']:.0f}" for row in found["memory"]],
        )
    found["about"]["load_average"] = os.getloadavg()[0]
    print(f"\n{found['about']}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
