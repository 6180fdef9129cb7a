"""From finished cells to the table: means over seeds with intervals, what masking gains, and how S ranks it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from probe_service.estimate.intervals import mean_interval
from probe_service.schemas import (
    CONFIDENCE_LEVEL,
    Estimate,
    MaskingGain,
    TrialCell,
    TrialFigure,
    TrialLossKind,
)

__all__ = ["masking_gains", "mean_over_seeds", "rank_correlation", "trial_table"]

_FEWEST_RANKED = 3


def trial_table(cells: Iterable[TrialCell]) -> list[TrialFigure]:
    """Average the cells that differ in their seed alone; in the order in which the first of each comes."""
    together: dict[tuple[str, int, float], list[TrialCell]] = {}
    for cell in cells:
        together.setdefault((cell.loss, cell.batch_size, cell.temperature), []).append(cell)
    return [
        TrialFigure(
            loss=loss,
            batch_size=size,
            temperature=temperature,
            learning_rate=same[0].learning_rate,
            num_seeds=len(same),
            scores={name: mean_over_seeds([cell.scores[name] for cell in same]) for name in same[0].scores},
        )
        for (loss, size, temperature), same in together.items()
    ]


def masking_gains(
    cells: Iterable[TrialCell], metric: str, predicted: Mapping[tuple[int, float], Estimate]
) -> list[MaskingGain]:
    """Compare `oracle_masking` with `infonce` at each batch size and temperature, over the seeds that both have.

    Args:
        cells: Finished cells.
        metric: The score to compare.
        predicted: S by batch size and temperature, where it is known.
    """
    scores = {
        (cell.loss, cell.batch_size, cell.temperature, cell.seed): cell.scores[metric] for cell in cells
    }
    gains: dict[tuple[float, int], list[float]] = {}
    for (loss, size, temperature, seed), score in scores.items():
        plain = scores.get((TrialLossKind.INFONCE, size, temperature, seed))
        if loss == TrialLossKind.ORACLE_MASKING and plain is not None:
            gains.setdefault((temperature, size), []).append(score - plain)
    return [
        MaskingGain(
            batch_size=size,
            temperature=temperature,
            predicted_share=predicted.get((size, temperature)),
            gain=mean_over_seeds(found),
        )
        for (temperature, size), found in sorted(gains.items())
    ]


def rank_correlation(gains: Sequence[MaskingGain]) -> float | None:
    """Spearman's correlation of predicted share with gain; None below three points, or where all are alike."""
    known = [(each.predicted_share.value, each.gain.value) for each in gains if each.predicted_share]
    if len(known) < _FEWEST_RANKED or any(len(set(column)) == 1 for column in zip(*known, strict=True)):
        return None
    shares, values = zip(*known, strict=True)
    return float(stats.spearmanr(shares, values).statistic)


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's t interval over the seeds; without one for a single seed."""
    if len(values) < 2:
        return Estimate(value=values[0], low=None, high=None, method="one seed has no interval")
    interval = mean_interval(np.array(values, dtype=np.float64), CONFIDENCE_LEVEL)
    return Estimate(
        value=interval.value, low=interval.low, high=interval.high, method=f"t over {len(values)} seeds"
    )
