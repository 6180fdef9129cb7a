"""InfoNCE, GS-InfoNCE and FlatNCE against loops over the formulas, other libraries, and DESIGN's table of rounding errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.losses import NTXentLoss
from scipy.integrate import quad
from torch.nn.functional import cross_entropy

from probe_service.errors import RequestError
from probe_service.losses import (
    below_positive,
    cosine_similarities,
    expected_noise,
    flat_nce,
    gs_info_nce,
    info_nce,
    other_group,
)
from probe_service.losses.functional import Contrast, info_nce_of_rows
from probe_service.losses.numerics import gradient_errors
from tests.unit.losses import loops

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def tensors(*arrays, dtype=torch.float64, device="cpu"):
    return [torch.tensor(each, dtype=dtype, device=device) for each in arrays]


def noise_of(seed, count, dimension, mean=0.0, std=1.0):
    """What a generator with this seed gives, drawn here independently of the loss."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn((count, dimension), generator=generator, dtype=torch.float64)
    return (drawn * std + mean).numpy()


# --- values ---


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 7),
    hard=st.integers(0, 4),
    temperature=st.sampled_from([0.05, 0.2, 1.0]),
    symmetric=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_loss_is_the_mean_over_the_loops(seed, size, hard, temperature, symmetric):
    anchors, candidates, mask = loops.random_batch(seed, size, hard)
    directions = [(anchors, candidates, mask)]
    if symmetric:
        directions.append(loops.other_direction(anchors, candidates, mask))
    noise = noise_of(seed, 5, anchors.shape[1], mean=0.3, std=2.0)
    a, c = tensors(anchors, candidates)
    chosen = {"temperature": temperature, "symmetric": symmetric}

    def mean(loss, *more):
        return np.mean([loss(*each, temperature, *more) for each in directions])

    kept = torch.tensor(mask)
    assert float(info_nce(a, c, kept, **chosen)) == pytest.approx(mean(loops.info_nce), rel=1e-9, abs=1e-12)
    assert float(flat_nce(a, c, kept, **chosen)) == pytest.approx(mean(loops.decoupled), rel=1e-9, abs=1e-12)
    found = gs_info_nce(
        a,
        c,
        kept,
        noise_count=5,
        noise_weight=0.4,
        noise_mean=0.3,
        noise_std=2.0,
        generator=torch.Generator().manual_seed(seed),
        **chosen,
    )
    assert float(found) == pytest.approx(mean(loops.gs_info_nce, noise, 0.4), rel=1e-9)


def test_without_a_mask_infonce_is_cross_entropy():
    a, c = tensors(*loops.random_batch(1, 8, 3)[:2])
    logits = torch.nn.functional.cosine_similarity(a[:, None], c[None], dim=2) / 0.05
    assert float(info_nce(a, c)) == pytest.approx(float(cross_entropy(logits, torch.arange(8))), rel=1e-12)


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_infonce_and_ntxent_of_pytorch_metric_learning(temperature):
    """Its pairs (anchor, positive) are ours; among one set of embeddings every other row is a candidate, as in SimCLR."""
    a, p = tensors(*loops.random_batch(2, 9)[:2])
    labels = torch.arange(9)
    peer = NTXentLoss(temperature=temperature)
    across = peer(a, labels, ref_emb=p, ref_labels=labels.clone())  # the same object would mean one set
    assert float(info_nce(a, p, temperature=temperature)) == pytest.approx(float(across), rel=1e-12)

    others = torch.ones(9, 18, dtype=torch.bool)
    others[:, 9:].fill_diagonal_(False)
    both = [info_nce(x, torch.cat([y, x]), others, temperature=temperature) for x, y in ((a, p), (p, a))]
    simclr = peer(torch.cat([a, p]), torch.cat([labels, labels]))
    assert float(sum(both) / 2) == pytest.approx(float(simclr), rel=1e-12)


def test_the_ratio_form_of_flatnce_is_one_with_the_gradient_of_the_logarithm():
    anchors, candidates, mask = loops.random_batch(3, 6, 2)
    mask[2] = False  # an anchor that has nothing to be compared with
    gradients = []
    for form in ("log", "ratio"):
        a, c = (each.requires_grad_() for each in tensors(anchors, candidates))
        loss = flat_nce(a, c, torch.tensor(mask), form=form, symmetric=True)
        gradients.append(torch.autograd.grad(loss, (a, c)))
    assert loss.item() == pytest.approx(1.0, rel=1e-12)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert float(gradients[0][0].abs().sum()) > 0.1


def test_flatnce_may_be_negative_and_infonce_may_not():
    eye = torch.eye(4, dtype=torch.float64)
    # Three negatives with cosine 0 against a positive with cosine 1: log(3·exp(−20)).
    assert float(flat_nce(eye, eye)) == pytest.approx(math.log(3) - 20, rel=1e-12)
    assert float(info_nce(eye, eye)) == pytest.approx(math.log1p(3 * math.exp(-20)), rel=1e-12)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_an_anchor_without_negatives_adds_nothing_and_spoils_nothing():
    """Not even on the way back: torch's anomaly detection stops at any NaN."""
    anchors, candidates, mask = loops.random_batch(4, 5)
    mask[:] = ~np.eye(5, dtype=bool)
    mask[3] = False
    for loss in (info_nce, flat_nce):
        a, c = (each.requires_grad_() for each in tensors(anchors, candidates))
        with torch.autograd.detect_anomaly():
            gradient, _ = torch.autograd.grad(loss(a, c, torch.tensor(mask)), (a, c))
        assert torch.isfinite(gradient).all()
        assert float(gradient[3].abs().sum()) == 0.0
        assert float(gradient[2].abs().sum()) > 0.0
        assert loss(a[:1], c[:1]).item() == 0.0


# --- gradients and number formats ---


@pytest.mark.parametrize("symmetric", [False, True])
def test_gradients_are_those_of_finite_differences(symmetric):
    anchors, candidates, mask = loops.random_batch(5, 4, 2)
    mask[1] = False
    a, c = (each.requires_grad_() for each in tensors(anchors, candidates))
    kept = torch.tensor(mask)
    more = {"temperature": 0.3, "symmetric": symmetric}

    def noisy(a, c):
        generator = torch.Generator().manual_seed(0)
        return gs_info_nce(a, c, kept, noise_count=3, generator=generator, **more)

    for loss in (
        lambda a, c: info_nce(a, c, kept, **more),
        lambda a, c: flat_nce(a, c, kept, **more),
        noisy,
        lambda a, c: gs_info_nce(a, c, kept, noise_count=3, noise="expected", **more),
    ):
        assert torch.autograd.gradcheck(loss, (a, c))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_vectors_are_compared_in_float32(dtype, device):
    anchors, candidates, mask = loops.random_batch(6, 8, 4, dimension=32)
    a, c = tensors(anchors, candidates, dtype=dtype, device=device)
    kept = torch.tensor(mask, device=device)
    # The same rounded vectors in float64: what is left is the loss's own error.
    exact_a, exact_c = a.double(), c.double()
    for loss in (info_nce, flat_nce):
        with torch.autocast(device, dtype=torch.bfloat16):
            found = loss(a, c, kept)
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(float(loss(exact_a, exact_c, kept)), rel=1e-5)
    leaf = a.clone().requires_grad_()
    info_nce(leaf, c).backward()
    assert leaf.grad.dtype == dtype
    noisy = gs_info_nce(a, c, noise_count=4, generator=torch.Generator(device).manual_seed(0))
    assert noisy.dtype == torch.float32
    assert noisy.device.type == device


def test_no_temperature_overflows():
    a, c = (each.requires_grad_() for each in tensors(*loops.random_batch(7, 6, 2)[:2], dtype=torch.float32))
    for loss in (
        info_nce(a, c, temperature=1e-3),
        flat_nce(a, c, temperature=1e-3),
        gs_info_nce(a, c, noise_count=2, temperature=1e-3),
        gs_info_nce(a, c, noise_count=2, temperature=1e-3, noise="expected"),
    ):
        gradient = torch.autograd.grad(loss, (a, c))
        assert torch.isfinite(loss)
        assert all(torch.isfinite(each).all() for each in gradient)


def rows_with_xi(xi, size=64, temperature=0.05):
    """Unit rows that all have one cosine with each other, such that ξ = (size − 1)·exp((cosine − 1)/T)."""
    cosine = 1 + temperature * math.log(xi / (size - 1))
    values, vectors = np.linalg.eigh(np.where(np.eye(size, dtype=bool), 1.0, cosine))
    return torch.from_numpy(vectors * np.sqrt(np.clip(values, 0, None)))


# DESIGN §8: relative error of cross-entropy's gradient on the own pair, 63 negatives, T = 0.05. Where float32 rounds a
# softmax of 0.9998 is luck; the spacing of its numbers below 1 bounds the error by 6e-8/ξ, and two more roundings come in.
ROUNDING = [(1e-3, 9e-5, 2e-2), (2e-4, None, 1.0), (1e-5, 1e-2, 1.0), (1e-7, 1.0, 1.0)]


@pytest.mark.parametrize(("xi", "float32_error", "float16_error"), ROUNDING)
def test_the_rounding_errors_of_a_softmax_and_of_log_xi(xi, float32_error, float16_error):
    rows = rows_with_xi(xi)
    found = gradient_errors(rows.float(), rows.float(), temperature=0.05)
    assert found["float32"].infonce < 1.8e-7 / xi
    if float32_error is not None:
        assert found["float32"].infonce == pytest.approx(float32_error, rel=0.35)
    assert found["float16"].infonce == pytest.approx(float16_error, rel=0.35)
    assert found["float32"].flatnce < 1e-6

    # The same with torch's own loss: the error is all on the own pair.
    logits = (rows @ rows.T / 0.05).float().requires_grad_()
    cross_entropy(logits, torch.arange(64), reduction="sum").backward()
    own = torch.eye(64, dtype=torch.bool)
    # By hand: −ξ/(1 + ξ) on the own pair, (ξ/63)/(1 + ξ) on each negative.
    on_pair, on_negative = -xi / (1 + xi), xi / 63 / (1 + xi)
    errors = logits.grad.double() / torch.where(own, on_pair, on_negative) - 1
    if float32_error is not None:
        assert float(errors[own].abs().max()) == pytest.approx(float32_error, rel=0.6)
    assert float(errors[~own].abs().max()) < 2e-6  # the logits' own rounding, 20·6e-8, included

    # And ours, log(1 + ξ) from log ξ: no error beyond that of the logits, at any ξ.
    logits = logits.detach().requires_grad_()
    losses = info_nce_of_rows(Contrast(rows, logits.diagonal(), logits, ~own))
    losses.sum().backward()
    assert float((logits.grad[own].double() / on_pair - 1).abs().max()) < 2e-6
    assert losses.detach().double().numpy() == pytest.approx(math.log1p(xi), rel=2e-6)


# --- noise ---


def test_noise_is_drawn_afresh_and_its_spread_has_no_effect():
    a, c = tensors(*loops.random_batch(8, 6)[:2])
    assert float(gs_info_nce(a, c, noise_count=6)) != float(gs_info_nce(a, c, noise_count=6))

    def with_noise(**chosen):
        return float(gs_info_nce(a, c, noise_count=6, generator=torch.Generator().manual_seed(1), **chosen))

    assert with_noise(noise_std=0.1) == pytest.approx(with_noise(noise_std=5.0), rel=1e-12)
    assert with_noise(noise_mean=1.0, noise_std=0.1) != pytest.approx(with_noise(noise_mean=1.0), rel=1e-3)


@pytest.mark.parametrize(
    ("dimension", "temperature"), [(2, 0.5), (3, 0.05), (8, 0.1), (384, 0.05), (1024, 0.05)]
)
def test_the_expected_noise_is_the_integral_over_the_sphere(dimension, temperature):
    """The cosine of a uniform direction has density ∝ (1 − t²)^((d−3)/2); with t = cos φ, ∝ sin^(d−2) φ."""
    top = 1 / temperature

    def density(angle):
        return math.sin(angle) ** (dimension - 2)

    def integral(function):
        return quad(function, 0, math.pi, epsabs=0, epsrel=1e-9, limit=200)[0]

    above = integral(lambda angle: math.exp(top * math.cos(angle)) * density(angle))
    assert expected_noise(dimension, temperature) == pytest.approx(above / integral(density), rel=1e-8)


def test_the_noise_constant_of_the_design():
    assert expected_noise(1024, 0.05) == pytest.approx(1.22, abs=0.005)
    assert expected_noise(1024, 0.05) == pytest.approx(math.exp(1 / (2 * 1024 * 0.05**2)), rel=1e-4)
    assert expected_noise(3, 0.05) == pytest.approx(math.sinh(20) / 20, rel=1e-12)
    assert expected_noise(4, 1e-3) == math.inf


def test_the_control_arm_adds_the_mean_of_the_noise():
    anchors, candidates, mask = loops.random_batch(9, 4, 2)
    temperature, count, weight = 0.5, 7, 0.3
    # One value λ·M·E in each denominator, from the integral of d = 6: (1 − t²)^1.5.
    mean = quad(lambda t: math.exp(t / temperature) * (1 - t * t) ** 1.5, -1, 1)[0]
    mean /= quad(lambda t: (1 - t * t) ** 1.5, -1, 1)[0]
    losses = []
    for i in range(4):
        terms = loops.exponentials(anchors[i], candidates, temperature)
        kept = math.fsum(term for j, term in enumerate(terms) if j == i or mask[i][j])
        losses.append(-math.log(terms[i] / (kept + weight * count * mean)))
    a, c = tensors(anchors, candidates)
    chosen = {"noise_weight": weight, "temperature": temperature}
    found = gs_info_nce(a, c, torch.tensor(mask), noise_count=count, noise="expected", **chosen)
    assert float(found) == pytest.approx(sum(losses) / 4, rel=1e-6)

    # Much noise with little weight tends to the same. Its share of the denominator is known within about 1/√M.
    chosen["noise_weight"] = weight * count / 200_000
    generator = torch.Generator().manual_seed(0)
    noisy = gs_info_nce(a, c, torch.tensor(mask), noise_count=200_000, generator=generator, **chosen)
    assert float(noisy) == pytest.approx(float(found), abs=0.01)


# --- masks ---


def test_masks_by_group_and_by_the_positive():
    rng = np.random.default_rng(10)
    groups, others = rng.integers(-1, 3, 12), rng.integers(-1, 3, 9)
    similarities, positives = rng.uniform(-1, 1, (12, 9)), rng.uniform(-1, 1, 12)
    similarities[4, 5] = positives[4]  # as similar as the positive: stays
    by_group = other_group(torch.tensor(groups), torch.tensor(others))
    for i in range(12):
        for j in range(9):
            assert bool(by_group[i, j]) == (groups[i] < 0 or groups[i] != others[j])
    for strategy in ("absolute", "relative"):
        for margin in (0.0, 0.2, -0.1):
            found = below_positive(*tensors(similarities, positives), margin=margin, margin_strategy=strategy)
            for i in range(12):
                by = margin * (abs(positives[i]) if strategy == "relative" else 1.0)
                for j in range(9):
                    assert bool(found[i, j]) == (similarities[i, j] <= positives[i] - by)


def test_masks_join_and_take_no_gradient():
    a, c = (each.requires_grad_() for each in tensors(*loops.random_batch(11, 6, 2)[:2]))
    similarities = cosine_similarities(a, c)
    mask = below_positive(similarities, similarities.diagonal())
    groups = torch.tensor([0, 0, 1, 1, -1, -1])
    mask[:, :6] &= other_group(groups, groups)
    expected = np.array(
        [
            [
                loops.cosine(a[i].tolist(), c[j].tolist()) <= loops.cosine(a[i].tolist(), c[i].tolist())
                and not (j < 4 and i < 4 and i // 2 == j // 2)
                for j in range(8)
            ]
            for i in range(6)
        ]
    )
    expected[np.arange(6), np.arange(6)] = mask.diagonal().numpy()
    assert (mask.numpy() == expected).all()
    assert not mask.requires_grad
    loss = loops.info_nce(a.tolist(), c.tolist(), expected, 0.05)
    assert info_nce(a, c, mask).item() == pytest.approx(loss, rel=1e-9)


# --- refusals ---


@pytest.mark.parametrize(
    ("rows", "columns", "chosen"),
    [
        ((4, 3), (4, 3), {"temperature": 0.0}),
        ((4, 3), (4, 2), {}),
        ((4, 3), (3, 3), {}),
        ((0, 3), (0, 3), {}),
        ((3,), (4, 3), {}),
        ((4, 3), (4, 3), {"mask": torch.ones(4, 5, dtype=torch.bool)}),
        ((4, 3), (4, 3), {"mask": torch.ones(4, 4)}),
        ((4, 3), (4, 3), {"noise_count": 0}),
        ((4, 3), (4, 3), {"noise_weight": 0.0}),
        ((4, 3), (4, 3), {"noise_std": 0.0}),
        ((4, 3), (4, 3), {"noise": "uniform"}),
        ((4, 3), (4, 3), {"noise": "expected", "noise_mean": 0.1}),
    ],
)
def test_what_cannot_be_is_refused(rows, columns, chosen):
    with pytest.raises(RequestError) as caught:
        gs_info_nce(torch.ones(rows), torch.ones(columns), **{"noise_count": 2, **chosen})
    assert caught.value.code == "loss_invalid"


def test_choices_that_are_none_are_refused():
    a = torch.ones(2, 3)
    for call in (
        lambda: flat_nce(a, a, form="logarithm"),
        lambda: below_positive(a, a[:, 0], margin_strategy="share"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.code == "loss_invalid"
