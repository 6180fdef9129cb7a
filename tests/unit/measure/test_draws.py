"""Where batches come from, against the rules of the samplers and against sentence-transformers' own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from probe_service.corpus import TrainingRows
from probe_service.estimate import WHOLE, BatchUnits, Evidence, SamplingPlan, share_point
from probe_service.measure.batches import Batches
from probe_service.measure.draws import EpochDraws, RandomDraws, draws_for, ladder
from probe_service.measure.shares import Shares
from probe_service.schemas import ProbeRequest, SamplerOptions
from probe_service.scratch import Scratch
from probe_service.workspace import Population
from tests.oracles import unit_rows

TEMPERATURE = 0.2


def nothing():
    pass


def plan_of(rows, seed=0):
    return SamplingPlan(rows_usable=rows, rows_encoded=rows, num_repeats=10, seed=seed)


def epochs(texts, *, sources=None, seed=0, **options):
    rows = TrainingRows.from_texts(texts, sources)
    return EpochDraws(SamplerOptions(**options), lambda: rows, plan_of(len(rows), seed))


def repeated_texts(count, distinct, seed):
    """Rows of two texts among which repeats within and across columns are common."""
    drawn = np.random.default_rng(seed).integers(0, distinct, (count, 2))
    return [[f"text {number}" for number in row] for row in drawn]


def test_random_batches_are_those_of_the_plan_one_by_one():
    draws = draws_for(SamplerOptions(world_size=4, gather=True), None, plan_of(90, seed=3))
    assert isinstance(draws, RandomDraws)
    assert draws.streams(8) == [(WHOLE, 2500)]
    for number in (0, 1, 77):
        by_numpy = np.random.default_rng([3, 1, 8, WHOLE + 1, number]).choice(90, 8, replace=False)
        np.testing.assert_array_equal(draws.unit(8, WHOLE, number), [by_numpy])


def test_sub_pools_are_drawn_from_where_a_sample_was_encoded():
    plan = SamplingPlan(rows_usable=5000, rows_encoded=200, num_repeats=40, seed=1)
    draws = RandomDraws(plan)
    assert draws.streams(8) == [(WHOLE, 2500), *((pool, 125) for pool in range(20))]
    assert set(draws.unit(8, 5, 3).ravel()) <= set(plan.pool_rows(5))
    # Too large for the pools: all encoded rows alone.
    assert draws.streams(40) == [(WHOLE, 500)]


@pytest.mark.parametrize("devices", [1, 2])
def test_no_duplicates_never_puts_equal_texts_into_one_device_s_batch(devices):
    texts = repeated_texts(120, 90, 0)
    draws = epochs(texts, kind="no_duplicates", world_size=devices, gather=True)
    met_again = 0
    for number in range(5):
        for step in draws.unit(16, WHOLE, number):
            for batch in np.split(step, devices):
                held = [text for row in batch for text in set(texts[row])]
                assert len(held) == len(set(held))
            held = [text for row in step for text in set(texts[row])]
            met_again += len(held) > len(set(held))
    # The rule holds for one device alone; gathering brings the others' rows together.
    assert (met_again > 0) == (devices == 2)


@pytest.mark.parametrize("policy", ["round_robin", "proportional"])
@pytest.mark.parametrize("within_source", ["random", "no_duplicates"])
def test_grouped_fills_each_device_s_batch_from_one_source(policy, within_source):
    sources = [f"source {row % 3}" for row in range(150)]
    draws = epochs(
        [[f"text {row}"] for row in range(150)],
        sources=sources,
        kind="grouped",
        policy=policy,
        within_source=within_source,
        world_size=2,
        gather=True,
    )
    steps = draws.unit(12, WHOLE, 0)
    of_step = [[{sources[row] for row in batch} for batch in np.split(step, 2)] for step in steps]
    assert all(len(found) == 1 for each in of_step for found in each)
    assert any(first != second for first, second in of_step)


def test_sequential_goes_through_the_file_once():
    draws = epochs([[f"text {row}"] for row in range(50)], kind="sequential")
    assert draws.units is BatchUnits.EVERY_BATCH
    assert draws.streams(8) == [(WHOLE, 1)]
    np.testing.assert_array_equal(draws.unit(8, WHOLE, 0), np.arange(48).reshape(6, 8))


def test_epochs_measure_as_many_batches_as_the_anchors_ask_for():
    draws = epochs([[f"text {row}"] for row in range(4000)], kind="no_duplicates")
    # 20,000 anchors are 1,250 batches of 16, and 63 of each of 20 epochs.
    assert draws.streams(16) == [(WHOLE, 20)]
    assert draws.batches_in_unit(16) == 63
    chosen = draws.unit(16, WHOLE, 4)
    assert chosen.shape == (63, 16)
    whole = {batch.tobytes() for batch in draws.epoch(16, 4).full_contrasts}
    assert len(whole) == 250
    assert len({batch.tobytes() for batch in chosen} & whole) == 63
    np.testing.assert_array_equal(chosen, draws.unit(16, WHOLE, 4))
    assert not np.array_equal(chosen, draws.unit(16, WHOLE, 5))


def test_ladder():
    assert ladder(60, 1) == [*range(2, 33), 35, 39, 43, 48, 53, 59]
    assert ladder(61, 4) == [8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60]
    assert ladder(3, 2) == []
    long = ladder(100_000, 1)
    assert all(b > a for a, b in itertools.pairwise(long))
    assert max(b / a for a, b in itertools.pairwise(long[31:])) < 1.13


# ------------------------------------------------------------------------------------- shares from whole epochs


def meanings(seed, rows=300, distinct=60):
    """Rows of which several have one text, and two texts one meaning; the vector is the text's."""
    rng = np.random.default_rng(seed)
    number = rng.integers(0, distinct, rows)
    centres = unit_rows(rng, distinct // 2, 8)
    vectors = centres[np.arange(distinct) // 2] + 0.3 * rng.standard_normal((distinct, 8))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    texts = [f"text {n}" for n in number]
    return texts, [f"group {n // 2}" for n in number], vectors[number]


def population_of(texts, groups, vectors, seed=0):
    return Population(
        name="all",
        anchors=vectors,
        positives=None,
        own_similarity=None,
        anchor_keys=texts,
        positive_keys=None,
        groups=groups,
        sources=None,
        evidence=Evidence.from_keys(texts, None, groups),
        hard_negatives=None,
        plan=plan_of(len(texts), seed),
        floor=None,
    )


def shares_of(population, texts, folder, **request):
    request = ProbeRequest.model_validate({"temperature": TEMPERATURE} | request)
    rows = TrainingRows.from_texts([[text] for text in texts])
    return Shares(population, [16], request, lambda: rows, None, Scratch(folder, nothing))


def share_by_numpy(batches, vectors, groups):
    """S of each batch, by its definition."""
    shares = []
    groups = np.array(groups)
    for batch in batches:
        s = vectors[batch].astype(np.float64) @ vectors[batch].T.astype(np.float64) / TEMPERATURE
        np.fill_diagonal(s, -np.inf)
        weights = np.exp(s)
        false = groups[batch][:, None] == groups[batch][None, :]
        shares.append(((weights * false).sum(axis=1) / weights.sum(axis=1)).mean())
    return np.array(shares)


def test_epochs_average_to_what_sentence_transformers_draws(tmp_path):
    datasets = pytest.importorskip("datasets")
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("sentence_transformers.base.sampler")
    texts, groups, vectors = meanings(0)
    sampler = theirs.NoDuplicatesBatchSampler(
        datasets.Dataset.from_dict({"text": texts}), 16, True, generator=torch.Generator(), seed=0
    )
    by_epoch = []
    for epoch in range(60):
        sampler.set_epoch(epoch)
        by_epoch.append(share_by_numpy([list(batch) for batch in sampler], vectors, groups).mean())
    shares = shares_of(
        population_of(texts, groups, vectors), texts, tmp_path, sampler={"kind": "no_duplicates"}
    )
    batches = shares.batches(16)
    for part in batches.parts():
        batches.run(part)
    found = share_point(16, batches.result(), shares.setting).estimate
    error = np.hypot(
        np.std(by_epoch, ddof=1) / 60**0.5, (found.high - found.low) / 2 / stats.t.ppf(0.975, 19)
    )
    assert abs(found.value - np.mean(by_epoch)) < 4 * error
    assert error < 0.05 * found.value
    assert found.method == "t over 20 epochs"
    # Random batches of these rows have far more of it: the sampler keeps the equal texts apart.
    rng = np.random.default_rng(0)
    anyhow = share_by_numpy([rng.permutation(300)[:16] for _ in range(300)], vectors, groups).mean()
    assert anyhow > 2 * found.value


def test_intervals_over_epochs_cover(tmp_path):
    """200 probes of one corpus full of repeats, each with epochs of its own."""
    texts, groups, vectors = meanings(1, rows=64, distinct=28)
    rows = TrainingRows.from_texts([[text] for text in texts])
    population = population_of(texts, groups, vectors)
    shares = shares_of(population, texts, tmp_path / "any")
    estimates = []
    for seed in range(200):
        plan = plan_of(len(texts), seed)
        draws = EpochDraws(SamplerOptions(kind="no_duplicates"), lambda: rows, plan)
        scratch = Scratch(tmp_path / str(seed), nothing)
        batches = Batches("all", 16, 8, draws, shares.softmaxes, plan, scratch)
        for part in batches.parts():
            batches.run(part)
        estimates.append(share_point(16, batches.result(), shares.setting).estimate)
    # All 4,000 epochs together are as good as the truth.
    truth = np.mean([estimate.value for estimate in estimates])
    covered = sum(estimate.low <= truth <= estimate.high for estimate in estimates)
    assert stats.binom.cdf(covered, 200, 0.95) > 0.01, covered
    # And they are no wider than they need be.
    assert stats.binom.sf(covered - 1, 200, 0.95) > 0.001, covered
