from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from probe_service.estimate import Evidence
from probe_service.estimate.exact import ExactShares, ShareAccumulator, expected_maximum
from probe_service.similarity import BIN_CENTRES, row_histograms
from tests.oracles import similarity_rows, softmax_share, unit_rows


def exact(rows, candidates, groups, *, largest, temperature, floor=None, blocks=2):
    evidence = Evidence.from_keys(None, None, groups)
    n = len(rows)
    everything = np.arange(n)[None, :]
    sums, histograms = 0.0, []
    for block in np.array_split(np.arange(n), blocks):
        accumulator = ShareAccumulator(
            BIN_CENTRES, lowest=-1.0, rows=n, largest=largest, temperature=temperature
        )
        for h in row_histograms(
            rows,
            candidates,
            block=slice(int(block[0]), int(block[-1]) + 1),
            thresholds=(0.5,),
            known=lambda b: evidence.known_pairs(everything, b),
            unjudged=evidence.unjudged_rows,
            worst_case_similarity=floor,
            checkpoint=lambda: None,
        ):
            accumulator.add(h.candidates, h.known, h.worst, h.own, lambda: None)
            histograms.append(h)
        sums = sums + accumulator.sums
    return ExactShares.from_sums(sums, rows=n), histograms


def simulated(rows, candidates, groups, size, temperature, floor, batches=4000):
    rng = np.random.default_rng(8)
    right = rows if candidates is None else candidates
    labels = np.array([-1 if g is None else ord(g[0]) for g in groups])
    s_all = (rows.astype(np.float64) @ right.astype(np.float64).T).clip(-1, 1)
    known, worst, update = [], [], []
    for _ in range(batches):
        batch = rng.choice(len(rows), size, replace=False)
        s = s_all[np.ix_(batch, batch)] / temperature
        own = np.diag(s).copy()
        np.fill_diagonal(s, -np.inf)
        x = np.exp(s - s.max(axis=1, keepdims=True))
        w = x / x.sum(axis=1, keepdims=True)
        judged = labels[batch] >= 0
        same = (labels[batch][:, None] == labels[batch][None, :]) & judged[:, None]
        open_ = ~(judged[:, None] & judged[None, :]) & (s * temperature >= floor)
        known.append((w * same).sum(axis=1).mean())
        worst.append((w * (same | open_)).sum(axis=1).mean())
        xi = np.exp(s - own[:, None]).sum(axis=1)
        v = xi / (1 + xi)
        update.append(((v * (w * same).sum(axis=1)).sum(), v.sum()))
    update = np.array(update)
    ratio = update[:, 0].sum() / update[:, 1].sum()
    ratio_error = np.std(update[:, 0] - ratio * update[:, 1]) / update[:, 1].mean() / batches**0.5
    return np.mean(known), np.mean(worst), ratio, np.std(known) / batches**0.5, ratio_error


@pytest.mark.parametrize("temperature", [0.05, 0.3])
@pytest.mark.parametrize("paired", [False, True])
def test_shares_agree_with_simulation_up_to_a_twentieth_of_the_rows(temperature, paired):
    rng = np.random.default_rng(3)
    centres = unit_rows(rng, 40, 12)
    labels = rng.integers(0, 40, 400)
    rows = centres[labels] + 0.15 * rng.standard_normal((400, 12))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    candidates = None
    if paired:
        candidates = rows + 0.1 * rng.standard_normal((400, 12))
        candidates = (candidates / np.linalg.norm(candidates, axis=1, keepdims=True)).astype(np.float32)
    groups = [None if rng.random() < 0.2 else chr(200 + label) for label in labels]
    found, histograms = exact(rows, candidates, groups, largest=20, temperature=temperature, floor=0.4)
    assert found.largest == 20
    for size in (2, 7, 20):
        known, worst, update, error, ratio_error = simulated(rows, candidates, groups, size, temperature, 0.4)
        assert found.known[size - 2] == pytest.approx(known, abs=4 * error + 0.003)
        assert found.worst[size - 2] == pytest.approx(worst, abs=4 * error + 0.004)
        if paired:
            assert found.known_update[size - 2] == pytest.approx(update, abs=4 * ratio_error + 0.005)
        else:
            assert found.known_update is None
    s = similarity_rows(rows[:50], rows if candidates is None else candidates)
    above = sum(s[i][j] >= 0.5 for i in range(50) for j in range(400) if i != j)
    first = next(h for h in histograms if h.rows.start == 0)
    assert first.candidates[:50, BIN_CENTRES >= 0.5].sum() == pytest.approx(above, abs=50)


def test_three_rows_by_hand():
    """Three rows at 0°, 60°, 180°; rows 0 and 1 mean the same; T = 1/ln 4, so that exp(s/T) = 4^s.

    N = 2: an anchor meets either other row, and the whole push lands on it: shares ½, ½, 0.
    """
    rows = np.array([[1, 0], [0.5, math.sqrt(3) / 2], [-1, 0]], dtype=np.float32)
    found, _ = exact(rows, None, ["a", "a", "b"], largest=2, temperature=1 / math.log(4), blocks=1)
    assert found.known[0] == pytest.approx(1 / 3, abs=1e-6)


def test_equal_rows_share_all():
    rows = np.tile(unit_rows(np.random.default_rng(0), 1, 6), (60, 1))
    found, _ = exact(rows, None, ["a"] * 60, largest=8, temperature=0.05)
    np.testing.assert_allclose(found.known, 1.0, atol=1e-9)


def test_expected_maximum_equals_counting_all_draws():
    rng = np.random.default_rng(4)
    values = np.sort(rng.integers(0, 6, 7))  # seven candidates on six similarities
    counts = np.bincount(values, minlength=6).astype(np.float32)[None, :]
    centres = np.linspace(-0.5, 0.5, 6)
    for size in range(2, 9):
        maxima = [
            max(centres[values[j]] for j in drawn) for drawn in itertools.combinations(range(7), size - 1)
        ]
        assert expected_maximum(counts, centres, size) == pytest.approx(np.mean(maxima), abs=1e-12)


def test_share_of_a_pair_with_its_definition_as_oracle():
    """N = 3 of n = 60 rows: the average over all pairs of other rows, by enumeration."""
    rng = np.random.default_rng(5)
    rows = unit_rows(rng, 60, 4)
    groups = [chr(97 + i % 6) for i in range(60)]
    s = similarity_rows(rows, rows)
    total = 0.0
    for i in range(60):
        others = [j for j in range(60) if j != i]
        for a, b in itertools.combinations(others, 2):
            row = [s[i][i], s[i][a], s[i][b]]
            names = [groups[i], groups[a], groups[b]]
            total += softmax_share(row, lambda p, q, names=names: names[p] == names[q], 0, 0.1)
    truth = total / (60 * math.comb(59, 2))
    found, _ = exact(rows, None, groups, largest=3, temperature=0.1)
    assert found.known[1] == pytest.approx(truth, rel=0.01)
