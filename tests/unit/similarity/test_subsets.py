from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.estimate import Evidence
from probe_service.similarity import batch_top_k, measure_subsets, most_similar_pairs
from tests.oracles import negative_pairs, unit_rows


def nothing():
    pass


def exact_rows(rng, n):
    """Rows of ±½ in four dimensions: their cosines are multiples of ½, without any rounding, so ties are the rule."""
    return rng.choice(np.float32([-0.5, 0.5]), (n, 4))


def draw_batches(rng, n, size, count):
    return np.stack([rng.choice(n, size, replace=False) for _ in range(count)])


def direct(pairs, batch, k):
    """The k largest, from all pairs of the corpus (similarity, i, j), by a loop."""
    rows = set(batch.tolist())
    inside = sorted((s for s, i, j in pairs if i in rows and j in rows), reverse=True)
    return inside[:k] + [np.nan] * (k - len(inside))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 18),
    k=st.integers(1, 6),
    count=st.integers(1, 320),
    ordered=st.booleans(),
    mask=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_equal_to_direct_search_with_ties(n, k, count, ordered, mask, seed):
    rng = np.random.default_rng(seed)
    anchors = exact_rows(rng, n)
    candidates = exact_rows(rng, n) if ordered else None
    groups = rng.integers(0, 4, n)
    pairs = negative_pairs(anchors, candidates)
    listed = most_similar_pairs(anchors, candidates, count=count, checkpoint=nothing)
    holds_all = count >= len(pairs)
    if mask:
        listed = listed.without(groups[listed.pairs.anchor] == groups[listed.pairs.candidate])
        pairs = [(s, i, j) for s, i, j in pairs if groups[i] != groups[j]]
    in_list = set(zip(listed.pairs.anchor.tolist(), listed.pairs.candidate.tolist(), strict=True))
    batches = draw_batches(rng, n, int(rng.integers(2, n + 1)), 70)  # more than fit one word
    found = measure_subsets(listed, batches, k=k, checkpoint=nothing)
    for batch, top, short in zip(batches, found.top_k, found.too_short, strict=True):
        held = sum(i in batch and j in batch for i, j in in_list)
        assert short == (held < k and not holds_all)
        if not short:
            np.testing.assert_array_equal(top, direct(pairs, batch, k))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("size", "count"), [(2, 10**6), (6, 60_000), (40, 15_000), (150, 3_000)])
def test_two_hundred_batches_of_clustered_rows(size, count, ordered):
    rng = np.random.default_rng(size)
    n, k = 300, 4
    groups = rng.integers(0, 60, n)
    anchors = unit_rows(rng, 60, 24)[groups] + 0.1 * unit_rows(rng, n, 24)
    anchors /= np.linalg.norm(anchors, axis=1, keepdims=True)
    candidates = anchors[rng.permutation(n)] if ordered else None
    batches = draw_batches(rng, n, size, 200)
    listed = most_similar_pairs(anchors, candidates, count=count, checkpoint=nothing)
    pairs = np.stack([listed.pairs.anchor, listed.pairs.candidate], axis=1)
    evidence = Evidence.from_keys(None, None, [str(group) for group in groups])
    found_known = evidence.known_pairs(pairs)
    known = np.zeros(len(pairs), dtype=bool)
    known[found_known.batch[found_known.anchor == 0]] = True
    right = anchors if candidates is None else candidates
    whole = np.clip(anchors.astype(np.float64) @ right.astype(np.float64).T, -1.0, 1.0)
    same = groups[:, None] == groups[None, :]
    for left_out, some in ((np.zeros_like(same), listed), (same, listed.without(known))):
        found = measure_subsets(some, batches, k=k, checkpoint=nothing)
        for batch, top, short in zip(batches, found.top_k, found.too_short, strict=True):
            block = whole[np.ix_(batch, batch)]
            negative = ~np.eye(size, dtype=bool) if ordered else np.triu(np.ones((size, size), bool), 1)
            # For sentences a pair stands in the list with the smaller row first; the matrix is symmetric.
            values = np.sort(block[negative & ~left_out[np.ix_(batch, batch)]])[::-1]
            if not short:
                expected = np.full(k, np.nan)
                expected[: min(k, len(values))] = values[:k]
                np.testing.assert_allclose(top, expected, atol=1e-12)
        assert found.too_short.mean() < 0.5  # so that not all batches are passed over
        if some is listed:
            for row in np.flatnonzero(~found.too_short)[:10]:
                batch = torch.from_numpy(anchors[batches[row]])[None]
                positives = None if candidates is None else torch.from_numpy(candidates[batches[row]])[None]
                np.testing.assert_allclose(found.top_k[row], batch_top_k(batch, positives, k=k)[0], atol=1e-6)


def test_a_list_too_short_says_so_for_those_batches_alone():
    # Cosines: (0,1) 1, (0,2) and (1,2) ½·√2, the others 0; the list holds the first pair only.
    rows = np.float32([[1, 0, 0], [1, 0, 0], [2**-0.5, 2**-0.5, 0], [0, 0, 1]])
    listed = most_similar_pairs(rows, count=1, checkpoint=nothing)
    batches = np.array([[1, 0], [2, 1], [3, 0]])
    found = measure_subsets(listed, batches, k=1, checkpoint=nothing)
    assert found.too_short.tolist() == [False, True, True]
    assert found.top_k[0].tolist() == [1.0]
    whole = most_similar_pairs(rows, count=100, checkpoint=nothing)
    found = measure_subsets(whole, batches, k=2, checkpoint=nothing)
    assert not found.too_short.any()
    np.testing.assert_allclose(found.top_k, [[1, np.nan], [0.5**0.5, np.nan], [0, np.nan]], atol=1e-7)


def test_both_steps_can_be_abandoned():
    class Abandoned(Exception):
        pass

    def abandon():
        raise Abandoned

    rows = exact_rows(np.random.default_rng(0), 8)
    with pytest.raises(Abandoned):
        most_similar_pairs(rows, count=3, checkpoint=abandon)
    listed = most_similar_pairs(rows, count=3, checkpoint=nothing)
    with pytest.raises(Abandoned):
        measure_subsets(listed, np.array([[0, 1]]), k=1, checkpoint=abandon)
