"""Oracles: slow loops from the formulas, in float64 and plain Python, sharing nothing with the package."""

from __future__ import annotations

import math

import numpy as np


def cosine(x, y):
    return max(-1.0, min(1.0, math.fsum(float(a) * float(b) for a, b in zip(x, y, strict=True))))


def similarity_rows(anchors, candidates):
    return [[cosine(x, y) for y in candidates] for x in anchors]


def negative_pairs(anchors, candidates=None):
    """All negative pairs (similarity, i, j): i < j of one list, or i ≠ j of two."""
    n = len(anchors)
    if candidates is None:
        return [(cosine(anchors[i], anchors[j]), i, j) for i in range(n) for j in range(i + 1, n)]
    return [(cosine(anchors[i], candidates[j]), i, j) for i in range(n) for j in range(n) if i != j]


def softmax_share(row, false, own, temperature):
    """Σ_j w_j p_j of one anchor, by the definition, with the largest term taken out."""
    others = [j for j in range(len(row)) if j != own]
    top = max(row[j] for j in others)
    weights = {j: math.exp((row[j] - top) / temperature) for j in others}
    total = math.fsum(weights.values())
    return math.fsum(weights[j] for j in others if false(own, j)) / total


def unit_rows(rng, n, d):
    rows = rng.standard_normal((n, d))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
