"""The k most similar pairs of random batches: from one list of the corpus's most similar pairs, against each batch's matrix.

    python benchmarks/subsets.py [--rows 20000] [--pairs 2000000] [--batches 1000] [--direct 50]

Rows are unit vectors around random centres, so that similar pairs cluster as texts of equal meaning do. Both ways get the
same batches on one thread; the direct way (`batch_top_k`) measures the first ``--direct`` of them, and its time is scaled.
Prints for each batch size both times for all batches, their ratio, the share of batches for which the list is too short,
and the largest difference between the two ways.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from probe_service.similarity import batch_top_k, measure_subsets, most_similar_pairs, stack_size

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOP_K = 4


def clustered_rows(rows: int, dimension: int, rng: np.random.Generator) -> np.ndarray:
    centres = rng.standard_normal((rows // 10, dimension))
    vectors = 0.9 * centres[rng.integers(0, len(centres), rows)] + rng.standard_normal((rows, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def direct_top_k(vectors: np.ndarray, batches: np.ndarray) -> np.ndarray:
    step = stack_size(batches.shape[1])
    parts = [batches[first : first + step] for first in range(0, len(batches), step)]
    return np.concatenate([batch_top_k(torch.from_numpy(vectors[part]), None, k=TOP_K) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--pairs", type=int, default=2_000_000)
    parser.add_argument("--batches", type=int, default=1_000)
    parser.add_argument("--direct", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    vectors = clustered_rows(given.rows, given.dimension, rng)
    began = time.perf_counter()
    listed = most_similar_pairs(vectors, count=given.pairs, checkpoint=lambda: None)
    building = time.perf_counter() - began
    print(f"{given.rows} × {given.dimension}, {given.pairs} pairs listed in {building:.1f} s")
    print("| N | list, s | direct, s | ratio | too short | largest difference |\n|---|---|---|---|---|---|")
    total, total_direct = 0.0, 0.0
    for size in SIZES:
        batches = np.stack([rng.choice(given.rows, size, replace=False) for _ in range(given.batches)])
        began = time.perf_counter()
        found = measure_subsets(listed, batches, k=TOP_K, checkpoint=lambda: None)
        seconds = time.perf_counter() - began
        some = batches[: given.direct]
        began = time.perf_counter()
        values = direct_top_k(vectors, some)
        direct = (time.perf_counter() - began) * len(batches) / len(some)
        total, total_direct = total + seconds, total_direct + direct
        told = ~found.too_short[: len(some)]
        difference = np.abs(found.top_k[: len(some)][told] - values[told]).max(initial=0.0)
        print(
            f"| {size} | {seconds:.2f} | {direct:.2f} | {direct / seconds:.1f} | {found.too_short.mean():.3f}"
            f" | {difference:.1e} |"
        )
    print(f"All sizes: list {total:.1f} s (and {building:.1f} s to build it), direct {total_direct:.1f} s,")
    print(f"ratio {total_direct / (total + building):.1f} with building, {total_direct / total:.1f} without.")


if __name__ == "__main__":
    main()
