"""How often the audit's intervals cover S(N), by simulation on six labelled corpora with the true labels as judge.

Each corpus under PROBE_TEST_DATA is encoded once with MiniLM (`--rows` rows of it: whole groups where groups are small). q_N
of every pair is computed, which gives the true S(N); an independent estimate from random batches stands beside it. Then the
audit runs ``--replications`` times for each number of labels, and this script prints for each N how often the interval holds
the truth, its mean width, the bias, and how often no estimate was given for want of effective labels. Nominal coverage is
0.95; a cell is marked where it is significantly below (one-sided binomial test, Holm over all cells, α = .01).

With ``--noise`` the judge has 5 in 100 false alarms and misses 10 in 100 duplicates, and ``--checks`` hidden pairs of each
kind measure it. With ``--n-max`` it prints instead how often the audit's n_max is above the true one (nominal .025 at most),
and its median beside the true one, at the budgets ``--budgets``; pairs are then drawn at ``--sizes`` and S is tested at every
integer from 2 to the largest of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from scipy.interpolate import CubicSpline

from probe_service.encode import CheckedEncoder, VectorCache, encode_with_cache, load_encoder
from probe_service.estimate.audit import (
    AuditDesign,
    CheckCounts,
    DrawnPair,
    JudgedShares,
    audited_limit,
    audited_share,
)
from probe_service.estimate.push import push_of_row
from probe_service.schemas import AuditedShare
from probe_service.settings import Settings

TEMPERATURE, LEVEL = 0.05, 0.95
FALSE_ALARMS, MISSES = 0.05, 0.10
FILES = {
    "banking77": ("labels/banking77", "label"),
    "hwu64": ("labels/hwu64", "label"),
    "flickr8k": ("clusters/flickr8k_captions", "cluster"),
    "tatoeba": ("corpora/tatoeba_en", "cluster"),
    "qqp": ("pairs/qqp_dt", None),
    "trec": ("labels/trec", "label"),
}


@dataclass(frozen=True)
class Labelled:
    """Texts, and for each row those that mean the same."""

    texts: list[str]
    partners: list[np.ndarray]


def read_rows(file: Path) -> list[dict[str, object]]:
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def read_labelled(name: str, folder: Path, rows: int, rng: np.random.Generator) -> Labelled:
    file, column = FILES[name]
    found = read_rows(folder / f"{file}.jsonl.gz")
    if column is None:
        return close_pairs([row for row in found if row["label"] == 1], rows, rng)
    groups: dict[object, list[str]] = defaultdict(list)
    for row in found:
        groups[row[column]].append(str(row["text"]))
    names = list(groups)
    rng.shuffle(names)
    if len(found) / len(groups) < 20:
        members = [(group, text) for group in names for text in groups[group]][:rows]
    else:
        everything = [(group, text) for group in names for text in groups[group]]
        members = [everything[i] for i in rng.permutation(len(everything))[:rows]]
    where: dict[object, list[int]] = defaultdict(list)
    for place, (group, _) in enumerate(members):
        where[group].append(place)
    partners = [np.array([j for j in where[group] if j != i], int) for i, (group, _) in enumerate(members)]
    return Labelled([text for _, text in members], partners)


def close_pairs(pairs: list[dict[str, object]], rows: int, rng: np.random.Generator) -> Labelled:
    """Both sides of the listed pairs; two rows mean the same if they are a pair, or share a partner (one hop)."""
    number: dict[str, int] = {}
    linked: dict[int, set[int]] = defaultdict(set)
    for index in rng.permutation(len(pairs)):
        if len(number) >= rows:
            break
        a, b = (number.setdefault(str(pairs[index][s]), len(number)) for s in ("sentence1", "sentence2"))
        linked[a].add(b)
        linked[b].add(a)
    partners = []
    for i in range(len(number)):
        same = linked[i].union(*(linked[j] for j in linked[i])) - {i}
        partners.append(np.array(sorted(same), int))
    return Labelled(list(number), partners)


def push_matrix(vectors: np.ndarray, sizes: list[int]) -> np.ndarray:
    """(sizes, n, n) q_N(i, j), float32; interpolated in log q over 400 similarities a row."""
    n = len(vectors)
    push = np.zeros((len(sizes), n, n), np.float32)
    for i in range(n):
        row = np.clip(vectors @ vectors[i], -1.0, 1.0)
        others = np.delete(row, i)
        grid = np.linspace(others.min(), others.max(), 400)
        logs = np.log(push_of_row(row, i, sizes, TEMPERATURE).of(grid))
        for place in range(len(sizes)):
            push[place, i] = np.exp(np.interp(row, grid, logs[:, place]))
            push[place, i, i] = 0.0
            push[place, i] /= push[place, i].sum() * n
    return push


def share_of_batches(
    vectors: np.ndarray, partners: list[np.ndarray], size: int, rng: np.random.Generator
) -> tuple[float, float]:
    """S from random batches, and its standard error."""
    shares = []
    for _ in range(max(20, 20_000 // size)):
        batch = rng.choice(len(vectors), size, replace=False)
        place = {row: p for p, row in enumerate(batch.tolist())}
        logits = (vectors[batch] @ vectors[batch].T).astype(np.float64) / TEMPERATURE
        np.fill_diagonal(logits, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        hit = [
            weights[p, [place[j] for j in partners[row].tolist() if j in place]].sum()
            for row, p in place.items()
        ]
        shares.append(np.mean(hit))
    return float(np.mean(shares)), float(np.std(shares, ddof=1) / len(shares) ** 0.5)


def draw(push: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 2) pairs from the mean of q_N over the sizes."""
    sizes, n, _ = push.shape
    which, anchor = rng.integers(sizes, size=count), rng.integers(n, size=count)
    candidate = np.empty(count, dtype=np.int64)
    order = np.argsort(anchor * sizes + which, kind="stable")
    keys, first = np.unique((anchor * sizes + which)[order], return_index=True)
    for key, part in zip(keys.tolist(), np.split(order, first[1:]), strict=True):
        running = np.cumsum(push[key % sizes, key // sizes], dtype=np.float64)
        candidate[part] = np.searchsorted(running, rng.random(len(part)) * running[-1], side="right")
    return np.stack([anchor, np.minimum(candidate, n - 1)], axis=1)


def with_errors(truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    chance = rng.random(len(truth))
    return np.where(truth > 0, chance >= MISSES, chance < FALSE_ALARMS).astype(float)


def main() -> None:
    """Print the table of coverage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(os.environ.get("PROBE_TEST_DATA", ".")))
    parser.add_argument("--sets", nargs="+", choices=sorted(FILES), default=list(FILES))
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--labels", type=int, nargs="+", default=[100, 200, 500])
    parser.add_argument("--replications", type=int, default=500)
    parser.add_argument("--noise", action="store_true")
    parser.add_argument("--checks", type=int, default=50)
    parser.add_argument("--n-max", action="store_true")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(home=Path(os.environ.get("PROBE_HOME", tempfile.mkdtemp())))
    loaded = load_encoder("minilm", settings)
    cache = VectorCache(settings.home / "vectors", loaded.info.fingerprint, loaded.info.dimension)
    cells: list[tuple[str, int, int]] = []
    if given.n_max:
        print_limits(given, loaded, cache)
        return
    print(
        "| set | labels | N | S | S from batches | coverage | mean width | bias | no estimate |\n"
        + "|---" * 9
        + "|"
    )
    for name in given.sets:
        began = time.perf_counter()
        rng = np.random.default_rng([given.seed, sorted(FILES).index(name)])
        labelled = read_labelled(name, given.folder, given.rows, rng)
        vectors = encode_with_cache(loaded, labelled.texts, cache).vectors
        push = push_matrix(vectors, given.sizes)
        truth = [
            float(sum(q[i, mates].sum(dtype=np.float64) for i, mates in enumerate(labelled.partners)))
            for q in push
        ]
        batches = [share_of_batches(vectors, labelled.partners, size, rng) for size in given.sizes]
        for labels in given.labels:
            runs = replicate(push, labelled, labels, given, rng)
            for place, size in enumerate(given.sizes):
                found = [run[place].estimate for run in runs if run[place].estimate is not None]
                covered = sum(e.low <= truth[place] <= e.high for e in found)
                cells.append((f"{name}, {labels} labels, N = {size}", covered, len(found)))
                if not found:
                    print(f"| {name} | {labels} | {size} | {truth[place]:.4f} | | | | | {len(runs)} |")
                    continue
                print(
                    f"| {name} | {labels} | {size} | {truth[place]:.4f} | {batches[place][0]:.4f} ± {batches[place][1]:.4f} "
                    f"| {covered / len(found):.3f} | {np.mean([e.high - e.low for e in found]):.3f} "
                    f"| {np.mean([e.value for e in found]) - truth[place]:+.4f} | {len(runs) - len(found)} |",
                    flush=True,
                )
        print(f"{name}: n = {len(vectors)}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print_holm(cells)


def print_limits(given: argparse.Namespace, loaded: CheckedEncoder, cache: VectorCache) -> None:
    """Print how n_max compares with the truth."""
    print(
        "| set | labels | budget | true n_max | median n_max | above the truth | p (above .025) |\n"
        + "|---" * 7
        + "|"
    )
    grid = sorted(
        {2, 3, 4, 5, 6, *given.sizes, *np.geomspace(8, max(given.sizes), 12).round().astype(int).tolist()}
    )
    for name in given.sets:
        rng = np.random.default_rng([given.seed, sorted(FILES).index(name), 1])
        labelled = read_labelled(name, given.folder, given.rows, rng)
        vectors = encode_with_cache(loaded, labelled.texts, cache).vectors
        push = push_matrix(vectors, grid)
        shares = [
            sum(q[i, mates].sum(dtype=np.float64) for i, mates in enumerate(labelled.partners)) for q in push
        ]
        integers = np.arange(2, grid[-1] + 1)
        truth = np.exp(CubicSpline(np.log(grid), np.log(shares))(np.log(integers)))
        for labels in given.labels:
            audits = list(simulated_audits(push, grid, labelled, labels, given, rng))
            for budget in given.budgets:
                above = np.flatnonzero(truth > budget)
                largest = int(integers[above[0]]) - 1 if len(above) else int(integers[-1])
                found = [
                    audited_limit(
                        design,
                        answers,
                        {2: JudgedShares.nothing_known(), grid[-1]: JudgedShares.nothing_known()},
                        checks,
                        budget=budget,
                        level=LEVEL,
                        rng=rng,
                    ).value
                    or 1
                    for design, answers, checks in audits
                ]
                missed = sum(value > largest for value in found)
                p = stats.binomtest(missed, len(found), 0.025, alternative="greater").pvalue
                print(
                    f"| {name} | {labels} | {budget:g} | {largest} | {np.median(found):.0f} | {missed / len(found):.3f} "
                    f"| {p:.3f} |",
                    flush=True,
                )


def simulated_audits(
    push: np.ndarray,
    sizes: list[int],
    labelled: Labelled,
    labels: int,
    given: argparse.Namespace,
    rng: np.random.Generator,
) -> Iterator[tuple[AuditDesign, np.ndarray, CheckCounts]]:
    """Draw the audit many times and have it judged."""
    mixed = [sizes.index(size) for size in given.sizes]
    pairs = draw(push[mixed], labels * given.replications, rng)
    folded = push[:, pairs[:, 0], pairs[:, 1]] + push[:, pairs[:, 1], pairs[:, 0]]
    truth = np.array([float(j in set(labelled.partners[i].tolist())) for i, j in pairs.tolist()])
    for start in range(0, len(pairs), labels):
        part = slice(start, start + labels)
        design = AuditDesign(
            tuple(sizes),
            tuple(given.sizes),
            TEMPERATURE,
            push.shape[1],
            False,
            tuple(
                DrawnPair(i, j, tuple(q), float(np.mean([q[place] for place in mixed])))
                for (i, j), q in zip(pairs[part].tolist(), folded[:, part].T.tolist(), strict=True)
            ),
        )
        answers, checks = truth[part], CheckCounts(0, 0, 0, 0, 0, 0)
        if given.noise:
            answers = with_errors(answers, rng)
            hits, alarms = rng.binomial(given.checks, [1 - MISSES, FALSE_ALARMS])
            checks = CheckCounts(given.checks, int(hits), 0, given.checks, int(alarms), 0)
        yield design, answers, checks


def replicate(
    push: np.ndarray, labelled: Labelled, labels: int, given: argparse.Namespace, rng: np.random.Generator
) -> list[list[AuditedShare]]:
    """Estimate S at each size, in many audits."""
    return [
        [
            audited_share(design, size, answers, JudgedShares.nothing_known(), checks, level=LEVEL, rng=rng)
            for size in given.sizes
        ]
        for design, answers, checks in simulated_audits(push, given.sizes, labelled, labels, given, rng)
    ]


def print_holm(cells: list[tuple[str, int, int]]) -> None:
    """Print which cells are significantly below the nominal coverage, by Holm's step-down test."""
    tested = [(stats.binomtest(c, n, LEVEL, alternative="less").pvalue, cell) for cell, c, n in cells if n]
    below = []
    for rank, (p, cell) in enumerate(sorted(tested)):
        if p > 0.01 / (len(tested) - rank):
            break
        below.append(f"{cell} (p = {p:.1e})")
    rates = [c / n for _, c, n in cells if n]
    few = sum(rate < 0.92 for rate in rates)
    print(
        f"\n{len(tested)} cells; lowest coverage {min(rates):.3f}, mean {np.mean(rates):.3f}; {few} below .92; "
        f"significantly below .95 (Holm, α = .01): {', '.join(below) or 'none'}"
    )


if __name__ == "__main__":
    main()
