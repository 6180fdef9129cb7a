"""How often intervals cover, by simulation on a real labelled corpus.

The corpus (``--corpus``, by default Banking77 train under PROBE_TEST_DATA) is encoded once with MiniLM. Its true figures
come from many batches (``--truth-anchors`` anchors for each size). Then the estimator runs ``--replications`` times with
other seeds, (a) with every row encoded and (b) with a fresh sample of m rows, and this script prints how often the interval
holds the truth, its mean width and the bias. Nominal coverage is 0.95.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from probe_service.corpus import read_corpus
from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.estimate import (
    SUB_POOLS,
    WHOLE,
    Evidence,
    Reference,
    SamplingPlan,
    SizeMeasurements,
    curve_point,
)
from probe_service.schemas import SIMILARITY_THRESHOLDS, CorpusOptions, CurvePoint
from probe_service.settings import Settings
from probe_service.similarity import BatchMeasurements, measure_batches, stack_size

NO_REFERENCE = Reference(np.zeros(2), np.zeros(2), 0, np.full(2, np.nan), np.full(2, np.nan), {})
FIGURES = (
    "false_negative_softmax_share",
    "top_k_mean",
    "hardest_negative",
    "anchors_with_false_negative",
    "effective_negatives",
)


def measured(vectors: np.ndarray, evidence: Evidence, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Measure batches given by their rows."""
    size, found = rows.shape[1], []
    for start in range(0, len(rows), stack_size(size)):
        part = rows[start : start + stack_size(size)]
        found.append(
            measure_batches(
                torch.from_numpy(vectors[part]),
                None,
                temperature=0.05,
                k=4,
                thresholds=SIMILARITY_THRESHOLDS,
                known=lambda block, part=part: evidence.known_pairs(part, block),
                certain=None,
                unjudged=None,
                worst_case_similarity=None,
                checkpoint=lambda: None,
            )
        )
    whole = BatchMeasurements.concatenate(found)
    return {name: getattr(whole, name) for name in vars(whole)}


def estimate(vectors: np.ndarray, evidence: Evidence, plan: SamplingPlan, size: int) -> CurvePoint:
    """One run of the estimator, without its files."""
    pools = list(range(SUB_POOLS)) if plan.num_pool_batches(size) else []
    measurements = SizeMeasurements(
        whole=measured(vectors, evidence, plan.batches(size, WHOLE, 0, plan.num_batches(size))),
        pools=[
            measured(vectors, evidence, plan.batches(size, pool, 0, plan.num_pool_batches(size)))
            for pool in pools
        ],
        pool_rows=[plan.pool_rows(pool) for pool in pools],
        reference=NO_REFERENCE,
    )
    return curve_point(
        size, measurements, evidence, plan, thresholds=SIMILARITY_THRESHOLDS, ordered_pairs=False
    )


def main() -> None:
    """Print the table of coverage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(os.environ.get("PROBE_TEST_DATA", ".")) / "labels" / "banking77.jsonl.gz"
    parser.add_argument("--corpus", type=Path, default=default)
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--sample", type=int, default=1280, help="m, rows encoded in case (b)")
    parser.add_argument("--truth-anchors", type=int, default=2_000_000)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    options = CorpusOptions.model_validate(
        {"columns": {"text": "text", "group": "label"}, "where": {"split": "train"}}
    )
    corpus = read_corpus(given.corpus, options, sample_size=10**6, rng=np.random.default_rng(0))
    settings = Settings(home=Path(os.environ.get("PROBE_HOME", tempfile.mkdtemp())))
    loaded = load_encoder("minilm", settings)
    cache = VectorCache(settings.home / "vectors", loaded.info.fingerprint, loaded.info.dimension)
    assert corpus.anchors is not None
    vectors = encode_with_cache(loaded, corpus.anchors, cache).vectors
    evidence = Evidence.from_keys(None, None, corpus.groups)
    n = len(vectors)
    print(f"{given.corpus.name}: n = {n}, {given.replications} replications, m = {given.sample}")
    print("| case | N | figure | truth | coverage | mean width | bias |\n|---|---|---|---|---|---|---|")
    for size in given.sizes:
        began = time.perf_counter()
        truth_plan = SamplingPlan(n, n, given.truth_anchors // size, seed=987_654_321)
        truth = estimate(vectors, evidence, truth_plan, size)
        for case in ("whole corpus", "sample"):
            runs = []
            for seed in range(given.replications):
                if case == "whole corpus":
                    runs.append(estimate(vectors, evidence, SamplingPlan(n, n, 100, seed), size))
                    continue
                rows = np.sort(np.random.default_rng([seed, 77]).choice(n, given.sample, replace=False))
                plan = SamplingPlan(n, given.sample, 100, seed)
                runs.append(estimate(vectors[rows], evidence.subset(rows), plan, size))
            for figure in FIGURES:
                true = getattr(truth, figure).value
                found = [getattr(run, figure) for run in runs]
                slack = 1e-12  # closed forms are exact: their interval has no width
                covered = np.mean([e.low - slack <= true <= e.high + slack for e in found])
                width = np.mean([e.high - e.low for e in found])
                bias = np.mean([e.value for e in found]) - true
                print(
                    f"| {case} | {size} | {figure} | {true:.4f} | {covered:.3f} | {width:.4f} | {bias:+.4f} |"
                )
        print(f"N = {size}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
