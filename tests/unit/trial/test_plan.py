"""The matrix of runs: order, lengths, learning rates, and what cannot be tried."""

from __future__ import annotations

import math

import numpy as np
import pytest

from probe_service.errors import RequestError
from probe_service.schemas import TrialRequest
from probe_service.trial.plan import TUNING_SEED, Streams, TrialPlan


def plan(rows=2000, any_known=True, **fields) -> TrialPlan:
    return TrialPlan.from_request(TrialRequest.model_validate(fields), rows=rows, any_known=any_known)


def test_the_cells_of_a_seed_come_before_those_of_the_next():
    found = plan(losses=[{"kind": "infonce"}, {"kind": "flatnce"}], batch_sizes=[8, 4], num_seeds=2, steps=7)
    cells = found.cells({(loss, 0.05, size): 0.01 for loss in ("infonce", "flatnce") for size in (4, 8)})
    assert [(run.seed, run.batch_size, run.loss.name) for run in cells] == [
        (seed, size, loss) for seed in (0, 1) for size in (4, 8) for loss in ("infonce", "flatnce")
    ]
    assert {run.steps for run in cells} == {7}
    assert len({run.name for run in cells}) == 8
    tuning = found.tuning_runs()
    assert len(tuning) == 2 * 2 * 3
    assert {run.seed for run in tuning} == {TUNING_SEED}


def test_equal_steps_or_equal_examples():
    assert [plan(batch_sizes=[4, 1024]).steps_at(size) for size in (4, 1024)] == [200, 200]
    found = plan(batch_sizes=[4, 60, 1024], examples=500)
    assert [found.steps_at(size) for size in (4, 60, 1024)] == [125, 8, 1]
    with pytest.raises(ValueError, match="not both"):
        TrialRequest(steps=3, examples=4)


def test_rates_between_the_ends_go_between():
    found = plan(losses=[{"kind": "infonce"}], batch_sizes=[4, 16, 256])
    rates = {
        run.batch_size: run.learning_rate
        for run in found.cells({("infonce", 0.05, 4): 1e-3, ("infonce", 0.05, 256): 1e-2})
    }
    assert rates[4] == pytest.approx(1e-3)
    assert rates[256] == pytest.approx(1e-2)
    assert rates[16] == pytest.approx(math.exp(math.log(1e-3) + math.log(10) / 3), rel=0.005)
    alone = plan(batch_sizes=[4, 16], learning_rates=[0.02])
    assert alone.tuning_runs() == []
    assert {run.learning_rate for run in alone.cells({})} == {0.02}


def test_what_does_not_fit():
    assert plan(rows=100).batch_sizes == (4, 16, 64)
    for fields in ({"rows": 100, "batch_sizes": [4, 128]}, {"rows": 3}):
        with pytest.raises(RequestError) as refused:
            plan(**fields)
        assert refused.value.code == "batch_size_too_large"
    assert "oracle_masking" not in {loss.name for loss in plan(any_known=False).losses}
    with pytest.raises(RequestError) as refused:
        plan(any_known=False, losses=[{"kind": "oracle_masking"}])
    assert refused.value.code == "trial_nothing_to_mask"


@pytest.mark.parametrize(
    "fields",
    [
        {"losses": []},
        {"losses": [{"kind": "infonce"}, {"kind": "infonce"}]},
        {"losses": [{"kind": "hinge"}]},
        {"losses": [{"kind": "gs_infonce", "noise_per_anchor": 0}]},
        {"batch_sizes": [1]},
        {"temperatures": []},
        {"temperatures": [0.0]},
        {"learning_rates": [-1.0]},
        {"num_seeds": 0},
        {"held_out_share": 1.0},
    ],
)
def test_requests_that_cannot_be_meant(fields):
    with pytest.raises(ValueError, match=r"."):
        TrialRequest.model_validate(fields)


def test_runs_of_one_seed_and_size_share_what_they_draw_and_others_do_not():
    def draws(root, seed, size):
        streams = Streams(root, seed, size)
        return int(streams.batches().integers(2**60)), streams.noise()

    found = {draws(root, seed, size) for root in (0, 1) for seed in (0, 1) for size in (4, 8)}
    assert len({batch for batch, _ in found}) == len({noise for _, noise in found}) == 8
    assert draws(0, 1, 4) == draws(0, 1, 4)
    weights = [Streams(root, seed, size).weights() for root in (0, 1) for seed in (0, 1) for size in (4, 8)]
    assert len(set(weights)) == 4
    assert np.array_equal(weights[::2], weights[1::2])
