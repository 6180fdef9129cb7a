"""The losses as plain loops over float64 numbers, from the papers' formulas; nothing here knows of ξ or of log-space."""

from __future__ import annotations

import math

import numpy as np


def cosine(x, y):
    dot = math.fsum(float(a) * float(b) for a, b in zip(x, y, strict=True))
    norms = [math.sqrt(math.fsum(float(a) ** 2 for a in each)) for each in (x, y)]
    return dot / (norms[0] * norms[1])


def exponentials(row, others, temperature):
    return [math.exp(cosine(row, other) / temperature) for other in others]


def info_nce(anchors, candidates, mask, temperature):
    """Eq. 1 of the GS-InfoNCE paper, j over the own positive and the candidates that the mask leaves."""
    return gs_info_nce(anchors, candidates, mask, temperature, noise=[], weight=1.0)


def gs_info_nce(anchors, candidates, mask, temperature, noise, weight):
    """Eq. 2: the noise's cosine is divided by the temperature like any other."""
    losses = []
    for i, anchor in enumerate(anchors):
        terms = exponentials(anchor, candidates, temperature)
        kept = [term for j, term in enumerate(terms) if j == i or mask[i][j]]
        noisy = weight * math.fsum(exponentials(anchor, noise, temperature))
        losses.append(-math.log(terms[i] / (math.fsum(kept) + noisy)))
    return math.fsum(losses) / len(losses)


def decoupled(anchors, candidates, mask, temperature):
    """DCL (Yeh et al., eq. 6): the own positive is left out of the denominator. No negatives, no loss."""
    losses = []
    for i, anchor in enumerate(anchors):
        terms = exponentials(anchor, candidates, temperature)
        others = [term for j, term in enumerate(terms) if j != i and mask[i][j]]
        losses.append(-math.log(terms[i] / math.fsum(others)) if others else 0.0)
    return math.fsum(losses) / len(losses)


def other_direction(anchors, candidates, mask):
    """The positives as anchors and the anchors as candidates, with the mask of the same pairs."""
    size = len(anchors)
    return candidates[:size], anchors, np.asarray(mask)[:, :size].T


def random_batch(seed, size, hard=0, dimension=6, kept=0.7):
    """Anchors with positives near them, hard negatives, and a random mask."""
    rng = np.random.default_rng(seed)
    anchors = rng.standard_normal((size, dimension))
    positives = anchors + 0.5 * rng.standard_normal((size, dimension))
    candidates = np.concatenate([positives, rng.standard_normal((hard, dimension))])
    return anchors, candidates, rng.random((size, size + hard)) < kept
