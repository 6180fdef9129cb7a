from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from probe_service.similarity import pairs as pairs_module
from probe_service.similarity import top_pairs
from tests.oracles import negative_pairs, unit_rows


def expected(anchors, candidates, k):
    """Sort all pairs by similarity (equal to 1e-12), then by row numbers."""
    found = negative_pairs(anchors, candidates)
    return sorted(found, key=lambda p: (-round(p[0], 12), p[1], p[2]))[:k]


@settings(max_examples=150, deadline=None)
@example(n=10, d=8, k=1, distinct=10, ordered=True, block=1, spare=0, seed=8)
@given(
    n=st.integers(1, 24),
    d=st.integers(1, 9),
    k=st.integers(1, 40),
    distinct=st.integers(1, 24),
    ordered=st.booleans(),
    block=st.sampled_from([1, 7, 64, 4_000_000]),
    spare=st.sampled_from([0, 8_192]),
    seed=st.integers(0, 2**32 - 1),
)
def test_same_pairs_as_brute_force_in_float64(n, d, k, distinct, ordered, block, spare, seed):
    rng = np.random.default_rng(seed)
    # Drawing rows from few distinct vectors makes ties and duplicates the rule.
    anchors = unit_rows(rng, min(distinct, n), d)[rng.integers(0, min(distinct, n), n)]
    candidates = anchors[rng.permutation(n)] if ordered else None
    right = anchors if candidates is None else candidates
    before = pairs_module.BLOCK_ELEMENTS, pairs_module._SPARE_PAIRS
    # Without spare room, pairs are dropped, and ties cut, after almost every block.
    pairs_module.BLOCK_ELEMENTS, pairs_module._SPARE_PAIRS = block, spare
    try:
        found = top_pairs(anchors, candidates, k=k)
    finally:
        pairs_module.BLOCK_ELEMENTS, pairs_module._SPARE_PAIRS = before
    truth = expected(anchors, candidates, k)
    np.testing.assert_allclose(found.similarity, [s for s, _, _ in truth], atol=1e-12)
    pairs = list(zip(found.anchor.tolist(), found.candidate.tolist(), strict=True))
    # Cosines of different vectors may be the same but for rounding, which the order of additions decides; those of the same
    # vectors are ties to the last bit.
    similarity = {(i, j): s for s, i, j in negative_pairs(anchors, candidates)}
    values = {(s, anchors[i].tobytes(), right[j].tobytes()) for (i, j), s in similarity.items()}
    ordered_values = sorted(s for s, _, _ in values)
    if all(b - a > 1e-12 for a, b in itertools.pairwise(ordered_values)):
        assert pairs == [(i, j) for _, i, j in truth]
    assert len(set(pairs)) == len(pairs)
    np.testing.assert_allclose([similarity[pair] for pair in pairs], found.similarity, atol=1e-12)
    assert pairs == [pair for _, pair in sorted(zip((-found.similarity).tolist(), pairs, strict=True))]


def test_hand_worked_three_rows():
    # 0° 60° 180°: cosines .5 (0,1), −1 (0,2), cos 120° = −.5 (1,2).
    rows = np.array([[1, 0], [0.5, np.sqrt(3) / 2], [-1, 0]], dtype=np.float32)
    found = top_pairs(rows, k=5)
    assert found.anchor.tolist() == [0, 1, 0]
    assert found.candidate.tolist() == [1, 2, 2]
    np.testing.assert_allclose(found.similarity, [0.5, -0.5, -1.0], atol=1e-6)


def test_ordered_pairs_leave_out_only_the_own_positive():
    eye = np.eye(3, dtype=np.float32)
    found = top_pairs(eye, eye[[1, 0, 2]], k=2)
    # anchor 0 equals candidate 1 and anchor 1 equals candidate 0; anchor 2 meets only its own positive.
    assert list(zip(found.anchor.tolist(), found.candidate.tolist(), strict=True)) == [(0, 1), (1, 0)]


def test_similarities_are_clamped():
    row = np.full((2, 3), np.float32(0.57735032), dtype=np.float32)  # norm 1.0000001
    assert top_pairs(row, k=1).similarity.tolist() == [1.0]


def test_one_row_has_no_pair():
    assert len(top_pairs(np.ones((1, 4), np.float32) / 2, k=3).similarity) == 0


def test_all_rows_equal_is_answered_without_scoring_all_pairs():
    rows = np.tile(unit_rows(np.random.default_rng(0), 1, 384), (20_000, 1))
    found = top_pairs(rows, k=4)
    assert list(zip(found.anchor.tolist(), found.candidate.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
    ]


@pytest.mark.parametrize("ordered", [False, True])
def test_agrees_with_faiss(ordered):
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(3)
    anchors, candidates = unit_rows(rng, 701, 48), unit_rows(rng, 701, 48)
    if not ordered:
        candidates = anchors
    similarities, columns = faiss.knn(anchors, candidates, 701, metric=faiss.METRIC_INNER_PRODUCT)
    rows = np.repeat(np.arange(701), 701).reshape(701, 701)
    keep = columns > rows if not ordered else columns != rows
    best = np.sort(similarities[keep])[::-1][:6]
    np.testing.assert_allclose(
        top_pairs(anchors, candidates if ordered else None, k=6).similarity, best, atol=1e-6
    )


def test_peak_memory_is_one_block(monkeypatch):
    tracemalloc = pytest.importorskip("tracemalloc")
    sizes = []
    original = pairs_module._Best.add

    def recording(self, similarities, first_row, first_column):
        sizes.append(similarities.numel())
        return original(self, similarities, first_row, first_column)

    monkeypatch.setattr(pairs_module._Best, "add", recording)
    rows = unit_rows(np.random.default_rng(1), 9_000, 16)
    tracemalloc.start()
    top_pairs(rows, k=4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(sizes) <= pairs_module.BLOCK_ELEMENTS
    assert peak < 9_000 * 9_000  # far below the 324 MB of the whole float32 matrix
