"""A small version of benchmarks/audit_coverage.py: real vectors, true labels as judge."""

from __future__ import annotations

import dataclasses
import gzip
import json

import numpy as np
import pytest

from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.estimate.audit import CheckCounts, JudgedShares, audited_share, draw_pairs
from probe_service.settings import Settings

ROWS, LABELS, AUDITS = 500, 150, 60
SIZES = (16, 64, 256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["banking77", "hwu64"])
def test_intervals_cover_on_real_vectors(labelled_corpora, tmp_path_factory, name):
    with gzip.open(labelled_corpora / "labels" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng = np.random.default_rng(7)
    some = [rows[i] for i in rng.permutation(len(rows))[:ROWS]]
    group = np.unique([row["label"] for row in some], return_inverse=True)[1]
    loaded = load_encoder("minilm", Settings())
    cache = VectorCache(tmp_path_factory.mktemp("vectors"), loaded.info.fingerprint, loaded.info.dimension)
    vectors = encode_with_cache(loaded, [row["text"] for row in some], cache).vectors
    design = draw_pairs(
        vectors,
        None,
        drawn_sizes=SIZES,
        sizes=SIZES,
        temperature=0.05,
        is_judged=lambda i, j: np.zeros(len(i), dtype=bool),
        count=AUDITS * LABELS,
        rng=rng,
    )
    answers = np.array([float(group[p.anchor] == group[p.candidate]) for p in design.pairs])
    for size in SIZES:
        truth, error = share_of_batches(vectors, group, size, rng)
        covered, values = 0, []
        for audit in range(AUDITS):
            part = slice(audit * LABELS, (audit + 1) * LABELS)
            found = audited_share(
                dataclasses.replace(design, pairs=design.pairs[part]),
                size,
                answers[part],
                JudgedShares.nothing_known(),
                CheckCounts(0, 0, 0, 0, 0, 0),
                level=0.95,
                rng=rng,
            ).estimate
            values.append(found.value)
            covered += found.low <= truth <= found.high
        # 57 of 60 expected; P(≤ 51) = .002 at exactly .95. Four standard errors for the bias.
        assert covered >= 52, (size, covered)
        assert abs(np.mean(values) - truth) < 4 * np.hypot(np.std(values) / AUDITS**0.5, error), size


def share_of_batches(vectors, group, size, rng, batches=600):
    """S(N) and its standard error, from its definition on random batches."""
    shares = []
    for _ in range(batches):
        rows = rng.choice(len(vectors), size, replace=False)
        weights = np.exp((vectors[rows] @ vectors[rows].T).astype(np.float64) / 0.05)
        np.fill_diagonal(weights, 0.0)
        same = group[rows][:, None] == group[rows][None, :]
        shares.append(((weights * same).sum(axis=1) / weights.sum(axis=1)).mean())
    return float(np.mean(shares)), float(np.std(shares) / batches**0.5)
