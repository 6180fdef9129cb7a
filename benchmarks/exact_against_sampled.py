"""The figures of all pairs against those of sampled batches: whether they agree, and what each costs.

(a) Three labelled corpora under PROBE_TEST_DATA (at most ``--rows`` rows of each, encoded with MiniLM; every tenth row without
its group), as sentences and as pairs (a row and another of its group). For each batch size, every figure that both ways give:
the exact value, and in brackets by how many standard errors the mean of the sampled batches differs from it. Below, how many
of them lie within the sampled 95% intervals.

(b) ``--large-rows`` sentences of Tatoeba (clusters are groups): the seconds of one pass over all pairs, which gives S, the
hardest negative and the pairs above a similarity at every integer N, and of 100 sampled batches at each of three sizes, with
the standard error of S that these leave.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.estimate import Evidence
from probe_service.estimate.exact import ExactShares, ShareAccumulator, expected_maximum
from probe_service.settings import Settings
from probe_service.similarity import BIN_CENTRES, measure_batches, row_histograms, stack_size

TEMPERATURE, THRESHOLDS, FLOOR, LEVEL = 0.05, (0.5, 0.7, 0.9), 0.6, 0.95
CORPORA = {
    "banking77": ("labels/banking77", "label"),
    "hwu64": ("labels/hwu64", "label"),
    "flickr8k": ("clusters/flickr8k_captions", "cluster"),
}


@dataclass(frozen=True)
class Vectors:
    """A corpus: (n, d) unit rows, positives for pairs, and what is known."""

    anchors: np.ndarray
    positives: np.ndarray | None
    evidence: Evidence


def read_rows(folder: Path, name: str, column: str, count: int, rng: np.random.Generator) -> list[dict]:
    """Whole groups in random order where groups are small, else random rows."""
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    groups = defaultdict(list)
    for row in rows:
        groups[row[column]].append(row)
    if len(rows) / len(groups) < 20:
        names = list(groups)
        return [row for at in rng.permutation(len(names)) for row in groups[names[at]]][:count]
    return [rows[at] for at in rng.permutation(len(rows))[:count]]


def as_pairs(vectors: np.ndarray, groups: list[str], rng: np.random.Generator) -> np.ndarray:
    """Another row of the same group for each row; the row itself where it is alone."""
    members = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    chosen = [rng.choice([m for m in members[g] if m != row] or [row]) for row, g in enumerate(groups)]
    return vectors[chosen]


def exact(corpus: Vectors, sizes: list[int]) -> tuple[dict[str, list[float]], ExactShares]:
    """Every figure at every size, from one pass over all pairs."""
    n, everything = len(corpus.anchors), np.arange(len(corpus.anchors))[None, :]
    accumulator = ShareAccumulator(
        BIN_CENTRES, lowest=-1.0, rows=n, largest=max(sizes), temperature=TEMPERATURE
    )
    hardest, above = np.zeros(len(sizes)), np.zeros(len(THRESHOLDS))
    for found in row_histograms(
        corpus.anchors,
        corpus.positives,
        block=slice(0, n),
        thresholds=THRESHOLDS,
        known=lambda block: corpus.evidence.known_pairs(everything, block),
        unjudged=corpus.evidence.unjudged_rows,
        worst_case_similarity=FLOOR,
    ):
        accumulator.add(found.candidates, found.known, found.worst, found.own)
        above += found.above
        for at, size in enumerate(sizes):
            hardest[at] += expected_maximum(found.candidates, BIN_CENTRES, size) * len(found.candidates)
    shares = ExactShares.from_sums(accumulator.sums, rows=n)
    places = [size - 2 for size in sizes]
    figures = {
        "S": shares.known[places].tolist(),
        "worst case": shares.worst[places].tolist(),
        "hardest": (hardest / n).tolist(),
    }
    if shares.known_update is not None:
        figures["G"] = shares.known_update[places].tolist()
    for threshold, total in zip(THRESHOLDS, above, strict=True):
        pairs = [size * (size - 1) / (1 if corpus.positives is not None else 2) for size in sizes]
        figures[f"above {threshold}"] = [float(total / n / (n - 1) * each) for each in pairs]
    return figures, shares


def sampled(corpus: Vectors, size: int, batches: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """(batches,) of each figure; two columns for a ratio."""
    n = len(corpus.anchors)
    columns = defaultdict(list)
    unjudged = corpus.evidence.unjudged_rows
    for first in range(0, batches, stack_size(size)):
        count = min(stack_size(size), batches - first)
        rows = np.stack([rng.choice(n, size, replace=False) for _ in range(count)])
        found = measure_batches(
            torch.from_numpy(corpus.anchors[rows]),
            None if corpus.positives is None else torch.from_numpy(corpus.positives[rows]),
            temperature=TEMPERATURE,
            k=4,
            thresholds=THRESHOLDS,
            known=lambda block, rows=rows: corpus.evidence.known_pairs(rows, block),
            certain=None,
            unjudged=None if unjudged is None else torch.from_numpy(unjudged[rows]),
            worst_case_similarity=FLOOR,
            checkpoint=lambda: None,
        )
        columns["S"].append(found.false_share)
        columns["worst case"].append(found.worst_share)
        columns["hardest"].append(found.hardest_negative)
        for at, threshold in enumerate(THRESHOLDS):
            columns[f"above {threshold}"].append(found.pairs_above[:, at])
        if corpus.positives is not None:
            columns["G"].append(np.stack([found.false_update, found.update_weight], axis=1))
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over batches, or ratio of two columns, and its standard error."""
    if values.ndim == 1:
        return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
    ratio = values[:, 0].sum() / values[:, 1].sum()
    rest = values[:, 0] - ratio * values[:, 1]
    return float(ratio), float(rest.std(ddof=1) / values[:, 1].mean() / len(values) ** 0.5)


def compare(name: str, corpus: Vectors, sizes: list[int], rng: np.random.Generator) -> list[bool]:
    """Print a row for each size; return for each figure whether the exact value is within the sampled interval."""
    figures, _ = exact(corpus, sizes)
    inside = []
    for at, size in enumerate(sizes):
        batches = max(400, 100_000 // size)
        cells = []
        for figure, values in sampled(corpus, size, batches, rng).items():
            value, error = mean_and_error(values)
            away = (value - figures[figure][at]) / error if error > 0 else 0.0
            inside.append(abs(away) <= stats.t.ppf(0.5 + LEVEL / 2, batches - 1))
            cells.append(f"{figures[figure][at]:.4f} ({away:+.1f})")
        kind = "sentences" if corpus.positives is None else "pairs"
        print(f"| {name} | {kind} | {size} | {' | '.join(cells)} |{' |' * (7 - len(cells))}", flush=True)
    return inside


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("PROBE_TEST_DATA", ".")))
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 16, 64, 200], help="of (a), at most n/20")
    parser.add_argument("--large-rows", type=int, default=20_000)
    parser.add_argument("--large-sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(home=Path(os.environ.get("PROBE_HOME", tempfile.mkdtemp())))
    loaded = load_encoder("minilm", settings)
    cache = VectorCache(settings.home / "vectors", loaded.info.fingerprint, loaded.info.dimension)
    rng = np.random.default_rng(given.seed)

    names = ["S", "worst case", "hardest", *(f"pairs ≥ {threshold}" for threshold in THRESHOLDS), "G"]
    print(f"| corpus | kind | N | {' | '.join(names)} |\n{'|---' * (3 + len(names))}|")
    inside = []
    for name, (file, column) in CORPORA.items():
        rows = read_rows(given.folder, file, column, given.rows, rng)
        groups = [str(row[column]) for row in rows]
        vectors = encode_with_cache(loaded, [row["text"] for row in rows], cache).vectors
        evidence = Evidence.from_keys(None, None, [g if at % 10 else None for at, g in enumerate(groups)])
        for positives in (None, as_pairs(vectors, groups, rng)):
            inside += compare(name, Vectors(vectors, positives, evidence), given.sizes, rng)
    print(f"\n{sum(inside)} of {len(inside)} exact values lie within the sampled 95% intervals.\n")

    rows = read_rows(given.folder, "corpora/tatoeba_en", "cluster", given.large_rows, rng)
    vectors = encode_with_cache(loaded, [row["text"] for row in rows], cache).vectors
    corpus = Vectors(vectors, None, Evidence.from_keys(None, None, [str(row["cluster"]) for row in rows]))
    began = time.perf_counter()
    figures, shares = exact(corpus, given.large_sizes)
    seconds = time.perf_counter() - began
    print(f"{len(vectors)} rows of {vectors.shape[1]} numbers, {given.threads} thread(s)\n")
    print("| way | N | seconds | S | standard error of S |\n|---|---|---|---|---|")
    print(f"| all pairs | every integer to {shares.largest} | {seconds:.1f} | | 0 |")
    total = 0.0
    for at, size in enumerate(given.large_sizes):
        began = time.perf_counter()
        value, error = mean_and_error(sampled(corpus, size, 100, rng)["S"])
        took = time.perf_counter() - began
        total += took
        print(f"| all pairs | {size} | | {figures['S'][at]:.5f} | 0 |")
        print(f"| 100 batches | {size} | {took:.1f} | {value:.5f} | {error:.5f} |")
    print(
        f"\nAll pairs took {seconds / total:.1f} times as long as the {len(given.large_sizes)} × 100 batches."
    )


if __name__ == "__main__":
    main()
