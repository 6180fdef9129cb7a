"""The similarity curve from a list of pairs, against a direct look at the same batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from probe_service.estimate import WHOLE, Evidence
from probe_service.measure import listed as listed_module
from probe_service.measure.listed import ListedCurve, PairListing
from probe_service.measure.terms import Softmaxes
from probe_service.schemas import SIMILARITY_THRESHOLDS, LossOptions
from probe_service.scratch import Scratch
from tests.oracles import unit_rows
from tests.unit.measure.test_draws import nothing, population_of


def clustered(pairs):
    rng = np.random.default_rng(6)
    centres = unit_rows(rng, 80, 16)
    group = rng.integers(0, 80, 240)

    def side():
        vectors = centres[group] + 0.12 * rng.standard_normal((240, 16))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    texts, groups = [f"text {row}" for row in range(240)], [f"group {g}" for g in group]
    population = population_of(texts, groups, side())
    if not pairs:
        return population
    answers = [f"answer {row}" for row in range(240)]
    return dataclasses.replace(
        population,
        positives=side(),
        positive_keys=answers,
        evidence=Evidence.from_keys(texts, answers, groups),
    )


@pytest.mark.parametrize("pairs", [False, True], ids=["sentences", "pairs"])
@pytest.mark.parametrize("short", [False, True], ids=["all pairs", "a list too short for some"])
def test_same_as_looking_at_the_batches(pairs, short, tmp_path, monkeypatch):
    listed_pairs = (1_000 if pairs else 500) if short else 500_000
    monkeypatch.setattr(listed_module, "LISTED_PAIRS", listed_pairs)
    monkeypatch.setattr(listed_module, "LISTED_BATCHES", 60)
    population, scratch = clustered(pairs), Scratch(tmp_path, nothing)
    softmaxes = Softmaxes(population, LossOptions(), temperature=0.05, k=4, borrowed=None)
    listing = PairListing(population, scratch)
    listing.run("all")
    curve = ListedCurve(population, listing, 32, softmaxes, k=4, scratch=scratch)
    for part in curve.parts():
        curve.run(part)
    found = curve.result()

    below = 0
    right = population.anchors if population.positives is None else population.positives
    groups = np.array(population.groups)
    for number, batch in enumerate(population.plan.batches(32, WHOLE, 0, 60)):
        s = population.anchors[batch].astype(np.float64) @ right[batch].astype(np.float64).T
        negative = ~np.eye(32, dtype=bool) if pairs else np.triu(np.ones((32, 32), dtype=bool), 1)
        false = groups[batch][:, None] == groups[batch][None, :]
        best = np.sort(s[negative])[::-1][:4]
        masked = np.sort(s[negative & ~false])[::-1][:4]
        np.testing.assert_allclose(found["top_k"][number], best, atol=2e-6)
        np.testing.assert_allclose(found["masked_top_k"][number], masked, atol=2e-6)
        above = [(s[negative] >= threshold).sum() for threshold in SIMILARITY_THRESHOLDS]
        np.testing.assert_array_equal(found["any_above"][number], np.array(above) > 0)
        below += masked[-1] < listing.result[0].complete_above
    # The short list leaves some batches, and not all, to a direct look.
    assert listing.result[0].complete_above < min(SIMILARITY_THRESHOLDS)
    assert (5 < below < 55) if short else below == 0
