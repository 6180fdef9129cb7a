"""S in parts: against every batch of a tiny corpus, against plain loops, and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from probe_service.estimate import Evidence
from probe_service.estimate.decomposition import DecompositionAccumulator, SampledDecomposition
from probe_service.estimate.exact import ExactShares, ShareAccumulator
from probe_service.similarity.decomposition import decompose_batches
from tests.oracles import similarity_rows, unit_rows
from tests.unit.estimate.all_batches import CENTRES, histogram, others, push_of_all_batches, small_corpus


def by_source(s, sources):
    k = sources.max() + 1
    return np.stack([histogram(s, others(s) & (sources[None, :] == c)) for c in range(k)], axis=1)


def decomposed(s, known, sources, sizes, temperature, *, blocks=2):
    """The accumulator after all blocks, and what each known pair received."""
    n = len(s)
    whole = DecompositionAccumulator(CENTRES, rows=n, sizes=sizes, temperature=temperature, sources=sources)
    columns = by_source(s, sources)
    push = np.zeros((len(sizes), n, n))
    for rows in np.array_split(np.arange(n), blocks):
        part = DecompositionAccumulator(
            CENTRES, rows=n, sizes=sizes, temperature=temperature, sources=sources
        )
        block = slice(int(rows[0]), int(rows[-1]) + 1)
        anchor, candidate = np.nonzero(known[block])
        anchor = anchor + block.start
        bins = np.rint((s[anchor, candidate] + 1) * 1024).astype(np.int64)
        push[:, anchor, candidate] = part.add(block, columns[block], anchor, candidate, bins)
        for name in ("by_anchor", "by_candidate", "false", "push"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
    return whole.decompositions(), push


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("temperature", [0.02, 0.2])
def test_parts_against_all_batches(temperature, paired):
    s, known = small_corpus(7, 8, paired=paired)
    sources = np.array([0, 1, 2, 0, 0, 1, 2, 2])
    found, of_pairs = decomposed(s, known, sources, [2, 3], temperature)
    for at, size in enumerate((2, 3)):
        push, _ = push_of_all_batches(s, size, temperature)
        false = push * known
        assert found[at].batch_size == size
        np.testing.assert_allclose(of_pairs[at], false, atol=5e-6)
        np.testing.assert_allclose(found[at].by_anchor, false.sum(axis=1), atol=5e-6)
        np.testing.assert_allclose(found[at].by_candidate, false.sum(axis=0), atol=5e-6)
        for a in range(3):
            for c in range(3):
                cell = np.ix_(sources == a, sources == c)
                assert found[at].false[a, c] == pytest.approx(false[cell].sum(), abs=5e-6)
                assert found[at].push[a, c] == pytest.approx(push[cell].sum(), abs=5e-6)
                assert found[at].received_share[a, c] == pytest.approx(
                    push[cell].sum() / push[sources == a].sum(), abs=5e-5
                )
                assert found[at].false_share[a, c] == pytest.approx(
                    false[cell].sum() / push[cell].sum(), abs=5e-5
                )


def test_parts_sum_to_the_share():
    s, known = small_corpus(3, 150)
    sources = np.random.default_rng(0).integers(0, 4, 150)
    sizes, temperature = (2, 5, 7), 0.05
    found, of_pairs = decomposed(s, known, sources, sizes, temperature, blocks=3)
    accumulator = ShareAccumulator(CENTRES, lowest=-1.0, rows=150, largest=7, temperature=temperature)
    accumulator.add(histogram(s, others(s)), histogram(s, known), None, None, lambda: None)
    shares = ExactShares.from_sums(accumulator.sums, rows=150)
    for at, size in enumerate(sizes):
        share = found[at].share
        assert share == pytest.approx(shares.known[size - 2], rel=1e-6)
        for parts in (found[at].by_anchor, found[at].by_candidate, of_pairs[at]):
            assert parts.sum() == pytest.approx(share, rel=1e-12)
        assert found[at].push.sum() == pytest.approx(1.0, rel=1e-12)


def test_one_source_and_no_known_pair():
    s, known = small_corpus(3, 9)
    accumulator = DecompositionAccumulator(CENTRES, rows=9, sizes=[2], temperature=0.05)
    nothing = np.zeros(0, dtype=np.int64)
    assert accumulator.add(
        slice(0, 9), histogram(s, others(s))[:, None], nothing, nothing, nothing
    ).shape == (1, 0)
    (found,) = accumulator.decompositions()
    assert found.share == 0.0
    assert found.push == pytest.approx(np.ones((1, 1)))
    assert known.any()


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_parts_of_batches_against_loops(batches, paired):
    rng = np.random.default_rng(11)
    n, size, temperature, k = 20, 6, 0.1, 3
    vectors, positives = unit_rows(rng, n, 4), unit_rows(rng, n, 4)
    groups = [chr(97 + i % 5) for i in range(n)]
    sources = rng.integers(0, k, n)
    evidence = Evidence.from_keys(None, None, groups)
    rows = np.stack([rng.choice(n, size, replace=False) for _ in range(batches)])
    found = decompose_batches(
        torch.from_numpy(vectors[rows]),
        torch.from_numpy(positives[rows]) if paired else None,
        temperature=temperature,
        known=lambda block: evidence.known_pairs(rows, block),
        sources=sources[rows],
        source_count=k,
    )
    for b, batch in enumerate(rows):
        s = similarity_rows(vectors[batch], (positives if paired else vectors)[batch])
        false, push = np.zeros((k, k)), np.zeros((k, k))
        by_anchor, by_candidate = np.zeros(size), np.zeros(size)
        for i in range(size):
            weights = {j: math.exp(s[i][j] / temperature) for j in range(size) if j != i}
            total = math.fsum(weights.values())
            for j, weight in weights.items():
                share = weight / total / size
                cell = sources[batch[i]], sources[batch[j]]
                push[cell] += share
                if groups[batch[i]] == groups[batch[j]]:
                    false[cell] += share
                    by_anchor[i] += share
                    by_candidate[j] += share
        np.testing.assert_allclose(found.push[b], push, atol=1e-6)
        np.testing.assert_allclose(found.false[b], false, atol=1e-6)
        np.testing.assert_allclose(found.by_anchor[b], by_anchor, atol=1e-6)
        np.testing.assert_allclose(found.by_candidate[b], by_candidate, atol=1e-6)


def test_sampled_parts_cover_the_exact_ones():
    """150 runs of 60 batches each, against the parts from all pairs; nominal coverage .95."""
    rng = np.random.default_rng(12)
    n, size, temperature, k, runs, batches = 240, 12, 0.05, 2, 150, 60
    labels = rng.integers(0, 30, n)
    centres = unit_rows(rng, 30, 16)
    vectors = centres[labels] + 0.15 * rng.standard_normal((n, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    sources = (labels % 3 == 0).astype(np.int64)
    evidence = Evidence.from_keys(None, None, [str(label) for label in labels])
    s = np.clip(vectors.astype(np.float64) @ vectors.T.astype(np.float64), -1, 1)
    known = (labels[:, None] == labels[None, :]) & others(s)
    (exact,), _ = decomposed(s, known, sources, [size], temperature)
    covered = {"push": 0, "false": 0, "false_share": 0, "rows": 0}
    rows_with_interval = 0
    sums = np.zeros(n)
    for _ in range(runs):
        rows = np.stack([rng.choice(n, size, replace=False) for _ in range(batches)])
        sampled = SampledDecomposition(n, k)
        for part in np.array_split(rows, 2):
            found = decompose_batches(
                torch.from_numpy(vectors[part]),
                None,
                temperature=temperature,
                known=lambda block, part=part: evidence.known_pairs(part, block),
                sources=sources[part],
                source_count=k,
            )
            sampled.add(part, **vars(found))
        for a, c in np.ndindex(k, k):
            cell = sampled.cells(0.95)[a][c]
            if exact.false[a, c] == 0:
                assert cell.false.value == 0.0
                continue
            assert cell.false_share is not None
            for name in ("push", "false", "false_share"):
                interval = getattr(cell, name)
                covered[name] += interval.low <= getattr(exact, name)[a, c] <= interval.high
        by_candidate = sampled.by_candidate(0.95)
        sums += by_candidate.value
        assert by_candidate.value.sum() == pytest.approx(sampled.by_anchor(0.95).value.sum())
        rows_with_interval += np.isfinite(by_candidate.low).sum()
    # Two cells (labels, and so false negatives, do not cross sources). P(at most 270 of 300) = 5e-4 at .95.
    assert min(covered[name] for name in ("push", "false", "false_share")) > 270
    # No row is in 30 of 60 batches of 12 of 240.
    assert rows_with_interval == 0
    assert sums / runs == pytest.approx(exact.by_candidate, abs=5e-4)


def test_rows_in_enough_batches_have_intervals():
    """Row 0 adds .2 or .4 to every other batch, row 1 to none, row 2 is in no batch."""
    sampled = SampledDecomposition(3, 1)
    rows = np.tile([[0, 1]], (80, 1))
    values = np.zeros((80, 2))
    values[::2, 0] = np.tile([0.2, 0.4], 20)
    ones = np.ones((80, 1, 1))
    sampled.add(
        rows,
        false=values.sum(axis=1)[:, None, None],
        push=ones,
        by_anchor=values,
        by_candidate=values[:, ::-1],
    )
    found = sampled.by_anchor(0.95)
    assert found.value == pytest.approx([0.15, 0.0, 0.0])
    half = 1.9904502 * values[:, 0].std(ddof=1) / 80**0.5  # t with 79 degrees of freedom
    assert found.high[0] - found.value[0] == pytest.approx(half)
    assert found.value[0] - found.low[0] == pytest.approx(half)
    assert np.isnan(found.low[1:]).all()
    assert sampled.by_candidate(0.95).value == pytest.approx([0.0, 0.15, 0.0])


def test_a_cell_that_few_batches_reach_has_no_ratio():
    sampled = SampledDecomposition(2, 2)
    push = np.zeros((100, 2, 2))
    push[:, 0, 0], push[:29, 0, 0], push[:29, 0, 1] = 1.0, 0.5, 0.5
    nothing = np.zeros((100, 2))
    sampled.add(
        np.tile([[0, 1]], (100, 1)), false=push / 2, push=push, by_anchor=nothing, by_candidate=nothing
    )
    (full, few), (_, empty) = sampled.cells(0.95)
    assert full.false_share is not None
    assert full.false_share.value == pytest.approx(0.5)
    assert few.false_share is None
    assert few.push.value == pytest.approx(0.145)
    assert empty.false_share is None
    assert empty.push.value == 0.0
