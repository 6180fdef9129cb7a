"""The borrowed tier: p(s), the probability that two texts of cosine s mean the same, learnt from other texts.

Where nobody has judged the pairs of a corpus, one may borrow what people said of other pairs. There is no universal cut-off
on similarity, and none of the corrections that were tried helps: at the same cosine pairs mean the same 3% of the time on
one corpus and 87% on another (STATISTICS §5). So what a borrowed curve gives is a scenario. It has no interval, since no
sampling error describes how another corpus differs, and it never passes or fails anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files

import numpy as np
from numpy.typing import NDArray

__all__ = ["BorrowedCurve", "borrowed_curve"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BorrowedCurve:
    """P(people accept two texts as meaning the same | cosine s) under one encoder: a scenario, never a verdict.

    Args:
        table: (c,) probabilities at c equally spaced cosines from −1 to 1; they never fall.
        source: In words, for the report: which pairs, which encoder, how.
    """

    table: Floats
    source: str

    def probability(self, similarity: NDArray[np.floating]) -> Floats:
        """Return p(s) of each cosine, 0–1, in the shape given; between two entries of the table on a straight line.

        Args:
            similarity: Cosines of any shape; those outside [−1, 1] by rounding count as −1 and 1.
        """
        cosines = np.linspace(-1.0, 1.0, len(self.table))
        probabilities: Floats = np.interp(similarity, cosines, self.table)
        return probabilities


@cache
def borrowed_curve(encoder_name: str, revision: str | None) -> BorrowedCurve | None:
    """Return the curve that was learnt for exactly this encoder; None where there is none.

    benchmarks/learn_borrowed_curve.py learns the curves and writes borrowed_curves.json with where they come from.

    Args:
        encoder_name: `EncoderInfo.name`.
        revision: `EncoderInfo.revision`; a curve of another commit does not count.
    """
    curves = json.loads(
        package_files("probe_service.estimate").joinpath("borrowed_curves.json").read_text("utf-8")
    )
    learnt = curves.get(encoder_name)
    if learnt is None or revision != learnt["revision"]:
        return None
    source = (
        f"{learnt['pairs']} sentence pairs of the {learnt['sets']}, of which people scored {learnt['pairs_accepted']} at"
        f" {learnt['score_threshold']:g} or more of 5, under {encoder_name} at {learnt['revision'][:8]}: logistic regression"
        " in a spline of the cosine"
    )
    return BorrowedCurve(np.array(learnt["probability"], dtype=np.float64), source)
