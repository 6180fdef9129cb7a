"""Oracles for the exact method: every batch of a tiny corpus, one after the other, and many random batches of a larger one."""

from __future__ import annotations

import itertools
import math

import numpy as np

CENTRES = np.linspace(-1.0, 1.0, 2049)


def small_corpus(seed, n, *, paired=False):
    """Similarities on the histogram's centres, so that binning costs nothing, and which pairs are false negatives."""
    rng = np.random.default_rng(seed)
    s = np.rint(np.clip(rng.normal(0.3, 0.25, (n, n)), -1, 1) * 1024) / 1024
    false = rng.random((n, n)) < 0.35
    if not paired:
        s, false = np.triu(s, 1) + np.triu(s, 1).T + np.eye(n), np.triu(false, 1) | np.triu(false, 1).T
    np.fill_diagonal(false, False)
    return s, false


def histogram(s, mask):
    """(n, bins) counts of the masked entries of each row."""
    counts = np.zeros((len(s), len(CENTRES)), dtype=np.float32)
    for i in range(len(s)):
        for j in range(len(s)):
            if mask[i, j]:
                counts[i, round((s[i, j] + 1) * 1024)] += 1
    return counts


def others(s):
    return ~np.eye(len(s), dtype=bool)


def push_of_all_batches(s, size, temperature, kept=None):
    """(n, n) mean over all batches of the softmax weight of each ordered pair over N, and the share of anchors that push.

    Candidates that are not `kept` have no weight; an anchor without any other has no push.
    """
    n = len(s)
    push, pushing, batches = np.zeros((n, n)), 0, 0
    for batch in itertools.combinations(range(n), size):
        batches += 1
        for i in batch:
            rest = [j for j in batch if j != i and (kept is None or kept[i, j])]
            if not rest:
                continue
            pushing += 1
            total = math.fsum(math.exp((s[i, j] - 1) / temperature) for j in rest)
            for j in rest:
                push[i, j] += math.exp((s[i, j] - 1) / temperature) / total / size
    return push / batches, pushing / batches / size


def shares_of_random_batches(s, false, size, temperature, rng, *, batches, kept=None):
    """(batches, 2) of random batches: Σ_i share of anchor i on false negatives, and anchors that push; both over N."""
    x = np.exp((s - 1.0) / temperature)
    np.fill_diagonal(x, 0.0)
    if kept is not None:
        x = x * kept
    found = np.zeros((batches, 2))
    for number in range(batches):
        rows = rng.choice(len(s), size, replace=False)
        at = np.ix_(rows, rows)
        total = x[at].sum(axis=1)
        hit = (x[at] * false[at]).sum(axis=1)
        found[number] = (hit[total > 0] / total[total > 0]).sum() / size, (total > 0).mean()
    return found
