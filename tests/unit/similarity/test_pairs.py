from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from probe_service.similarity import pairs as pairs_module
from probe_service.similarity import top_pairs
from probe_service.similarity.screen import Screen
from tests.oracles import negative_pairs, unit_rows


def expected(anchors, candidates, k):
    """Sort all pairs by similarity (equal to 1e-12), then by row numbers."""
    found = negative_pairs(anchors, candidates)
    return sorted(found, key=lambda p: (-round(p[0], 12), p[1], p[2]))[:k]


@pytest.fixture
def tiles(monkeypatch):
    """Set the sizes of tiles and of what is held; crowded tiles are those with more than one near pair in so many."""

    def cut(rows, columns, *, spare=1_024, crowded=8):
        monkeypatch.setattr(pairs_module, "_TILE_ROWS", rows)
        monkeypatch.setattr(pairs_module, "_TILE_COLUMNS", columns)
        monkeypatch.setattr(pairs_module, "_SPARE_PAIRS", spare)
        monkeypatch.setattr(pairs_module, "_CROWDED", crowded)

    return cut


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(n=10, d=8, k=1, distinct=10, ordered=True, tile=1, spare=0, crowded=1, seed=8)
@given(
    n=st.integers(1, 24),
    d=st.integers(1, 9),
    k=st.integers(1, 40),
    distinct=st.integers(1, 24),
    ordered=st.booleans(),
    tile=st.sampled_from([1, 3, 8, 512]),
    spare=st.sampled_from([0, 1_024]),
    crowded=st.sampled_from([1, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_same_pairs_as_brute_force_in_float64(n, d, k, distinct, ordered, tile, spare, crowded, seed, tiles):
    rng = np.random.default_rng(seed)
    # Drawing rows from few distinct vectors makes ties and duplicates the rule.
    anchors = unit_rows(rng, min(distinct, n), d)[rng.integers(0, min(distinct, n), n)]
    candidates = anchors[rng.permutation(n)] if ordered else None
    right = anchors if candidates is None else candidates
    # Without spare room, pairs are dropped, and ties cut, after almost every tile.
    tiles(tile, 2 * tile, spare=spare, crowded=crowded)
    found = top_pairs(anchors, candidates, k=k)
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


def same(found, truth):
    np.testing.assert_array_equal(found.anchor, truth.anchor)
    np.testing.assert_array_equal(found.candidate, truth.candidate)
    np.testing.assert_array_equal(found.similarity, truth.similarity)


def crowd(rng, n, d, spread):
    """Unit rows round one direction."""
    rows = rng.standard_normal(d) + spread * rng.standard_normal((n, d))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("screen", ["int8", "float32"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "kind"),
    [
        (600, 1, "spread"),
        (900, 3, "spread"),
        (800, 100, "spread"),
        (600, 384, "clusters"),
        (500, 1024, "spread"),
        (600, 64, "crowd"),
        (500, 64, "dense crowd"),
        (600, 33, "copies"),
        (500, 48, "outliers"),
    ],
)
def test_same_as_the_reference_to_the_last_bit(n, d, kind, ordered, screen, monkeypatch, tiles):
    if screen == "float32":
        monkeypatch.setattr(pairs_module, "int8_pays", lambda: False)
    tiles(128, 256)
    rng = np.random.default_rng(n + d)

    def side():
        if kind == "crowd":
            return crowd(rng, n, d, 1e-2)
        if kind == "dense crowd":  # similarities differ by less than float32 can tell
            return crowd(rng, n, d, 1e-5)
        rows = unit_rows(rng, n, d)
        if kind == "clusters":
            rows = unit_rows(rng, 9, d)[rng.integers(0, 9, n)] + rows * np.float32(1e-3)
        if kind == "copies":
            rows = rows[rng.integers(0, 60, n)]
        if kind == "outliers":  # one number is most of the row, and some rows are short or nought
            rows[:, 5] += 3.0
            rows[::7] *= np.float32(0.2)
            rows[::50] = 0.0
        return rows.astype(np.float32)

    anchors = side()
    candidates = None
    if ordered:
        candidates = side() if kind in ("spread", "outliers") else anchors[rng.permutation(n)]
    for k in (4, 300, 20_000, n * n):
        same(
            top_pairs(anchors, candidates, k=k),
            top_pairs(anchors, candidates, k=k, impl="reference"),
        )


def test_a_floor_guessed_too_high_is_taken_back(monkeypatch, tiles):
    tiles(128, 256)
    rows = unit_rows(np.random.default_rng(5), 700, 24)
    monkeypatch.setattr(pairs_module._Search, "_guessed_floor", lambda self: 0.99)
    same(top_pairs(rows, k=500), top_pairs(rows, k=500, impl="reference"))


def test_several_threads_find_the_same(tiles):
    tiles(64, 128)
    rng = np.random.default_rng(6)
    rows, threads = unit_rows(rng, 150, 40)[rng.integers(0, 150, 900)], torch.get_num_threads()
    blocks, truth = [], top_pairs(rows, k=700, impl="reference")
    torch.set_num_threads(3)
    try:
        same(top_pairs(rows, k=700, on_block=lambda done, total: blocks.append((done, total))), truth)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert [done for done, _ in blocks] == list(range(1, blocks[0][1] + 1))
    assert len({total for _, total in blocks}) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_search_can_be_abandoned(threads, tiles):
    class Abandoned(Exception):
        pass

    def stop(done, total):
        if done == 3:
            raise Abandoned

    tiles(32, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.raises(Abandoned):
            top_pairs(unit_rows(np.random.default_rng(0), 600, 8), k=4, on_block=stop)
    finally:
        torch.set_num_threads(before)


def test_memory_grows_with_the_rows_and_not_with_their_pairs():
    """Beside the vectors, 4,096 rows need less than a twentieth of their matrix's 64 MiB."""
    rows = unit_rows(np.random.default_rng(1), 4_096, 16)
    top_pairs(rows, k=4)
    tracemalloc.start()
    top_pairs(rows, k=4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak + 4 * pairs_module._TILE_ROWS * pairs_module._TILE_COLUMNS < 10 * 2**20


def bound(screen, i, j):
    """What float64 makes of the bound that the screen promises for the product of two rows, and of its estimate."""
    left, right = screen.left_terms[:, i].astype(np.float64), screen.right_terms[:, j].astype(np.float64)
    whole = screen.left_codes[i].numpy().astype(np.int64) @ screen.right_codes[j].numpy().astype(np.int64)
    error = left[2] * right[3] + right[2] * left[3] + left[2] * right[2]
    return left[0] * right[0] * whole + left[1] + right[1], error + screen.rounding


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 8),
    d=st.integers(1, 300),
    power=st.integers(-8, 2),
    shift=st.floats(-1.0, 1.0) | st.sampled_from([1e-45, 1e-30, 1e-12]),
    ordered=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_codes_are_within_their_bound(n, d, power, shift, ordered, seed):
    rng = np.random.default_rng(seed)
    left, right = (
        (shift + rng.standard_normal((n, d)) * 10.0**power * rng.integers(0, 2, (n, 1))).astype(np.float32)
        for _ in range(2)
    )
    screen = Screen.of(left, right if ordered else left)
    for i in range(n):
        for j in range(n):
            exact = math.fsum(
                float(x) * float(y) for x, y in zip(left[i], (right if ordered else left)[j], strict=True)
            )
            estimate, error = bound(screen, i, j)
            assert abs(exact - estimate) <= error
