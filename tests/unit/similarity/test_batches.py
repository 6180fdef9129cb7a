from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.estimate.evidence import Evidence
from probe_service.similarity import batch_top_k, measure_batches, measure_windows, noise_similarity
from probe_service.similarity import pairs as pairs_module
from tests.oracles import negative_pairs, similarity_rows, softmax_share, unit_rows

THRESHOLDS = (0.0, 0.5, 0.95)


def never():
    return None


def measured(rows, candidates, groups, stack, *, temperature=0.2, k=3, floor=0.3, num_anchors=None):
    evidence = Evidence.from_keys(None, None, groups)
    unjudged = evidence.unjudged_rows
    return measure_batches(
        torch.from_numpy(rows[stack]),
        None if candidates is None else torch.from_numpy(candidates[stack]),
        temperature=temperature,
        k=k,
        thresholds=THRESHOLDS,
        known=lambda block: evidence.known_pairs(stack, block),
        certain=None,
        unjudged=None if unjudged is None else torch.from_numpy(unjudged[stack]),
        worst_case_similarity=floor,
        checkpoint=never,
        num_anchors=num_anchors,
    )


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(2, 12),
    distinct=st.integers(1, 20),
    batches=st.integers(1, 4),
    ordered=st.booleans(),
    temperature=st.sampled_from([0.01, 0.05, 0.3]),
    block=st.sampled_from([1, 5, 4_000_000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_figure_follows_its_definition(size, distinct, batches, ordered, temperature, block, seed):
    rng = np.random.default_rng(seed)
    n, k, floor = 20, 3, 0.3
    rows = unit_rows(rng, distinct, 5)[rng.integers(0, distinct, n)]
    candidates = unit_rows(rng, n, 5) if ordered else None
    groups = [[None, "a", "b", "c"][g] for g in rng.integers(0, 4, n)]
    if block != 4_000_000:
        batches = 1
    stack = np.array([rng.choice(n, size, replace=False) for _ in range(batches)])
    before = pairs_module.BLOCK_ELEMENTS
    pairs_module.BLOCK_ELEMENTS = block
    try:
        found = measured(rows, candidates, groups, stack, temperature=temperature, k=k, floor=floor)
    finally:
        pairs_module.BLOCK_ELEMENTS = before

    for b, batch in enumerate(stack):
        left = rows[batch]
        right = left if candidates is None else candidates[batch]
        s = similarity_rows(left, right)

        def same(i, j, batch=batch):
            return groups[batch[i]] is not None and groups[batch[i]] == groups[batch[j]]

        def worst(i, j, batch=batch, s=s, same=same):
            unjudged = groups[batch[i]] is None or groups[batch[j]] is None
            # Cosines within 1e-6 of s₀ may fall either side in float32; none are, with these seeds.
            return same(i, j) or (unjudged and s[i][j] >= floor)

        others = [[j for j in range(size) if j != i] for i in range(size)]
        pairs = sorted(
            (p[0] for p in negative_pairs(left, None if candidates is None else right)), reverse=True
        )
        top = (pairs + [math.nan] * k)[:k]
        np.testing.assert_allclose(found.top_k[b], top, atol=2e-6)
        masked = sorted(
            (
                p[0]
                for p in negative_pairs(left, None if candidates is None else right)
                if not same(p[1], p[2])
            ),
            reverse=True,
        )
        np.testing.assert_allclose(found.masked_top_k[b], (masked + [math.nan] * k)[:k], atol=2e-6)
        assert found.hardest_negative[b] == pytest.approx(
            np.mean([max(s[i][j] for j in others[i]) for i in range(size)]), abs=2e-6
        )
        false = [softmax_share(s[i], same, i, temperature) for i in range(size)]
        assert found.false_share[b] == pytest.approx(np.mean(false), abs=1e-4)
        worst_share = [softmax_share(s[i], worst, i, temperature) for i in range(size)]
        assert found.worst_share[b] == pytest.approx(np.mean(worst_share), abs=1e-4)
        assert found.false_count[b] == pytest.approx(
            np.mean([sum(same(i, j) for j in others[i]) for i in range(size)])
        )
        assert found.worst_any_share[b] == pytest.approx(
            np.mean([any(worst(i, j) for j in others[i]) for i in range(size)])
        )
        effective = []
        for i in range(size):
            x = [math.exp((s[i][j] - 1) / temperature) for j in others[i]]
            effective.append(math.fsum(x) ** 2 / math.fsum(v * v for v in x))
        assert found.effective_negatives[b] == pytest.approx(np.mean(effective), rel=1e-3)
        if candidates is not None:
            xi = [
                math.fsum(math.exp((s[i][j] - s[i][i]) / temperature) for j in others[i]) for i in range(size)
            ]
            v = [x / (1 + x) for x in xi]
            np.testing.assert_allclose(np.exp(found.log_xi[b]), xi, rtol=1e-3)
            assert found.update_weight[b] == pytest.approx(sum(v), rel=1e-4)
            assert found.false_update[b] == pytest.approx(
                sum(vi * f for vi, f in zip(v, false, strict=True)), abs=1e-4 * size
            )
            assert found.effective_anchors_share[b] == pytest.approx(
                sum(v) ** 2 / (size * sum(x * x for x in v)), rel=1e-3
            )


def test_four_rows_by_hand():
    # Two pairs of equal rows at right angles; T = 1/ln 2, so that exp(s/T) is 2 for s = 1 and 1 for s = 0.
    rows = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], dtype=np.float32)
    found = measured(
        rows, None, ["a", "a", "b", "c"], np.arange(4)[None, :], temperature=1 / math.log(2), k=3
    )
    # Weights of each anchor: its twin 2/4, the two others 1/4 each. Only rows 0 and 1 are known twins.
    assert found.false_share[0] == pytest.approx((0.5 + 0.5 + 0 + 0) / 4)
    assert found.top_k[0].tolist() == [1.0, 1.0, 0.0]
    assert found.masked_top_k[0].tolist() == [1.0, 0.0, 0.0]
    assert found.pairs_above[0].tolist() == [6.0, 2.0, 2.0]
    assert found.hardest_negative[0] == 1.0
    assert found.effective_negatives[0] == pytest.approx(1 / (0.25 + 0.0625 + 0.0625))


@pytest.mark.parametrize("ordered", [False, True])
def test_some_anchors_stand_for_all(ordered):
    # The mean over every choice of who comes first is what all anchors give.
    rng = np.random.default_rng(3)
    rows = unit_rows(rng, 6, 4)
    candidates = unit_rows(rng, 6, 4) if ordered else None
    groups = ["a", "b", None, "a", "b", "a"]
    turns = np.array([np.roll(np.arange(6), turn) for turn in range(6)])
    everyone = measured(rows, candidates, groups, turns[:1], k=0)
    some = measured(rows, candidates, groups, turns, k=0, num_anchors=2)
    for name in ("false_share", "worst_share", "false_count", "effective_negatives", "hardest_negative"):
        assert getattr(some, name).mean() == pytest.approx(getattr(everyone, name)[0], rel=1e-5)
    np.testing.assert_allclose(some.pairs_above.mean(axis=0), everyone.pairs_above[0])
    assert np.isnan(some.any_above).all()
    if ordered:
        assert some.log_xi.shape == (6, 2)
        assert 3 * some.update_weight.mean() == pytest.approx(everyone.update_weight[0], rel=1e-5)
    with pytest.raises(ValueError, match="most similar pairs"):
        measured(rows, candidates, groups, turns, k=1, num_anchors=2)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 9),
    num_anchors=st.integers(1, 10),
    ordered=st.booleans(),
    temperature=st.sampled_from([0.002, 0.05, 0.4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_windows_are_batches_of_consecutive_rows(n, num_anchors, ordered, temperature, seed):
    rng = np.random.default_rng(seed)
    rows = unit_rows(rng, n, 4)
    candidates = unit_rows(rng, n, 4) if ordered else None
    groups = [[None, "a", "b"][g] for g in rng.integers(0, 3, n)]
    evidence = Evidence.from_keys(None, None, groups)
    unjudged = evidence.unjudged_rows
    floor = 0.25
    found = measure_windows(
        torch.from_numpy(rows),
        None if candidates is None else torch.from_numpy(candidates),
        num_anchors=num_anchors,
        temperature=temperature,
        known=lambda block: evidence.known_pairs(np.arange(n)[None, :], block),
        unjudged=None if unjudged is None else torch.from_numpy(unjudged),
        worst_case_similarity=floor,
        checkpoint=never,
    )
    s = similarity_rows(rows, rows if candidates is None else candidates)
    for size in range(2, n + 1):
        false, worst = [], []
        for start in range(min(n, num_anchors)):
            batch = [(start + t) % n for t in range(size)]
            row = [s[start][j] for j in batch]

            def same(i, j, batch=batch):
                return groups[batch[i]] is not None and groups[batch[i]] == groups[batch[j]]

            def bad(i, j, batch=batch, same=same, row=row):
                return same(i, j) or (
                    (groups[batch[i]] is None or groups[batch[j]] is None) and row[j] >= floor
                )

            false.append(softmax_share(row, same, 0, temperature))
            worst.append(softmax_share(row, bad, 0, temperature))
        assert found.false_share[size - 2] == pytest.approx(np.mean(false), abs=2e-3)
        assert found.worst_share[size - 2] == pytest.approx(np.mean(worst), abs=2e-3)


def test_top_k_of_a_batch_smaller_than_k_has_no_values_beyond_its_pairs():
    values = batch_top_k(torch.eye(3)[None], None, k=5)[0]
    assert values[:3].tolist() == [0.0, 0.0, 0.0]
    assert np.isnan(values[3:]).all()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("batches", "size", "d", "k"), [(40, 2, 3, 4), (30, 9, 1, 40), (3, 50, 384, 4), (1, 600, 8, 5)]
)
def test_top_k_of_batches_against_loops(batches, size, d, k, ordered, fast, monkeypatch):
    if not fast:
        monkeypatch.setattr("probe_service.similarity.batches.int8_pays", lambda: False)
    rng = np.random.default_rng(size)
    rows = unit_rows(rng, batches * size, d).reshape(batches, size, d)
    rows[:, size // 2] = rows[:, 0]  # the same row twice
    candidates = unit_rows(rng, batches * size, d).reshape(batches, size, d) if ordered else None
    found = batch_top_k(
        torch.from_numpy(rows), None if candidates is None else torch.from_numpy(candidates), k=k
    )
    assert found.shape == (batches, k)
    for b in range(batches):
        if size > 100:  # loops would take long
            s = (
                rows[b].astype(np.float64)
                @ (rows if candidates is None else candidates)[b].astype(np.float64).T
            )
            best = np.sort(s[~np.eye(size, dtype=bool) if ordered else np.triu_indices(size, 1)])[::-1]
        else:
            best = sorted(
                p[0] for p in negative_pairs(rows[b], None if candidates is None else candidates[b])
            )[::-1]
        expected = (list(np.clip(best, -1.0, 1.0)) + [math.nan] * k)[:k]
        np.testing.assert_allclose(found[b], expected, atol=1e-12)


def test_noise_similarity_by_hand():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    # Noise along x, of length 3: cosines 1 and 0.
    assert noise_similarity(rows, torch.tensor([[3.0, 0.0]])) == (0.5, 1.0)


def test_noise_similarity_of_many_rows():
    rng = np.random.default_rng(7)
    rows, noise = unit_rows(rng, 700, 24), rng.standard_normal((2100, 24)).astype(np.float32)
    noise[1234] = 5 * rows[99]
    mean, largest = noise_similarity(torch.from_numpy(rows), torch.from_numpy(noise))
    lengths = np.linalg.norm(noise.astype(np.float64), axis=1)
    cosines = rows.astype(np.float64) @ noise.astype(np.float64).T / lengths
    assert (mean, largest) == pytest.approx((cosines.mean(), 1.0), abs=1e-7)
    noise[1234] = 0.1
    _, largest = noise_similarity(torch.from_numpy(rows), torch.from_numpy(noise))
    cosines[:, 1234] = rows.astype(np.float64).sum(axis=1) / 24**0.5
    assert largest == pytest.approx(cosines.max(), abs=1e-7)
