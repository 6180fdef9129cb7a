"""The Triton kernel finds the pairs that a float64 oracle finds.

Under Triton's interpreter, which conftest.py turns on; on a GPU, run this file with TRITON_INTERPRET=0.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.oracles import unit_rows

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from probe_service.similarity import batch_top_k, device, top_pairs, triton_pairs
from probe_service.similarity.triton_pairs import (
    HISTOGRAM_BINS,
    PairScreen,
    Tiling,
    batch_top_k_on_device,
    pairs_near_best,
    top_pairs_on_device,
)

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def on_device(rows):
    return None if rows is None else torch.from_numpy(rows).to(DEVICE)


def similarities(anchors, candidates):
    """(N, N) float64; NaN where there is no negative pair."""
    right = anchors if candidates is None else candidates
    # Row by row, so that equal rows give equal products to the last bit.
    products = np.array(
        [[np.dot(x, y) for y in right.astype(np.float64)] for x in anchors.astype(np.float64)]
    )
    no_pair = np.eye(len(anchors), dtype=bool) if candidates is not None else np.tri(len(anchors), dtype=bool)
    return np.where(no_pair, np.nan, np.clip(products, -1.0, 1.0))


def check(anchors, candidates, k):
    found = top_pairs_on_device(on_device(anchors), on_device(candidates), k=k)
    truth = similarities(anchors, candidates)
    i, j = np.nonzero(~np.isnan(truth))
    # Values that differ by less than float64 rounds are one value: the order of additions is not the oracle's.
    order = np.lexsort((j, i, -np.round(truth[i, j], 12)))[:k]
    np.testing.assert_allclose(found.similarity, truth[i, j][order], atol=1e-12)
    assert found.anchor.tolist() == i[order].tolist()
    assert found.candidate.tolist() == j[order].tolist()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "k"),
    [
        (1, 3, 2),
        (2, 1, 1),
        (3, 5, 50),
        (65, 64, 1),
        (100, 7, 4),
        (127, 130, 64),
        (150, 65, 90),
        (40, 1024, 4),
    ],
)
def test_same_pairs_as_float64(n, d, k, ordered):
    rng = np.random.default_rng(n)
    check(unit_rows(rng, n, d), unit_rows(rng, n, d) if ordered else None, k)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("k", [3, 70, 2000])
def test_ties_and_duplicates_go_by_row(k, ordered):
    rng = np.random.default_rng(k)
    rows = unit_rows(rng, 9, 24)[rng.integers(0, 9, 80)]
    check(rows, rows[rng.permutation(80)] if ordered else None, k)


def test_all_rows_equal():
    check(np.tile(unit_rows(np.random.default_rng(0), 1, 32), (90, 1)), None, 5)


@pytest.mark.parametrize("k", [4, 300])
def test_crowded_vectors(k):
    """All cosines lie within what bfloat16 moves them by, so that nothing can be ruled out."""
    rng = np.random.default_rng(5)
    centre = unit_rows(rng, 1, 48)
    rows = centre + 3e-2 * unit_rows(rng, 120, 48)
    check((rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), None, k)


@pytest.mark.parametrize("tiling", [Tiling(128, 256, 64, 8, 3), Tiling(64, 32, 32, 4, 3)])
def test_every_tiling_counts_and_finds_all(tiling):
    rng = np.random.default_rng(2)
    anchors = unit_rows(rng, 270, 40)
    found = pairs_near_best(on_device(anchors), None, k=6, with_histogram=True, tiling=tiling)
    truth = similarities(anchors, None)
    best = np.argsort(np.nan_to_num(truth, nan=-2.0).ravel())[::-1][:6]
    assert set(best.tolist()) <= set((found.anchor * 270 + found.candidate).tolist())
    counts = found.histogram.cpu().numpy()
    assert counts.sum() == 270 * 269 / 2
    # A pair may cross an edge by what bfloat16 moves it by, .008 at most with rows of unit length.
    edges = np.linspace(-1, 1, HISTOGRAM_BINS + 1)[1:-1]
    below, values = np.cumsum(counts)[:-1], truth[~np.isnan(truth)]
    assert (below >= [(values < edge - 0.008).sum() for edge in edges]).all()
    assert (below <= [(values < edge + 0.008).sum() for edge in edges]).all()


def test_bounds_hold_for_every_pair():
    rng = np.random.default_rng(8)
    anchors, candidates = unit_rows(rng, 50, 300), unit_rows(rng, 50, 300)
    screen = PairScreen(on_device(anchors)[None], on_device(candidates)[None])
    found = screen.run(100, torch.full((1,), -torch.inf, device=DEVICE), screen.pairs)
    truth = similarities(anchors, candidates)[found.row.cpu(), found.column.cpu()]
    assert int(found.count) == screen.pairs == 50 * 49
    assert (screen.lower_bounds(found).cpu().numpy() <= truth).all()
    assert (screen.upper_bounds(found).cpu().numpy() >= truth).all()
    # Nor are they far off: an 8-bit mantissa rounds a number by 1/256 of it at most, by half of that on average.
    assert (screen.upper_bounds(found) - screen.lower_bounds(found)).max() < 0.01


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("batches", "n", "k"), [(7, 5, 4), (3, 70, 4), (2, 40, 66), (4, 1, 2), (2, 6, 40)])
def test_many_batches_in_one_launch(batches, n, k, ordered):
    rng = np.random.default_rng(n)
    anchors = unit_rows(rng, batches * n, 20).reshape(batches, n, 20)
    anchors[0] = anchors[0, 0]
    candidates = unit_rows(rng, batches * n, 20).reshape(batches, n, 20) if ordered else None
    found = batch_top_k_on_device(on_device(anchors), on_device(candidates), k=k)
    for batch in range(batches):
        values = similarities(anchors[batch], None if candidates is None else candidates[batch])
        best = np.sort(values[~np.isnan(values)])[::-1][:k]
        expected = np.concatenate([best, np.full(k - len(best), np.nan)])
        np.testing.assert_allclose(found[batch], expected, atol=1e-12)


@pytest.mark.parametrize("k", [4, 80])
def test_too_little_room_is_made_good(monkeypatch, k):
    monkeypatch.setattr(triton_pairs, "_FEWEST_SLOTS", 5)
    monkeypatch.setattr(triton_pairs, "_SAMPLE_ROWS", 20)
    rng = np.random.default_rng(1)
    rows = unit_rows(rng, 12, 30)[np.arange(100) % 12]
    check(np.asarray(rows + 1e-5 * unit_rows(rng, 100, 30), dtype=np.float32), None, k)


def test_a_sample_that_promises_too_much_is_not_believed(monkeypatch):
    """Every second row is alike, and those are the sample."""
    monkeypatch.setattr(triton_pairs, "_SAMPLE_ROWS", 50)
    rng = np.random.default_rng(3)
    rows = unit_rows(rng, 100, 30)
    rows[::2] = rows[0]
    check(rows, None, 2000)


def test_more_than_there_is_room_for_is_said(monkeypatch):
    monkeypatch.setattr(triton_pairs, "_FEWEST_SLOTS", 5)
    monkeypatch.setattr(triton_pairs, "_MOST_SLOTS", 100)
    rows = np.tile(unit_rows(np.random.default_rng(0), 1, 32), (90, 1))
    assert top_pairs_on_device(on_device(rows), k=4) is None


@pytest.fixture
def a_device(monkeypatch):
    """Let every search go where a GPU's would."""
    monkeypatch.setattr(device, "search_device", lambda: torch.device(DEVICE))
    monkeypatch.setattr(device, "_LEAST_PRODUCTS", 0)


@pytest.mark.parametrize("ordered", [False, True])
def test_top_pairs_on_a_device_is_the_reference_to_the_last_bit(a_device, ordered):
    rng = np.random.default_rng(4)
    rows = unit_rows(rng, 60, 33)[rng.integers(0, 60, 110)]
    candidates = rows[rng.permutation(110)] if ordered else None
    for k in (4, 500):
        expected = top_pairs(rows, candidates, k=k, impl="reference")
        for impl in ("fastest", "blocked"):
            found = top_pairs(rows, candidates, k=k, impl=impl)
            for name in ("similarity", "anchor", "candidate"):
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_what_the_device_cannot_do_the_cpu_does(a_device, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    rows = unit_rows(np.random.default_rng(4), 50, 33)
    expected = top_pairs(rows, k=3, impl="reference")
    stack = torch.from_numpy(rows)[None]
    np.testing.assert_allclose(batch_top_k(stack, None, k=3)[0], expected.similarity, atol=1e-12)
    monkeypatch.setattr(triton_pairs, "_MOST_SLOTS", 1)
    monkeypatch.setattr(triton_pairs, "_FEWEST_SLOTS", 1)
    for _ in range(2):
        np.testing.assert_array_equal(top_pairs(rows, k=3).anchor, expected.anchor)
        np.testing.assert_allclose(batch_top_k(stack, None, k=3)[0], expected.similarity, atol=1e-12)
        monkeypatch.setattr(triton_pairs, "PairScreen", fail)


def test_a_kernel_that_gives_other_pairs_is_found_out(monkeypatch):
    assert device._try_kernel(torch.device(DEVICE))
    right = triton_pairs.top_pairs_on_device
    monkeypatch.setattr(
        triton_pairs, "top_pairs_on_device", lambda rows, **given: right(rows.flip(0), **given)
    )
    assert not device._try_kernel(torch.device(DEVICE))


COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from probe_service.similarity import triton_pairs

class Hopper:
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)
    get_current_device = lambda _: 0
    get_current_stream = lambda _, device=None: 0

driver.set_active(Hopper())
kernel = triton_pairs._screen_tiles

class Compiling:
    def __getitem__(self, grid):
        return lambda left, right, *given, **named: print(
            kernel.warmup(left.bfloat16(), right.bfloat16(), *given, grid=grid, **named).asm["ptx"].count("wgmma.mma_async")
        )

triton_pairs._screen_tiles = Compiling()
for ordered in (False, True):
    rows = torch.zeros(2, 100, 30)
    triton_pairs.PairScreen(rows, rows if ordered else None).run(4, torch.zeros(2), 10)
"""


def test_the_kernel_compiles_for_hopper_without_a_gpu(tmp_path):
    """Triton's interpreter takes much that its compiler does not."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # On the tensor cores, in pieces of 16 dimensions.
    assert done.stdout.split() == ["4", "4"]


@pytest.mark.parametrize("k", [1, 66])
def test_rounding_that_all_points_one_way(k):
    """The most similar pair loses most by bfloat16, and another one gains most."""
    sizes = np.arange(900, 1100)
    numbers = (1.0 / np.sqrt(sizes)).astype(np.float32)
    growth = torch.from_numpy(numbers).bfloat16().float().numpy() / numbers
    rows = np.zeros((14, 1100), dtype=np.float32)
    for row, (place, flipped) in enumerate(
        [(growth.argmin(), 0), (growth.argmin(), 1), (growth.argmax(), 0)]
    ):
        rows[row, : sizes[place]] = numbers[place]
        rows[row, :flipped] *= -1
    # Many pairs that are nearly as similar as the best, and gain where it loses.
    for row in range(3, 14):
        rows[row] = rows[2]
        rows[row, [2 * row, 2 * row + 1]] *= -1
    check(rows, None, k)
