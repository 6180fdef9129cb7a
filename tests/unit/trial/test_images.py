"""SimCLR on digits: the loss against a loop over views, and a probe that tells good features from bad ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from probe_service.schemas import TrialLoss, TrialRequest
from probe_service.trial.images import ImageTrial, _negatives, _view
from probe_service.trial.plan import Run
from probe_service.trial.training import objective

TEMPERATURE = 0.3


def run(kind, *, size=64, steps=40, seed=0) -> Run:
    return Run(TrialLoss.model_validate({"kind": kind}), size, TEMPERATURE, seed, steps, 0.003)


@pytest.mark.parametrize("kind", ["infonce", "flatnce", "oracle_masking"])
def test_a_batch_has_the_loss_of_simclr(kind):
    """NT-Xent of Chen et al. 2020 by loops: each view against its other view and the 2N − 2 views of other pictures."""
    rng = np.random.default_rng(0)
    size, labels = 5, [0, 1, 0, 2, 1]
    first, second = rng.standard_normal((size, 4)), rng.standard_normal((size, 4))
    views = [*first, *second]
    total = 0.0
    for i, view in enumerate(views):
        own = (i + size) % (2 * size)

        def logit(j, view=view):
            return float(view @ views[j] / np.linalg.norm(view) / np.linalg.norm(views[j]) / TEMPERATURE)

        negatives = [j for j in range(2 * size) if j not in (i, own)]
        if kind == "oracle_masking":
            negatives = [j for j in negatives if labels[j % size] != labels[i % size]]
        xi = sum(np.exp(logit(j) - logit(own)) for j in negatives)
        total += np.log(xi if kind == "flatnce" else 1 + xi)
    vectors = torch.tensor(np.array(views))
    mask = _negatives(size, torch.tensor(labels) if kind == "oracle_masking" else None)
    found = objective(run(kind), 0)(vectors, vectors.roll(size, dims=0), mask)
    assert float(found) == pytest.approx(total / (2 * size))


def test_views_differ_and_keep_what_is_seen():
    pictures = torch.tensor(load_digits().images[:200] / 16.0, dtype=torch.float32)[:, None]
    generator = torch.Generator().manual_seed(0)
    first, second = _view(pictures, generator), _view(pictures, generator)
    assert first.shape == pictures.shape
    flat = [each.flatten(1) - each.flatten(1).mean(dim=1, keepdim=True) for each in (pictures, first, second)]
    unit = [each / each.norm(dim=1, keepdim=True) for each in flat]
    assert not torch.allclose(first, second)
    assert torch.equal(first, _view(pictures, torch.Generator().manual_seed(0)))
    for one, other in itertools.combinations(unit, 2):
        similar = one @ other.T
        own = similar.diagonal()
        assert own.mean() > 0.4
        assert own.mean() > similar.mean() + 0.1


def test_training_makes_features_that_a_few_labels_suffice_for():
    trial = ImageTrial(TrialRequest(mode="images"))
    held_out = trial.describe_held_out()
    assert trial.training_rows + held_out.rows == 1797
    assert 1024 <= trial.rows < trial.training_rows
    cell = trial.train(run("infonce"), lambda: None)
    before = trial.before(lambda: None)["accuracy"]
    assert 0.7 < before < cell.scores["accuracy"] <= 1.0
    assert cell.curve[-1].loss < cell.curve[0].loss
    assert [point.step for point in cell.curve] == [8, 16, 24, 32, 40]
    again = ImageTrial(TrialRequest(mode="images")).train(run("infonce"), lambda: None)
    assert again == cell
    assert trial.train(run("infonce", seed=1), lambda: None).curve != cell.curve
    assert 0.5 < trial.tuning_score(run("flatnce", steps=5), lambda: None) <= 1.0
