"""q_N(i, j), the share of the push that a pair receives, against sums over all batches and against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from probe_service.estimate.push import push_of_row


def push_by_enumeration(similarities, own, size, temperature):
    """q_N(i, ·) from every batch that holds the anchor."""
    n = len(similarities)
    shares = [0.0] * n
    others = [column for column in range(n) if column != own]
    for batch in itertools.combinations(others, size - 1):
        largest = max(similarities[j] for j in batch)
        x = [math.exp((similarities[j] - largest) / temperature) for j in batch]
        for j, value in zip(batch, x, strict=True):
            shares[j] += value / math.fsum(x)
    return np.array(shares) / math.comb(n - 1, size - 1) / n


def push(similarities, own, sizes, temperature):
    found = push_of_row(similarities, own, sizes, temperature).of(similarities)
    found[own] = 0.0
    return found


@pytest.mark.parametrize("temperature", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 10, 13, 14])
def test_push_against_all_batches(size, temperature):
    rng = np.random.default_rng(size)
    similarities = np.clip(rng.normal(0.2, 0.2, 14), -1, 1).astype(np.float32)
    similarities[3], similarities[7], similarities[8] = 0.95, 1.0, 1.0
    expected = push_by_enumeration(similarities.tolist(), 7, size, temperature)
    found = push(similarities, 7, [size], temperature)[:, 0]
    # The formula's own error is O(1/n); an anchor whose push is misplaced by 0.015 is its limit here.
    assert np.abs(found - expected).max() * 14 < 0.015
    assert found.sum() * 14 == pytest.approx(1.0, abs=1e-3)


def test_a_batch_of_two_and_a_batch_of_all_are_exact():
    similarities = np.array([1.0, 0.3, -0.2, 0.8])
    found = push(similarities, 0, [2, 4], 0.1)
    assert found[1:, 0] == pytest.approx([1 / 12] * 3)
    x = np.exp(similarities[1:] / 0.1)
    assert found[1:, 1] == pytest.approx(x / x.sum() / 4)


def test_push_beyond_a_twentieth_of_the_rows_against_simulation():
    rng = np.random.default_rng(5)
    n, size, temperature, draws = 300, 150, 0.05, 8_000
    similarities = np.clip(rng.normal(0.2, 0.15, n), -1, 1)
    x = np.exp(similarities / temperature)
    x[0] = 0.0
    inside = np.zeros((draws, n))
    order = np.argsort(rng.random((draws, n - 1)), axis=1)[:, : size - 1] + 1
    np.put_along_axis(inside, order, 1.0, axis=1)
    weights = inside * x / (inside @ x)[:, None]
    expected, error = weights.mean(axis=0), weights.std(axis=0) / draws**0.5
    found = push(similarities, 0, [size], temperature)[:, 0] * n
    # Drawn with replacement, the integral would be off by about N/2n = a quarter.
    assert np.all(np.abs(found - expected)[1:] <= 4.5 * error[1:] + 2e-3 * expected[1:])


def test_the_push_of_equal_candidates_is_equal():
    found = push(np.full(50, 0.4), 0, [2, 7, 25, 50], 0.05)
    assert found[1:] == pytest.approx(np.full((49, 4), 1 / 49 / 50))


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="from 2 to 5"):
        push_of_row(np.zeros(5), 0, [6], 0.05)
