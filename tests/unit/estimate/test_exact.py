from __future__ import annotations

import gzip
import itertools
import json
import math

import numpy as np
import pytest
import torch

from probe_service.encode import VectorCache, encode_with_cache, load_encoder
from probe_service.estimate import Evidence
from probe_service.estimate.exact import (
    TEMPERATURES,
    ExactShares,
    ShareAccumulator,
    ShareGrid,
    SizeScan,
    expected_maximum,
)
from probe_service.settings import Settings
from probe_service.similarity import BIN_CENTRES, measure_batches, row_histograms
from tests.oracles import similarity_rows, softmax_share, unit_rows
from tests.unit.estimate.all_batches import (
    CENTRES,
    histogram,
    others,
    push_of_all_batches,
    shares_of_random_batches,
    small_corpus,
)


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
        ):
            accumulator.add(h.candidates, h.known, h.worst, h.own)
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
        assert found.known[size - 2] == pytest.approx(known, abs=4 * error + 5e-4)
        assert found.worst[size - 2] == pytest.approx(worst, abs=4 * error + 5e-4)
        if paired:
            assert found.known_update[size - 2] == pytest.approx(update, abs=4 * ratio_error + 5e-4)
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


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("temperature", [0.01, 0.05, 0.2])
def test_shares_against_all_batches(temperature, paired):
    s, known = small_corpus(4, 9, paired=paired)
    worst = known | (s > 0.4) & others(s)
    accumulator = ShareAccumulator(CENTRES, lowest=-1.0, rows=9, largest=4, temperature=temperature)
    accumulator.add(histogram(s, others(s)), histogram(s, known), histogram(s, worst), None)
    found = ExactShares.from_sums(accumulator.sums, rows=9)
    for size, error in ((2, 1e-6), (3, 2e-5), (4, 1e-2)):  # exact up to N = 3; N = 4 is far beyond n/20
        push, _ = push_of_all_batches(s, size, temperature)
        assert found.known[size - 2] == pytest.approx(push[known].sum(), abs=error)
        assert found.worst[size - 2] == pytest.approx(push[worst].sum(), abs=error)


def test_updates_against_all_batches():
    """G = E[Σ v_i Σ_j w_ij p_ij] / E[Σ v_i], v_i w_ij = x_ij / (x_ii + Σ_j x_ij), for batches of two and of three."""
    s, known = small_corpus(6, 8, paired=True)
    temperature = 0.1
    accumulator = ShareAccumulator(CENTRES, lowest=-1.0, rows=8, largest=3, temperature=temperature)
    accumulator.add(histogram(s, others(s)), histogram(s, known), None, np.diag(s))
    found = ExactShares.from_sums(accumulator.sums, rows=8)
    for size in (2, 3):
        false, everything = 0.0, 0.0
        for batch in itertools.combinations(range(8), size):
            for i in batch:
                x = {j: math.exp(s[i, j] / temperature) for j in batch}
                total = math.fsum(x.values())
                false += math.fsum(x[j] for j in batch if known[i, j]) / total
                everything += math.fsum(x[j] for j in batch if j != i) / total
        assert found.known_update[size - 2] == pytest.approx(false / everything, abs=2e-5)


def test_the_grid_of_sizes_and_temperatures_agrees_with_the_scan_and_with_batches():
    rng = np.random.default_rng(1)
    n, sizes = 400, (2, 9, 20)
    labels = rng.integers(0, 50, n)
    known = (labels[:, None] == labels[None, :]) & others(np.eye(n))
    s = np.where(known, 0.6, 0.25) + 0.15 * rng.standard_normal((n, n))
    s = np.rint(np.clip(s, -1, 1) * 1024) / 1024
    worst = known | (s >= 0.5) & others(s)
    layers = [histogram(s, mask) for mask in (others(s), known, worst)]
    temperatures = (0.01, 0.05, 0.2)
    parts = [ShareGrid(CENTRES, n, sizes, temperatures) for _ in range(2)]
    parts[0].add(*(layer[:150] for layer in layers))
    parts[1].add(*(layer[150:] for layer in layers))
    parts[0].sums += parts[1].sums
    found = parts[0].shares()
    assert found.shape == (2, 3, 3)
    for row, temperature in enumerate(temperatures):
        accumulator = ShareAccumulator(CENTRES, lowest=-1.0, rows=n, largest=20, temperature=temperature)
        accumulator.add(*layers, None)
        scan = ExactShares.from_sums(accumulator.sums, rows=n)
        at = [size - 2 for size in sizes]
        np.testing.assert_allclose(found[:, row], [scan.known[at], scan.worst[at]], rtol=1e-5)
        runs = shares_of_random_batches(s, known, 20, temperature, rng, batches=2000)[:, 0]
        assert abs(found[0, row, 2] - runs.mean()) < 4 * runs.std() / len(runs) ** 0.5


def test_every_size_is_known_from_some():
    rng = np.random.default_rng(0)
    similarities = rng.normal(0.3, 0.15, (30, 2400)).clip(-1, 1)
    layers = [
        np.stack([np.histogram(row, 2049, (-1.0005, 1.0005))[0] for row in part]).astype(np.float32)
        for part in (similarities, similarities[:, :20] + 0.2)
    ]
    every = ShareGrid(CENTRES, 30, range(2, 121), [0.03])
    every.add(*layers, None)
    scan = SizeScan(120)
    assert (scan.sizes[0], scan.sizes[-1]) == (2, 120)
    assert len(scan.sizes) < 40
    some = ShareGrid(CENTRES, 30, scan.sizes, [0.03])
    some.add(*layers, None)
    found = scan.at_every_size(some.shares()[0, 0])
    np.testing.assert_allclose(found, every.shares()[0, 0], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(SizeScan(9).at_every_size(np.arange(8.0)), np.arange(8.0))


def test_temperatures_are_evenly_spaced_and_hold_the_default():
    assert len(TEMPERATURES) == 20
    assert (TEMPERATURES[0], TEMPERATURES[10], TEMPERATURES[-1]) == (0.01, 0.05, 0.2)
    steps = np.diff(np.log(TEMPERATURES))
    assert steps.min() > 0.15
    assert steps.max() < 0.165


def test_temperatures_out_of_range_and_candidates_too_many_are_refused():
    with pytest.raises(ValueError, match="have to be sampled"):
        ShareGrid(CENTRES, 10, [2], [0.002])
    s, known = small_corpus(1, 5)
    accumulator = ShareAccumulator(CENTRES, lowest=-1.0, rows=4, largest=2, temperature=0.05)
    with pytest.raises(ValueError, match="more than 3 candidates"):
        accumulator.add(histogram(s, others(s)), histogram(s, known), None, None)


@pytest.fixture(scope="module")
def utterances(labelled_corpora, tmp_path_factory):
    """Vectors of 300 utterances, and the number of each one's intent."""
    with gzip.open(labelled_corpora / "labels" / "hwu64.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    some = [rows[i] for i in np.random.default_rng(3).permutation(len(rows))[:300]]
    loaded = load_encoder("minilm", Settings())
    cache = VectorCache(tmp_path_factory.mktemp("vectors"), loaded.info.fingerprint, loaded.info.dimension)
    vectors = encode_with_cache(loaded, [row["text"] for row in some], cache).vectors
    return vectors, np.unique([row["label"] for row in some], return_inverse=True)[1]


@pytest.mark.parametrize("paired", [False, True])
def test_exact_and_sampled_figures_agree_on_real_vectors(utterances, paired):
    """A small version of benchmarks/exact_against_sampled.py."""
    vectors, labels = utterances
    n, size, batches, rng = len(vectors), 15, 2000, np.random.default_rng(4)
    groups = [None if i % 10 == 0 else str(label) for i, label in enumerate(labels)]
    positives = None
    if paired:
        positives = vectors[[rng.choice(np.flatnonzero(labels == label)) for label in labels]]
    found, histograms = exact(vectors, positives, groups, largest=size, temperature=0.05, floor=0.6)
    evidence = Evidence.from_keys(None, None, groups)
    rows = np.stack([rng.choice(n, size, replace=False) for _ in range(batches)])
    assert evidence.unjudged_rows is not None
    batch = measure_batches(
        torch.from_numpy(vectors[rows]),
        None if positives is None else torch.from_numpy(positives[rows]),
        temperature=0.05,
        k=1,
        thresholds=(0.5,),
        known=lambda block: evidence.known_pairs(rows, block),
        certain=None,
        unjudged=torch.from_numpy(evidence.unjudged_rows[rows]),
        worst_case_similarity=0.6,
        checkpoint=lambda: None,
    )
    hardest = sum(expected_maximum(h.candidates, BIN_CENTRES, size) * len(h.candidates) for h in histograms)
    above = sum(h.above[0] for h in histograms) / (1 if paired else 2)
    compared = [
        (found.known[-1], batch.false_share),
        (found.worst[-1], batch.worst_share),
        (hardest / n, batch.hardest_negative),
        (above / n / (n - 1) * size * (size - 1), batch.pairs_above[:, 0]),
    ]
    if paired:
        ratio = found.known_update[-1]
        compared.append(
            (0.0, (batch.false_update - ratio * batch.update_weight) / batch.update_weight.mean())
        )
    for value, over_batches in compared:
        assert abs(value - over_batches.mean()) < 4 * over_batches.std() / batches**0.5


def test_bins_cost_next_to_nothing_on_real_vectors(utterances):
    """S of 40 anchors among 300 utterances at seven temperatures, from bins and from the similarities themselves.

    At N = 3 the oracle is the definition, a sum over pairs of candidates. At N = n/20 it is the integral over t, drawn without
    replacement to first order, by a rule of its own with twice the points.
    """
    vectors, labels = utterances
    n, anchors, size, temperatures = len(vectors), 40, 15, TEMPERATURES[::3]
    evidence = Evidence.from_keys(None, None, labels.astype(str).tolist())
    grid = ShareGrid(BIN_CENTRES, anchors, [2, 3, size], temperatures)
    for found in row_histograms(
        vectors,
        None,
        block=slice(0, anchors),
        thresholds=(),
        known=lambda block: evidence.known_pairs(np.arange(n)[None, :], block),
        unjudged=None,
        worst_case_similarity=None,
    ):
        grid.add(found.candidates, found.known, found.worst)
    expected = np.zeros((len(temperatures), 3))
    for i in range(anchors):
        rest = np.arange(n) != i
        s = np.clip(vectors.astype(np.float64) @ vectors[i].astype(np.float64), -1, 1)[rest]
        known = labels[rest] == labels[i]
        for row, temperature in enumerate(temperatures):
            log_x = (s - s.max()) / temperature
            x = np.exp(log_x)
            against = x[:, None] / (x[:, None] + x[None, :])
            np.fill_diagonal(against, 0.0)
            expected[row, 0] += known.mean()
            expected[row, 1] += against[known].sum() * 2 / (n - 1) / (n - 2)
            t = np.exp(np.arange(np.log(1e-6), np.log(50) - log_x.min(), np.log(2) / 2))
            y = np.exp(-x[:, None] * t)
            drawn, total = size - 2, y.sum(axis=0)
            spread = (y**2).mean(axis=0) / y.mean(axis=0) ** 2 - 1
            survival = y.mean(axis=0) ** drawn * np.exp(-spread * drawn * (drawn - 1) / 2 / (n - 2)) * t
            push = (x[:, None] * y * np.maximum(1 - drawn * y / total * (n - 1) / (n - drawn), 0)) @ survival
            expected[row, 2] += push[known].sum() / push.sum()
    error = np.abs(grid.shares()[0] - expected / anchors)
    assert error.max() < 1e-4
    assert error[:, 1].max() < 1e-5
