"""The same rows in sentence-transformers' own samplers and in ours: the same batches."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import ConcatDataset, RandomSampler, SequentialSampler

from probe_service.corpus.batching import (
    BatchSampler,
    TrainingRows,
    draw_epoch,
)
from probe_service.schemas import GroupedPolicy, SamplerKind

datasets = pytest.importorskip("datasets")
theirs = pytest.importorskip("sentence_transformers.base.sampler")

SEED = 7


class TorchOrders:
    """Gives our samplers the orders that torch gives theirs: a generator of its own for each number of rows."""

    def __init__(self):
        self._generators = {}

    def permutation(self, x):
        if x not in self._generators:
            self._generators[x] = generator_for(x)
        return torch.randperm(x, generator=self._generators[x]).numpy()


def generator_for(count):
    return torch.Generator().manual_seed(SEED + count)


def pairs(count, distinct, rng, columns=2):
    """Rows of texts among which repeats within and across columns are common."""
    drawn = rng.integers(0, distinct, (count, columns))
    return [[f"text {number}" for number in row] for row in drawn]


def as_dataset(rows):
    names = ["anchor", "positive", "negative", "negative_2"][: len(rows[0])]
    return datasets.Dataset.from_dict(dict(zip(names, zip(*rows, strict=True), strict=True)))


def their_batches(sampler):
    return [list(map(int, batch)) for batch in sampler]


def our_batches(rows, sources=None, **described):
    epoch = draw_epoch(BatchSampler(**described), TrainingRows.from_texts(rows, sources), TorchOrders())
    return [batch.tolist() for batch in epoch.device_batches], epoch.shortfall


@pytest.mark.parametrize("drop_last", [True, False])
def test_sequential(drop_last):
    rows = pairs(50, 60, np.random.default_rng(0))
    plain = TorchBatchSampler(SequentialSampler(rows), 8, drop_last)
    ours, _ = our_batches(rows, kind=SamplerKind.SEQUENTIAL, per_device_batch_size=8, drop_last=drop_last)
    assert ours == their_batches(plain)


@pytest.mark.parametrize("drop_last", [True, False])
def test_random(drop_last):
    rows = pairs(50, 60, np.random.default_rng(0))
    order = RandomSampler(rows, generator=generator_for(50))
    default = theirs.DefaultBatchSampler(order, batch_size=8, drop_last=drop_last)
    ours, shortfall = our_batches(rows, kind=SamplerKind.RANDOM, per_device_batch_size=8, drop_last=drop_last)
    assert ours == their_batches(default)
    assert shortfall.batches_expected == len(default)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize(("distinct", "size"), [(2000, 8), (60, 8), (60, 2), (12, 8), (5, 4), (2, 4)])
def test_no_duplicates(distinct, size, columns, drop_last):
    rows = pairs(90, distinct, np.random.default_rng(distinct), columns)
    sampler = theirs.NoDuplicatesBatchSampler(
        as_dataset(rows),
        batch_size=size,
        drop_last=drop_last,
        generator=generator_for(len(rows)),
        seed=SEED + len(rows),
    )
    ours, shortfall = our_batches(
        rows, kind=SamplerKind.NO_DUPLICATES, per_device_batch_size=size, drop_last=drop_last
    )
    expected = their_batches(sampler)
    assert ours == expected
    assert shortfall.batches_expected == len(sampler)
    assert shortfall.batches_missing == max(0, len(sampler) - len(expected))


def test_the_cases_reach_delays_resampling_and_failure():
    """So that the comparison above cannot pass by rows that never conflict."""

    def shortfall(distinct, size):
        rows = pairs(90, distinct, np.random.default_rng(distinct), 2)
        return our_batches(rows, kind=SamplerKind.NO_DUPLICATES, per_device_batch_size=size)[1]

    assert shortfall(60, 8).rows_delayed > 0
    assert shortfall(12, 8).batches_missing > 0
    assert shortfall(12, 8).batches_resampled == 0
    assert shortfall(5, 4).rows_left_out > 0
    resampled = shortfall(40, 8)
    assert resampled.batches_resampled > 0


def test_no_duplicates_hashed():
    rows = pairs(90, 40, np.random.default_rng(3), 3)
    sampler = theirs.NoDuplicatesBatchSampler(
        as_dataset(rows),
        batch_size=8,
        drop_last=True,
        generator=generator_for(90),
        seed=SEED + 90,
        precompute_hashes=True,
    )
    # One process: workers of a pool would import everything again.
    sampler.precompute_num_proc = None
    ours, _ = our_batches(rows, kind=SamplerKind.NO_DUPLICATES, per_device_batch_size=8)
    assert ours == their_batches(sampler)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("within", [SamplerKind.RANDOM, SamplerKind.NO_DUPLICATES])
@pytest.mark.parametrize("policy", list(GroupedPolicy))
@pytest.mark.parametrize("sizes", [(40, 23, 9), (30, 5, 14)])
def test_grouped(sizes, policy, within, drop_last):
    parts = [pairs(count, 30, np.random.default_rng(count)) for count in sizes]
    children = []
    for part in parts:
        order = generator_for(len(part))
        if within is SamplerKind.NO_DUPLICATES:
            child = theirs.NoDuplicatesBatchSampler(
                as_dataset(part), 6, drop_last, generator=order, seed=SEED + len(part)
            )
        else:
            child = theirs.DefaultBatchSampler(RandomSampler(part, generator=order), 6, drop_last)
        children.append(child)
    many = {
        GroupedPolicy.ROUND_ROBIN: theirs.RoundRobinBatchSampler,
        GroupedPolicy.PROPORTIONAL: theirs.ProportionalBatchSampler,
    }[policy]
    total = sum(map(len, children))
    sampler = many(
        ConcatDataset([as_dataset(part) for part in parts]),
        children,
        generator=generator_for(total),
        seed=SEED + total,
    )
    ours, shortfall = our_batches(
        [row for part in parts for row in part],
        [f"set {number}" for number, part in enumerate(parts) for _ in part],
        kind=SamplerKind.GROUPED,
        per_device_batch_size=6,
        drop_last=drop_last,
        policy=policy,
        within_source=within,
    )
    assert ours == their_batches(sampler)
    assert shortfall.batches_expected == len(sampler)


@pytest.mark.parametrize("count", [50, 64, 7])
def test_devices_get_the_batches_that_accelerate_deals(count):
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    rows = pairs(count, 500, np.random.default_rng(1))
    world = 3
    described = BatchSampler(SamplerKind.SEQUENTIAL, 4, world_size=world, gather=True)
    epoch = draw_epoch(described, TrainingRows.from_texts(rows), TorchOrders())
    plain = TorchBatchSampler(SequentialSampler(rows), 4, drop_last=True)
    # sentence-transformers sets even_batches to False for training.
    dealt = [list(shard(plain, world, device, even_batches=False)) for device in range(world)]
    steps = [[row for batch in step for row in batch] for step in zip(*dealt, strict=True)]
    assert [rows.tolist() for rows in epoch.contrasts] == steps


def test_group_by_label_is_the_opposite():
    """Its batches hold every label at least twice: for in-batch negatives, a false negative for each anchor."""
    labels = [row % 5 for row in range(60)]
    rows = datasets.Dataset.from_dict({"text": [f"text {row}" for row in range(60)], "label": labels})
    sampler = theirs.GroupByLabelBatchSampler(
        rows, 8, True, valid_label_columns=["label"], generator=torch.Generator(), seed=0
    )
    batches = their_batches(sampler)
    assert batches
    for batch in batches:
        assert min(np.unique([labels[row] for row in batch], return_counts=True)[1]) >= 2


def false_negatives_per_anchor(groups, batches):
    """Mean over the anchors of all batches of the number of other rows of the same group."""
    counted = [sum(groups[i] == groups[j] for j in batch) - 1 for batch in batches for i in batch]
    return sum(counted) / len(counted)


def test_the_documented_effects_are_measured(repository):
    lines = (repository / "examples" / "helpdesk.jsonl").read_text("utf-8").splitlines()
    file = [json.loads(line) for line in lines]

    def measured(described, rows=file, epochs=10):
        training = TrainingRows.from_texts([[row["text"]] for row in rows], [row["source"] for row in rows])
        rng = np.random.default_rng(0)
        batches = [
            batch for _ in range(epochs) for batch in draw_epoch(described, training, rng).full_contrasts
        ]
        return false_negatives_per_anchor([row["group"] for row in rows], batches)

    in_order = BatchSampler(SamplerKind.SEQUENTIAL, 64)
    codes = np.unique([row["group"] for row in file], return_inverse=True)[1].tolist()
    by_label = theirs.GroupByLabelBatchSampler(
        datasets.Dataset.from_dict({"label": codes}), 64, True, ["label"], torch.Generator(), 0
    )
    labelled = []
    for epoch in range(20):
        by_label.set_epoch(epoch)
        labelled += their_batches(by_label)
    found = {
        "`random`": measured(BatchSampler(SamplerKind.RANDOM, 64)),
        "`no_duplicates`": measured(BatchSampler(SamplerKind.NO_DUPLICATES, 64)),
        "`grouped`, `proportional`": measured(BatchSampler(SamplerKind.GROUPED, 64)),
        "`grouped`, `round_robin`": measured(
            BatchSampler(SamplerKind.GROUPED, 64, policy=GroupedPolicy.ROUND_ROBIN)
        ),
        "`sequential`, the file as it is (shuffled)": measured(in_order, epochs=1),
        "`sequential`, the file sorted by group": measured(
            in_order, sorted(file, key=lambda row: row["group"]), epochs=1
        ),
        "`GROUP_BY_LABEL` with the group as label": false_negatives_per_anchor(codes, labelled),
    }
    page = (repository / "docs" / "samplers.md").read_text("utf-8")
    table = page.split("| batches | false negatives per anchor |")[1].split("\n\n")[0]
    documented = {
        label: float(value) for label, value in re.findall(r"^\| (.+) \| ([\d.]+) \|$", table, re.MULTILINE)
    }
    assert found == pytest.approx(documented, abs=0.025)
