"""How often the intervals for differences cover, and how much common batches narrow them, on a real labelled corpus.

Banking77 train (under PROBE_TEST_DATA) as pairs, the positive of a row being another row of its intent, encoded once with
MiniLM. Four comparisons: `edited`, A against itself with rows dropped, edited and near-duplicates added; `added`, A against
itself with the near-duplicates alone; `temperatures`, A against itself at another temperature; `unrelated`, one half of the
intents against the other. The true differences come from many batches (``--truth-anchors``). Then the estimator runs
``--replications`` times with other seeds, with every row encoded and with fresh samples of ``--sample`` rows that one
reservoir draws from either file, and this script prints how often the interval holds the truth, its mean width, and that
width over the one of independent batches (`unrelated` is measured on independent ones). Nominal coverage is 0.95.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from probe_service.corpus import read_corpus
from probe_service.corpus.reservoir import Reservoir
from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.estimate import SUB_POOLS, WHOLE, Evidence, SamplingPlan
from probe_service.estimate.comparison import Side, compare_figures
from probe_service.estimate.coupling import CommonBatches, match_rows
from probe_service.schemas import CorpusOptions, FigureComparison
from probe_service.settings import Settings
from probe_service.similarity import BatchMeasurements, measure_batches, stack_size

FIGURES = (
    "false_negative_softmax_share",
    "false_negative_gradient_share",
    "top_k_mean",
    "hardest_negative",
    "anchors_with_false_negative",
)


@dataclass(frozen=True)
class Corpus:
    """Rows as pairs, with what tells them apart and what they mean."""

    keys: list[tuple[str, str]]
    groups: list[str]
    anchors: np.ndarray
    positives: np.ndarray
    temperature: float

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def evidence(self) -> Evidence:
        """Which rows mean the same."""
        return Evidence.from_keys(None, None, self.groups)

    def take(self, rows: np.ndarray) -> Corpus:
        """Some of the rows."""
        return Corpus(
            [self.keys[row] for row in rows],
            [self.groups[row] for row in rows],
            self.anchors[rows],
            self.positives[rows],
            self.temperature,
        )


def measured(corpus: Corpus, evidence: Evidence, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Measure batches given by their rows."""
    size, found = rows.shape[1], []
    for start in range(0, len(rows), stack_size(size)):
        part = rows[start : start + stack_size(size)]
        found.append(
            measure_batches(
                torch.from_numpy(corpus.anchors[part]),
                torch.from_numpy(corpus.positives[part]),
                temperature=corpus.temperature,
                k=4,
                thresholds=(),
                known=lambda block, part=part: evidence.known_pairs(part, block),
                certain=None,
                unjudged=None,
                worst_case_similarity=None,
                checkpoint=lambda: None,
            )
        )
    whole = BatchMeasurements.concatenate(found)
    return {field.name: getattr(whole, field.name) for field in fields(whole)}


def sides(a: Corpus, b: Corpus, plans: list[SamplingPlan], size: int, *, coupled: bool) -> list[Side]:
    """Measure both corpora, together or apart."""
    corpora, evidences = (a, b), [a.evidence, b.evidence]
    matched = match_rows(a.keys, b.keys)
    whole_corpus = plans[0].whole_corpus
    rng = np.random.default_rng([plans[0].seed, 1])
    common = CommonBatches.pair_up(matched, len(a), None if whole_corpus else rng)
    larger = plans[int(common.larger_is_b)]

    def columns(pool: int, count: int) -> list[dict[str, np.ndarray]]:
        if coupled:
            drawn = common.draw(larger.batches(size, pool, 0, count), larger.pool_rows(pool), rng)
        else:
            drawn = tuple(plan.batches(size, pool, 0, count) for plan in plans)
        return [measured(c, e, rows) for c, e, rows in zip(corpora, evidences, drawn, strict=True)]

    whole, count = columns(WHOLE, larger.num_batches(size)), larger.num_pool_batches(size)
    pools = [columns(pool, count) for pool in range(SUB_POOLS)] if count else []
    pool_rows = [
        common.pools(larger.pool_rows(pool)) if coupled else [plan.pool_rows(pool) for plan in plans]
        for pool in range(SUB_POOLS if count else 0)
    ]
    return [
        Side(
            whole[at],
            None if whole_corpus else [both[at] for both in pools],
            [both[at] for both in pool_rows],
            evidences[at],
            complete=True,
            plain=True,
            exact=None,
        )
        for at in (0, 1)
    ]


def sampled(corpus: Corpus, count: int, seed: int) -> Corpus:
    """The rows that a reservoir of this seed keeps, in file order."""
    reservoir: Reservoir[int] = Reservoir(count, np.random.default_rng([seed, 0]))
    for draw in reservoir.draw(len(corpus)):
        reservoir.keep(draw, draw.position)
    return corpus.take(np.sort(np.array(reservoir.items)))


def main() -> None:
    """Print the table of coverage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--sample", type=int, default=1280, help="rows encoded of each side")
    parser.add_argument("--truth-anchors", type=int, default=2_000_000)
    parser.add_argument("--cases", nargs="+", default=["edited", "added", "temperatures", "unrelated"])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cases = comparisons()
    print(f"{given.replications} replications, samples of {given.sample} rows")
    print("| comparison | encoded | N | figure | true difference | coverage | mean width | width by apart |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.cases:
        a, b = cases[name]
        coupled = name != "unrelated"
        for size in given.sizes:
            began = time.perf_counter()
            truth = true_difference(a, b, size, given.truth_anchors)
            for encoded in ("all", "sample"):
                runs = []
                for seed in range(given.replications):
                    x, y = (a, b) if encoded == "all" else (sampled(c, given.sample, seed) for c in (a, b))
                    plans = [
                        SamplingPlan(len(whole), len(drawn), 100, seed + (0 if coupled else at * 10_000))
                        for at, (whole, drawn) in enumerate(((a, x), (b, y)))
                    ]
                    both = sides(x, y, plans, size, coupled=coupled)
                    runs.append(compare_figures(size, *both, coupled=coupled))
                for figure in FIGURES:
                    print(f"| {name} | {encoded} | {size} | {row(figure, runs, truth[figure])} |", flush=True)
            print(f"{name}, N = {size}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


def row(figure: str, runs: list[dict[str, FigureComparison]], truth: float) -> str:
    """The cells of one figure."""
    found = [run[figure].difference for run in runs]
    slack = 1e-12  # closed forms are exact: their interval has no width
    covered = np.mean([e.low - slack <= truth <= e.high + slack for e in found])
    width = np.mean([e.high - e.low for e in found])
    shares = [share for run in runs if (share := run[figure].width_share) is not None]
    gain = f"{np.mean(shares):.2f}" if shares else ""
    return f"{figure} | {truth:+.4f} | {covered:.3f} | {width:.4f} | {gain}"


def true_difference(a: Corpus, b: Corpus, size: int, anchors: int) -> dict[str, float]:
    """The differences from many common batches, whose own error is a tenth of what is looked at."""
    plans = [SamplingPlan(len(c), len(c), anchors // size, 987_654_321) for c in (a, b)]
    found = compare_figures(size, *sides(a, b, plans, size, coupled=True), coupled=True)
    return {figure: found[figure].difference.value for figure in FIGURES}


def comparisons() -> dict[str, tuple[Corpus, Corpus]]:
    """Both sides of each comparison."""
    file = Path(os.environ.get("PROBE_TEST_DATA", ".")) / "labels" / "banking77.jsonl.gz"
    options = CorpusOptions.model_validate(
        {"columns": {"text": "text", "group": "label"}, "where": {"split": "train"}}
    )
    read = read_corpus(file, options, sample_size=10**6, rng=np.random.default_rng(0))
    assert read.anchors is not None
    assert read.groups is not None
    rng = np.random.default_rng(0)
    texts, groups = read.anchors, [str(group) for group in read.groups]
    of_group = {
        group: [row for row, other in enumerate(groups) if other == group] for group in sorted(set(groups))
    }
    positives = [texts[rng.choice(of_group[group])] for group in groups]
    rows = [(text, positive, group) for text, positive, group in zip(texts, positives, groups, strict=True)]
    near = [(f"hello, {rows[row][0]}", *rows[row][1:]) for row in rng.choice(len(rows), 500, replace=False)]
    kept = np.delete(np.arange(len(rows)), rng.choice(len(rows), 300, replace=False))
    edited = [rows[row] for row in kept]
    for row in rng.choice(len(edited), 300, replace=False):
        edited[row] = (edited[row][0].rstrip("?.!") + ", please", *edited[row][1:])
    half = set(sorted(of_group)[::2])
    settings = Settings(home=Path(os.environ.get("PROBE_HOME", tempfile.mkdtemp())))
    loaded = load_encoder("minilm", settings)
    cache = VectorCache(settings.home / "vectors", loaded.info.fingerprint, loaded.info.dimension)

    def corpus(chosen: list[tuple[str, str, str]], temperature: float = 0.05) -> Corpus:
        vectors = [
            encode_with_cache(loaded, [row[column] for row in chosen], cache).vectors for column in (0, 1)
        ]
        return Corpus(
            [(anchor, positive) for anchor, positive, _ in chosen],
            [group for _, _, group in chosen],
            vectors[0],
            vectors[1],
            temperature,
        )

    a = corpus(rows)
    return {
        "edited": (a, corpus([*edited, *near])),
        "added": (a, corpus([*rows, *near])),
        "temperatures": (a, corpus(rows, 0.07)),
        "unrelated": (
            corpus([row for row in rows if row[2] in half]),
            corpus([row for row in rows if row[2] not in half]),
        ),
    }


if __name__ == "__main__":
    main()
