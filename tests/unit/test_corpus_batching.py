"""Batches by hand: four samplers on rows few enough to follow with a pencil."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.corpus.batching import (
    BatchSampler,
    TrainingRows,
    draw_epoch,
)
from probe_service.errors import RequestError
from probe_service.schemas import GroupedPolicy, SamplerKind


class FileOrder:
    """A generator that shuffles nothing, so that the rules can be followed by hand."""

    def permutation(self, x):
        return np.arange(x)


class GivenOrders:
    """A generator whose orders are written down."""

    def __init__(self, *orders):
        self._orders = iter(orders)

    def permutation(self, x):
        return np.array(next(self._orders))


def rows_of(*texts, sources=None):
    return TrainingRows.from_texts([row.split() for row in texts], sources)


def batches(epoch):
    return [batch.tolist() for batch in epoch.device_batches]


def sampler(kind, size, **more):
    return BatchSampler(SamplerKind(kind), size, **more)


def test_texts_are_shared_across_columns_and_exactly():
    rows = rows_of("a b", "c a", "A d", "e e", "b c")
    # 'a' stands in rows 0 and 1, 'b' in 0 and 4, 'c' in 1 and 4; 'A' is another text; row 3 repeats only itself.
    assert [len(shared) for shared in rows.shared_texts] == [2, 2, 0, 0, 2]
    assert set(rows.shared_texts[0]) & set(rows.shared_texts[1])
    assert not set(rows.shared_texts[0]) & set(rows.shared_texts[2])
    assert TrainingRows.from_texts([["a"], ["a "]]).shared_texts == ((), ())


def test_sequential_batches_are_the_file_cut_up():
    rows = rows_of(*"abcdefg")
    dropped = draw_epoch(sampler("sequential", 3), rows, FileOrder())
    assert batches(dropped) == [[0, 1, 2], [3, 4, 5]]
    assert (dropped.shortfall.remainder_rows, dropped.shortfall.rows_left_out) == (1, 1)
    kept = draw_epoch(sampler("sequential", 3, drop_last=False), rows, FileOrder())
    assert batches(kept) == [[0, 1, 2], [3, 4, 5], [6]]
    assert (kept.shortfall.remainder_rows, kept.shortfall.short_batches) == (0, 1)
    assert kept.full_contrasts.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_duplicate_waits_and_is_tried_first_for_the_next_batch():
    # Row 1 repeats row 0, rows 3 and 5 repeat row 2's text.
    rows = rows_of("a", "a", "x b", "b c", "d", "b e", "f", "g", "h")
    epoch = draw_epoch(sampler("no_duplicates", 3), rows, FileOrder())
    # Batch 1: 0, (1 waits), 2, (3 waits), 4. Batch 2: 1, 3, (5 waits), 6. Batch 3: 5, 7, 8.
    assert batches(epoch) == [[0, 2, 4], [1, 3, 6], [5, 7, 8]]
    assert (epoch.shortfall.rows_delayed, epoch.shortfall.rows_left_out) == (3, 0)


def test_too_few_distinct_rows_leave_unfilled_batches_out_and_repeat_others():
    # Five rows of one text and four others: batches of 3 from 9 rows, announced 3.
    rows = rows_of("a", "a", "a", "a", "a", "b", "c", "d", "e")
    epoch = draw_epoch(sampler("no_duplicates", 3), rows, FileOrder())
    # First pass: [0,5,6], [1,7,8], then three batches of one. Second pass, same order: [0,5,6] makes up for one.
    assert batches(epoch) == [[0, 5, 6], [1, 7, 8], [0, 5, 6]]
    fall = epoch.shortfall
    assert (fall.batches_expected, fall.batches_resampled, fall.batches_missing) == (3, 1, 0)
    assert (fall.batches_prevented, fall.rows_left_out, fall.rows_repeated) == (1, 3, 3)
    kept = draw_epoch(sampler("no_duplicates", 3, drop_last=False), rows, FileOrder())
    assert batches(kept) == [[0, 5, 6], [1, 7, 8], [2], [3], [4]]
    assert (kept.shortfall.short_batches, kept.shortfall.batches_resampled) == (3, 0)


def test_resampling_gives_up_after_two_orders():
    # Ten rows, announced 5 batches of 2; each order gives one: the single 'b' with an 'a'.
    rows = rows_of(*"aaaaaaaaab")
    fall = draw_epoch(sampler("no_duplicates", 2), rows, FileOrder()).shortfall
    assert (fall.batches_expected, fall.batches_resampled, fall.batches_missing) == (5, 2, 2)
    none = draw_epoch(sampler("no_duplicates", 2), rows_of(*"aaaa"), FileOrder()).shortfall
    assert (none.batches_expected, none.batches_resampled, none.batches_missing) == (2, 0, 2)
    assert none.rows_left_out == 4


def test_an_order_without_any_full_batch_is_not_made_up_for():
    # Taken first, row 0 blocks 1 and 2: [0, 3] and [1, 2] are short. Another order would give [1, 2, 3].
    rows = rows_of("a b", "a", "b", "c")
    orders = GivenOrders([0, 1, 2, 3], [1, 2, 3, 0])
    epoch = draw_epoch(sampler("no_duplicates", 3), rows, orders)
    assert batches(epoch) == []
    assert (epoch.shortfall.batches_expected, epoch.shortfall.batches_missing) == (1, 1)


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=4), min_size=1, max_size=40),
    size=st.integers(2, 6),
    seed=st.integers(0, 99),
)
def test_rows_wait_as_if_every_waiting_row_were_tried_in_order(texts, size, seed):
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    pending, expected = list(order), []
    while pending:
        batch, said = [], set()
        for row in pending:
            if len(batch) < size and not said & set(texts[row]):
                batch.append(row)
                said |= set(texts[row])
        pending = [row for row in pending if row not in batch]
        expected.append(batch)
    epoch = draw_epoch(
        sampler("no_duplicates", size, drop_last=False),
        TrainingRows.from_texts(texts),
        GivenOrders(order),
    )
    assert batches(epoch) == expected


def test_devices_get_batches_in_turn_and_gathering_joins_them():
    rows = rows_of("a", "b", "a", "c", "d", "e", "f", "g", "h", "i", "j")
    four = sampler("no_duplicates", 2, world_size=2, gather=True)
    epoch = draw_epoch(four, rows, FileOrder())
    # Per device nothing repeats; gathered, rows 0 and 2 (both 'a') meet again. The fifth batch has no partner.
    assert batches(epoch) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [rows.tolist() for rows in epoch.contrasts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (epoch.shortfall.batches_not_dealt, epoch.shortfall.remainder_rows) == (1, 1)
    assert epoch.shortfall.rows_left_out == 3
    alone = draw_epoch(sampler("no_duplicates", 2, world_size=2), rows, FileOrder())
    assert [rows.tolist() for rows in alone.contrasts] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_round_robin_stops_with_the_smallest_source():
    sources = ["big"] * 5 + ["small"] * 2 + ["big"] * 2
    rows = rows_of(*"abcdefghi", sources=sources)
    epoch = draw_epoch(sampler("grouped", 2, policy=GroupedPolicy.ROUND_ROBIN), rows, FileOrder())
    assert batches(epoch) == [[0, 1], [5, 6]]
    assert (epoch.shortfall.rows_left_out, epoch.shortfall.small_sources) == (5, ())
    too_small = draw_epoch(sampler("grouped", 3, policy=GroupedPolicy.ROUND_ROBIN), rows, FileOrder())
    assert batches(too_small) == []
    assert too_small.shortfall.small_sources == ("small",)
    assert too_small.shortfall.rows_left_out == 9


def test_proportional_goes_through_every_source():
    sources = ["big"] * 5 + ["small"] * 2 + ["big"] * 2
    rows = rows_of(*"abcdefghi", sources=sources)
    epoch = draw_epoch(sampler("grouped", 2), rows, FileOrder())
    assert batches(epoch) == [[0, 1], [2, 3], [4, 7], [5, 6]]
    assert epoch.shortfall.remainder_rows == epoch.shortfall.rows_left_out == 1


def test_gathering_mixes_sources():
    rows = rows_of(*"abcdefgh", sources=["x"] * 4 + ["y"] * 4)
    robin = sampler("grouped", 2, world_size=2, gather=True, policy=GroupedPolicy.ROUND_ROBIN)
    assert draw_epoch(robin, rows, FileOrder()).full_contrasts.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_grouped_sources_can_avoid_duplicates_within():
    rows = rows_of("a", "a", "b", "c", sources=["x"] * 4)
    epoch = draw_epoch(sampler("grouped", 2, within_source=SamplerKind.NO_DUPLICATES), rows, FileOrder())
    assert batches(epoch) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"per_device_batch_size": 1},
        {"per_device_batch_size": 2, "world_size": 0},
        {"per_device_batch_size": 2, "world_size": 2, "drop_last": False},
        {"per_device_batch_size": 2, "within_source": SamplerKind.GROUPED},
    ],
)
def test_impossible_samplers_are_refused(arguments):
    with pytest.raises(RequestError) as caught:
        BatchSampler(SamplerKind.GROUPED, **arguments)
    assert caught.value.code == "sampler_invalid"


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=3), min_size=1, max_size=40),
    kind=st.sampled_from(list(SamplerKind)),
    policy=st.sampled_from(list(GroupedPolicy)),
    within=st.sampled_from([SamplerKind.RANDOM, SamplerKind.NO_DUPLICATES]),
    size=st.integers(2, 7),
    world=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_epoch_keeps_its_promises(texts, kind, policy, within, size, world, drop_last, seed):
    sources = [f"source {row % 3}" for row in range(len(texts))]
    rows = TrainingRows.from_texts(texts, sources)
    rule = BatchSampler(
        kind,
        size,
        world_size=world,
        drop_last=drop_last or world > 1,
        policy=policy,
        within_source=within,
    )
    epoch = draw_epoch(rule, rows, np.random.default_rng(seed))
    fall = epoch.shortfall
    places = [row for batch in batches(epoch) for row in batch]
    assert fall.rows_left_out == len(texts) - len(set(places))
    assert fall.rows_repeated == len(places) - len(set(places))
    assert len(epoch.device_batches) % world == 0
    assert fall.batches_resampled * size >= fall.rows_repeated
    distinct = SamplerKind.NO_DUPLICATES in (kind, within if kind is SamplerKind.GROUPED else kind)
    for batch in batches(epoch):
        assert 1 <= len(batch) <= size
        assert len(batch) == size or not rule.drop_last
        assert len(set(batch)) == len(batch)
        if kind is SamplerKind.GROUPED:
            assert len({sources[row] for row in batch}) == 1
        if distinct:
            said = [text for row in batch for text in set(texts[row])]
            assert len(said) == len(set(said))
    if kind in (SamplerKind.RANDOM, SamplerKind.SEQUENTIAL) and world == 1:
        assert fall.rows_left_out == fall.remainder_rows == (len(texts) % size if rule.drop_last else 0)
    if kind is SamplerKind.NO_DUPLICATES and world == 1 and not rule.drop_last:
        assert fall.rows_left_out == 0


def test_random_batches_hold_every_pair_equally_often():
    rows = rows_of(*"abcdef")
    rng = np.random.default_rng(0)
    met = np.zeros((6, 6))
    epochs = 4000
    for _ in range(epochs):
        for batch in batches(draw_epoch(sampler("random", 3), rows, rng)):
            met[np.ix_(batch, batch)] += 1
    share = met[~np.eye(6, dtype=bool)] / epochs
    # A row's two companions are any two of the five others: each is met with probability 2/5 (sd .008).
    assert np.abs(share - 0.4).max() < 0.035
