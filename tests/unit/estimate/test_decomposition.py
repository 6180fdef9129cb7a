"""S in parts: against every batch of a tiny corpus."""

from __future__ import annotations

import numpy as np
import pytest

from probe_service.estimate.decomposition import DecompositionAccumulator
from probe_service.estimate.exact import ExactShares, ShareAccumulator
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
        push[:, anchor, candidate] = part.add(
            block, columns[block].sum(axis=1), columns[block], anchor, candidate, bins
        )
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
    accumulator.add(histogram(s, others(s)), histogram(s, known), None, None)
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
    assert accumulator.add(slice(0, 9), histogram(s, others(s)), None, nothing, nothing, nothing).shape == (
        1,
        0,
    )
    (found,) = accumulator.decompositions()
    assert found.share == 0.0
    assert found.push == pytest.approx(np.ones((1, 1)))
    assert known.any()
