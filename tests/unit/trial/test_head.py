"""Training a head against the same training written out by hand: losses from their formulas, Adam from its paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from probe_service.estimate import Evidence
from probe_service.schemas import TrialLoss, TrialRequest
from probe_service.trial.head import FrozenRows, HeadTrial
from probe_service.trial.plan import Run, Streams
from probe_service.trial.rows import TrialRows
from tests.oracles import unit_rows

WIDTH, SIZE, STEPS, RATE, TEMPERATURE, DIMENSION = 6, 8, 4, 0.05, 0.2, 10
LOSSES = ["infonce", "gs_infonce", "gs_infonce_control", "flatnce", "oracle_masking"]


@pytest.fixture(scope="module")
def frozen() -> FrozenRows:
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 9, 60)
    vectors = unit_rows(rng, 60, DIMENSION)
    evidence = Evidence.from_keys(None, None, [str(group) for group in groups])
    return FrozenRows(TrialRows(evidence, own_positives=False), vectors, vectors)


def trial(frozen, **fields) -> HeadTrial:
    request = TrialRequest.model_validate({"head_width": WIDTH, "recall_at": 2, "seed": 3} | fields)
    return HeadTrial(frozen, frozen, request, groups_shared=True)


def run(loss, *, seed=0, steps=STEPS) -> Run:
    return Run(
        TrialLoss.model_validate({"kind": loss, "noise_per_anchor": 1.5}),
        SIZE,
        TEMPERATURE,
        seed,
        steps,
        RATE,
    )


def loss_of_one(kind, logits, own, false, noise_logits):
    """−log of the own pair's share, from the formulas of the papers; `false` are known false negatives."""
    others = [j for j in range(len(logits)) if j != own and not (kind == "oracle_masking" and false[j])]
    xi = sum(torch.exp(logits[j] - logits[own]) for j in others)
    if kind == "flatnce":
        return torch.log(xi)
    if kind == "gs_infonce":
        xi = xi + sum(torch.exp(each - logits[own]) for each in noise_logits)
    if kind == "gs_infonce_control":
        # E exp(cos/T) by integrating over the angle: the density of a cosine is (1 − c²)^((d − 3)/2).
        cosines = torch.linspace(-1, 1, 20_001, dtype=torch.float64)[1:-1]
        density = (1 - cosines**2) ** ((WIDTH - 3) / 2)
        expected = float((density * torch.exp(cosines / TEMPERATURE)).sum() / density.sum())
        xi = xi + round(1.5 * SIZE) * expected * torch.exp(-logits[own])
    return torch.log(1 + xi)


def trained_by_hand(kind, frozen) -> tuple[np.ndarray, np.ndarray]:
    """Weights (width, d) and offset of the head after the run, in float64."""
    streams = Streams(3, 0, SIZE)
    rng = streams.batches()
    start, noise = (
        torch.Generator().manual_seed(streams.weights()),
        torch.Generator().manual_seed(streams.noise()),
    )
    weight = (torch.randn(WIDTH, DIMENSION, generator=start) / DIMENSION**0.5).double()
    moments = [
        [torch.zeros_like(each), torch.zeros_like(each)] for each in (weight, torch.zeros(WIDTH).double())
    ]
    parameters = [weight, torch.zeros(WIDTH, dtype=torch.float64)]
    vectors = torch.from_numpy(frozen.anchors).double()
    group = frozen.rows.evidence.group
    for step in range(1, STEPS + 1):
        batch = frozen.rows.draw(SIZE, rng)
        parameters = [each.detach().requires_grad_() for each in parameters]
        vectors_now = vectors @ parameters[0].T + parameters[1]
        vectors_now = vectors_now / vectors_now.norm(dim=1, keepdim=True)
        anchors, positives = vectors_now[batch.anchors], vectors_now[batch.positives]
        drawn = (
            torch.randn(round(1.5 * SIZE), WIDTH, generator=noise)
            if kind == "gs_infonce"
            else torch.zeros(0, WIDTH)
        )
        drawn = torch.nn.functional.normalize(drawn.double(), dim=1)
        losses = [
            loss_of_one(
                kind,
                positives @ anchors[i] / TEMPERATURE,
                i,
                group[batch.anchors] == group[batch.anchors[i]],
                drawn @ anchors[i] / TEMPERATURE,
            )
            for i in range(SIZE)
        ]
        gradients = torch.autograd.grad(sum(losses) / SIZE, parameters)
        for place, gradient in enumerate(gradients):
            first, second = moments[place]
            moments[place] = [0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2]
            first, second = moments[place][0] / (1 - 0.9**step), moments[place][1] / (1 - 0.999**step)
            parameters[place] = parameters[place].detach() - RATE * first / (second.sqrt() + 1e-8)
    return parameters[0].numpy(), parameters[1].numpy()


@pytest.mark.parametrize("kind", LOSSES)
def test_a_head_learns_what_the_formulas_say(frozen, kind):
    weight, offset = trained_by_hand(kind, frozen)
    embedded = frozen.anchors @ weight.T + offset
    embedded /= np.linalg.norm(embedded, axis=1, keepdims=True)
    similar = embedded @ embedded.T
    group = frozen.rows.evidence.group
    precisions = []
    for i in range(60):
        answers = [j for j in range(60) if j != i and group[j] == group[i]]
        if answers:
            ranked = sorted((j for j in range(60) if j != i), key=lambda j: -similar[i, j])
            ranks = sorted(1 + ranked.index(j) for j in answers)
            precisions.append(np.mean([(at + 1) / rank for at, rank in enumerate(ranks)]))
    cell = trial(frozen).train(run(kind), lambda: None)
    assert cell.scores["map"] == pytest.approx(np.mean(precisions), abs=1e-5)
    assert (cell.steps, cell.examples) == (STEPS, STEPS * SIZE)
    assert [point.step for point in cell.curve] == [1, 2, 3, 4]
    assert cell.curve[-1].score == cell.scores["map"]


def test_the_losses_differ_and_the_same_run_is_the_same(frozen):
    of = trial(frozen)
    cells = {kind: of.train(run(kind, steps=30), lambda: None) for kind in LOSSES}
    assert len({cell.scores["map"] for cell in cells.values()}) == len(LOSSES)
    assert trial(frozen).train(run("gs_infonce", steps=30), lambda: None) == cells["gs_infonce"]
    assert of.train(run("gs_infonce", seed=1, steps=30), lambda: None).scores != cells["gs_infonce"].scores
    points = cells["infonce"].curve
    assert [point.step for point in points] == [6, 12, 18, 24, 30]
    assert points[-1].loss < points[0].loss
    assert points[-1].score > of.before(lambda: None)["map"]
    assert math.isfinite(trial(frozen, head="mlp").train(run("infonce"), lambda: None).scores["map"])


def test_rates_are_found_on_rows_that_the_tuning_runs_do_not_train_on(frozen):
    rng = np.random.default_rng(1)
    for sizes, shared, in_groups in (
        ((30,) * 6, True, True),
        ((30,) * 6, False, False),
        ((3,) * 60, True, False),
    ):
        group = np.repeat(np.arange(len(sizes)), sizes)
        vectors = unit_rows(rng, len(group), DIMENSION)
        evidence = Evidence.from_keys(None, None, [str(each) for each in group])
        rows = FrozenRows(TrialRows(evidence, own_positives=False), vectors, vectors)
        of = HeadTrial(rows, rows, TrialRequest(head_width=WIDTH), groups_shared=shared)
        said = " ".join(of.protocol())
        assert ("are of every group" in said) == in_groups
        assert ("share no group" in said) != in_groups
        assert 0.7 * len(group) < of.rows < 0.9 * len(group)
        assert 0 < of.tuning_score(run("infonce"), lambda: None) <= 1
