from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.similarity import indexed_pairs as module
from probe_service.similarity.indexed_pairs import indexed_pairs
from probe_service.similarity.nearest import VectorIndex
from tests.oracles import negative_pairs, unit_rows


def nothing():
    pass


def found(anchors, candidates=None, **options):
    return indexed_pairs(
        anchors, candidates, **({"kind": "flat", "seed": 0, "checkpoint": nothing} | options)
    )


def listed(result):
    return list(zip(result.pairs.anchor.tolist(), result.pairs.candidate.tolist(), strict=True))


def exact_rows(rng, n):
    """Rows of ±½ in four dimensions: their cosines are multiples of ½, without any rounding, so ties are the rule."""
    return rng.choice(np.float32([-0.5, 0.5]), (n, 4))


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(1, 40),
    count=st.integers(1, 60),
    ordered=st.booleans(),
    at_least=st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]),
    lists=st.sampled_from([(1,), (2, 4), (17, 129, 1025)]),
    tile=st.sampled_from([(3, 12), (256, 4_000_000)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_flat_index_gives_the_pairs_of_brute_force_with_all_ties(
    n, count, ordered, at_least, lists, tile, seed
):
    rng = np.random.default_rng(seed)
    # Sixteen vectors at most: most rows have twins, every cosine is tied, and every list is crowded.
    anchors = exact_rows(rng, n)
    candidates = exact_rows(rng, n) if ordered else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LIST_LENGTHS", lists)
        patch.setattr(module, "_SPARE_PAIRS", 0)
        patch.setattr(module, "_TILE_ROWS", tile[0])
        patch.setattr(module, "BLOCK_ELEMENTS", tile[1])
        result = found(anchors, candidates, count=count, at_least=at_least)
    truth = [pair for pair in negative_pairs(anchors, candidates) if pair[0] >= at_least]
    truth.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    assert listed(result) == [(i, j) for _, i, j in truth[:count]]
    assert result.pairs.similarity.tolist() == [s for s, _, _ in truth[:count]]
    assert result.truncated == (len(truth) > count)
    assert (result.kind, result.sample) == ("flat", None)


@pytest.mark.parametrize("ordered", [False, True])
def test_every_pair_above_a_similarity_of_crowded_rows(ordered):
    rng = np.random.default_rng(5)
    # A crowd of 300 rows round one direction, among 600 that are spread: their lists of 17 do not reach down to θ.
    crowd = unit_rows(rng, 1, 32) + 0.05 * rng.standard_normal((300, 32))
    rows = np.concatenate([crowd, rng.standard_normal((600, 32))])
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)[rng.permutation(900)]
    candidates = rows[rng.permutation(900)] if ordered else None
    right = rows if candidates is None else candidates
    similarity = rows.astype(np.float64) @ right.astype(np.float64).T
    negative = ~np.eye(900, dtype=bool) if ordered else np.triu(np.ones((900, 900), dtype=bool), 1)
    at_least = float(np.sort(similarity[negative])[-20_000])
    result = found(rows, candidates, count=1_000_000, at_least=at_least - 1e-9)
    i, j = np.nonzero(negative & (similarity >= at_least - 1e-9))
    assert sorted(listed(result)) == sorted(zip(i.tolist(), j.tolist(), strict=True))
    assert not result.truncated
    np.testing.assert_allclose(
        result.pairs.similarity, similarity[result.pairs.anchor, result.pairs.candidate], atol=1e-12
    )


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("ordered", [False, True])
def test_an_approximate_index_tells_what_it_misses(kind, ordered):
    rng = np.random.default_rng(7)
    centres = unit_rows(rng, 400, 24)
    rows = centres[rng.integers(0, 400, 2_000)] + 0.12 * rng.standard_normal((2_000, 24))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    candidates = rows[rng.permutation(2_000)] if ordered else None
    right = rows if candidates is None else candidates
    similarity = rows.astype(np.float64) @ right.astype(np.float64).T
    negative = ~np.eye(2_000, dtype=bool) if ordered else np.triu(np.ones((2_000, 2_000), dtype=bool), 1)
    truth = set(zip(*(side.tolist() for side in np.nonzero(negative & (similarity >= 0.7))), strict=True))
    result = found(rows, candidates, count=100_000, at_least=0.7, kind=kind)
    pairs = listed(result)
    assert len(set(pairs)) == len(pairs)
    assert set(pairs) <= truth
    recall = len(pairs) / len(truth)
    assert recall > 0.9
    sample = result.sample
    assert len(sample.pairs) == 1_000
    assert (sample.found <= sample.pairs).all()
    # 1,000 of 2,000 rows: the share of their pairs that is listed is that of all pairs, but for the draw.
    assert sample.found.sum() / sample.pairs.sum() == pytest.approx(recall, abs=0.02)
    assert sample.nearest_found.mean() > 0.9
    again = found(rows, candidates, count=100_000, at_least=0.7, kind=kind)
    assert listed(again) == pairs


def test_the_sample_counts_what_the_list_lacks(monkeypatch):
    rng = np.random.default_rng(2)
    rows = unit_rows(rng, 300, 6)
    similarity = np.triu(rows.astype(np.float64) @ rows.astype(np.float64).T, 1)
    # An index with one cell in reach of each row, so that it misses much.
    monkeypatch.setattr("probe_service.similarity.nearest._PROBES", 1)
    monkeypatch.setattr("probe_service.similarity.nearest._CANDIDATES_PER_NEIGHBOUR", 0)
    monkeypatch.setattr(module, "_TILE_ROWS", 7)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 700)
    result = found(rows, count=10_000, at_least=0.8, kind="ivf")
    pairs = set(listed(result))
    truth = set(zip(*(side.tolist() for side in np.nonzero(similarity >= 0.8)), strict=True))
    assert pairs < truth
    # All 300 rows are in the sample: each pair is seen from both of its rows.
    assert result.sample.pairs.sum() == 2 * len(truth)
    assert result.sample.found.sum() == 2 * len(pairs)
    # Each row's list is the rest of its cell; the nearest row is in it or not.
    lists = {}
    for block in VectorIndex(rows, kind="ivf", seed=0, checkpoint=nothing).nearest(rows, 300):
        lists |= dict(zip(block.query.tolist(), block.row, strict=True))
    nearest = (similarity + similarity.T).argmax(axis=1)
    expected = [nearest[row] in lists[row] for row in range(300)]
    assert result.sample.nearest_found.tolist() == expected
    assert 0 < sum(expected) < 300


def test_truncation_keeps_the_most_similar_pairs_and_says_so():
    rows = unit_rows(np.random.default_rng(3), 120, 5)
    truth = sorted(negative_pairs(rows), reverse=True)
    result = found(rows, count=50, at_least=truth[79][0] - 1e-9, kind="ivf")
    assert result.truncated
    np.testing.assert_allclose(result.pairs.similarity, [s for s, _, _ in truth[:50]], atol=1e-12)
    # What was cut off is not held against the index.
    assert result.sample.pairs.sum() in (98, 100)
    exactly = found(rows, count=80, at_least=truth[79][0] - 1e-9)
    assert (exactly.truncated, len(exactly.pairs.similarity)) == (False, 80)


def test_similarities_at_the_limit_are_in():
    rows = np.float32([[1, 0], [0.6, 0.8], [0, 1]])
    # float32(0.6) is the cosine of rows 0 and 1 to the last bit.
    limit = float(np.float32(0.6))
    assert listed(found(rows, count=9, at_least=limit)) == [(1, 2), (0, 1)]
    assert listed(found(rows, count=9, at_least=np.nextafter(limit, 1))) == [(1, 2)]


def test_rows_that_are_all_equal_are_answered_without_looking_at_their_pairs():
    rows = np.tile(unit_rows(np.random.default_rng(0), 1, 64), (20_000, 1))
    result = found(rows, count=4, at_least=0.9)
    assert listed(result) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert result.truncated


@pytest.mark.parametrize("ordered", [False, True])
def test_one_row_has_no_pair(ordered):
    row = np.float32([[0.6, 0.8]])
    result = found(row, row if ordered else None, count=3)
    assert (listed(result), result.truncated) == ([], False)


def test_a_checkpoint_that_raises_ends_the_search():
    calls = itertools.count()

    def checkpoint():
        if next(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        indexed_pairs(unit_rows(np.random.default_rng(0), 3_000, 8), count=5, seed=0, checkpoint=checkpoint)


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_nearest_rows_against_numpy(kind):
    rng = np.random.default_rng(1)
    rows, queries = unit_rows(rng, 1_500, 12), unit_rows(rng, 70, 12)
    truth = queries.astype(np.float64) @ rows.astype(np.float64).T
    index = VectorIndex(rows, kind=kind, seed=0, checkpoint=nothing)
    hits = 0
    for block in index.nearest(queries, 10):
        for query, row, similarity in zip(block.query, block.row, block.similarity, strict=True):
            np.testing.assert_allclose(similarity, truth[query, row], atol=1e-6)
            assert (np.diff(similarity) <= 0).all()
            hits += len(set(row.tolist()) & set(np.argsort(-truth[query])[:10].tolist()))
    assert hits == 700 if kind == "flat" else hits > 600


def test_lists_are_no_longer_than_there_are_rows():
    rows = unit_rows(np.random.default_rng(1), 5, 3)
    for kind in ("flat", "ivf", "hnsw"):
        (block,) = VectorIndex(rows, kind=kind, seed=0, checkpoint=nothing).nearest(rows, 2_048)
        assert block.row.shape == (5, 5)
    with pytest.raises(ValueError, match="2048"):
        next(VectorIndex(rows, seed=0, checkpoint=nothing).nearest(rows, 2_049))
