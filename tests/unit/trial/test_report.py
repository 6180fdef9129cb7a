"""Tables and gains from cells, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from probe_service.schemas import Estimate, TrialCell
from probe_service.trial.report import masking_gains, mean_over_seeds, rank_correlation, trial_table


def cell(loss, size, seed, score, temperature=0.05) -> TrialCell:
    return TrialCell(
        loss=loss,
        batch_size=size,
        temperature=temperature,
        seed=seed,
        learning_rate=0.01,
        steps=5,
        examples=5 * size,
        scores={"map": score, "accuracy": 1 - score},
        curve=[],
    )


def share(value) -> Estimate:
    return Estimate(value=value, low=value, high=value, method="given")


def test_the_interval_is_students():
    # Mean .6, standard deviation .1, three values: t with 2 degrees of freedom is 4.3027.
    found = mean_over_seeds([0.5, 0.6, 0.7])
    assert found.value == pytest.approx(0.6)
    assert found.high - found.value == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    alone = mean_over_seeds([0.5])
    assert (alone.value, alone.low, alone.high) == (0.5, None, None)


def test_the_table_averages_over_seeds_alone():
    cells = [
        cell("infonce", 4, 0, 0.2),
        cell("flatnce", 4, 0, 0.5),
        cell("infonce", 4, 1, 0.4),
        cell("infonce", 8, 0, 0.9),
    ]
    table = trial_table(cells)
    assert [(row.loss, row.batch_size, row.num_seeds) for row in table] == [
        ("infonce", 4, 2),
        ("flatnce", 4, 1),
        ("infonce", 8, 1),
    ]
    assert table[0].scores["map"].value == pytest.approx(0.3)
    assert table[0].scores["accuracy"].value == pytest.approx(0.7)


def test_gains_are_paired_by_seed():
    cells = [
        cell("infonce", 4, 0, 0.2),
        cell("infonce", 4, 1, 0.5),
        cell("oracle_masking", 4, 0, 0.3),
        cell("oracle_masking", 4, 1, 0.62),
        cell("oracle_masking", 4, 2, 0.9),
        cell("oracle_masking", 8, 0, 0.9),
        cell("infonce", 16, 0, 0.5),
        cell("oracle_masking", 16, 0, 0.7),
    ]
    gains = masking_gains(cells, "map", {(4, 0.05): share(0.25)})
    assert [(gain.batch_size, gain.gain.value) for gain in gains] == [
        (4, pytest.approx(0.11)),
        (16, pytest.approx(0.2)),
    ]
    # Differences .10 and .12: standard deviation .01414, t with 1 degree of freedom 12.706.
    assert gains[0].gain.high - 0.11 == pytest.approx(12.706 * 0.0141421 / 2**0.5, rel=1e-3)
    assert gains[0].predicted_share.value == 0.25
    assert gains[1].predicted_share is None


def test_the_rank_correlation_needs_three_points():
    def gains(pairs):
        cells, predicted = [], {}
        for size, (each, gain) in enumerate(pairs, start=2):
            cells += [cell("infonce", size, 0, 0.1), cell("oracle_masking", size, 0, 0.1 + gain)]
            predicted[size, 0.05] = share(each)
        return masking_gains(cells, "map", predicted)

    assert rank_correlation(gains([(0.1, 0.01), (0.2, 0.05), (0.6, 0.3)])) == pytest.approx(1.0)
    # Ranks 1 2 3 4 against 2 1 4 3: 1 − 6·4/(4·15).
    assert rank_correlation(gains([(0.1, 0.2), (0.2, 0.1), (0.3, 0.4), (0.4, 0.3)])) == pytest.approx(0.6)
    assert rank_correlation(gains([(0.1, 0.01), (0.2, 0.05)])) is None
    assert rank_correlation(gains([(0.1, 0.01)] * 3)) is None
