"""Probes of small corpora under other samplers, directions and with hard negatives: what comes out, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from probe_service.errors import CorpusError, ProbeError, RequestError
from tests.unit.measure.test_draws import meanings, share_by_numpy

VECTORS = {"kind": "embeddings"}
WORDS = ("the", "a", "cat", "sat", "on", "mat", "dogs", "run", "in", "park")


def rows_with_vectors(rows=120, distinct=90, seed=3):
    texts, groups, vectors = meanings(seed, rows, distinct)
    return [
        {"text": text, "group": group, "embedding": vector.tolist(), "source": f"source {number % 2}"}
        for number, (text, group, vector) in enumerate(zip(texts, groups, vectors, strict=True))
    ]


def test_n_max_is_tested_on_a_ladder_and_given_for_each_device(probe_rows):
    report = probe_rows(
        rows_with_vectors(),
        corpus=VECTORS,
        batch_sizes=(8, 24),
        temperature=0.2,
        budget=0.15,
        sampler={"kind": "no_duplicates", "world_size": 2, "gather": True},
    )
    limit, points = report.advice.n_max, report.scan
    assert [point.batch_size for point in points] == [*range(4, 65, 2), 70, 78, 86, 96, 106, 118]
    assert limit.tested_up_to == 118
    assert not limit.every_integer
    within = [point.batch_size for point in points if point.estimate.high <= 0.15]
    first_above = next(point for point in points if point.estimate.high > 0.15)
    assert limit.value == max(size for size in within if size < first_above.batch_size)
    assert limit.per_device == limit.value // 2
    tested = [point for point in points if point.batch_size <= limit.value]
    assert f"at each of the {len(tested)} batch sizes tested from 4 to {limit.value}" in limit.reason
    assert f"{first_above.estimate.high:.4f} at {first_above.batch_size}" in limit.reason
    assert [(point.batch_size, point.per_device_batch_size) for point in report.curve] == [(8, 4), (24, 12)]
    # What the curve says and what the search says is the same, where both were measured.
    at = {point.batch_size: point.estimate for point in points}
    for point in report.curve:
        assert point.false_negative_softmax_share == at[point.batch_size]
    assert "per_device_train_batch_size=" + str(limit.per_device) in report.advice.snippet
    assert {warning.code for warning in report.warnings} >= {"duplicates_across_devices"}


def test_batches_in_file_order_are_all_measured_and_have_no_error(probe_rows):
    rows = sorted(rows_with_vectors(), key=lambda row: row["group"])
    report = probe_rows(
        rows, corpus=VECTORS, batch_sizes=(16,), temperature=0.2, sampler={"kind": "sequential"}
    )
    (point,) = report.curve
    batches = np.arange(112).reshape(7, 16)
    vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
    truth = share_by_numpy(batches, vectors, [row["group"] for row in rows]).mean()
    share = point.false_negative_softmax_share
    assert share.value == pytest.approx(truth, abs=1e-6)
    assert (share.low, share.high) == (share.value, share.value)
    assert share.method == "all 7 batches that there are"
    assert point.num_batches == 7
    (shortfall,) = report.sampling.shortfall
    assert (shortfall.remainder_rows, shortfall.rows_left_out) == (8, 8)


def test_the_search_ends_where_the_sampler_fills_no_batch(probe_rows):
    """Sources of 60 rows each: batches of more than 60 are asked for by nobody and must not be in the way."""
    report = probe_rows(
        rows_with_vectors(), corpus=VECTORS, batch_sizes=(16,), temperature=0.2, sampler={"kind": "grouped"}
    )
    assert report.advice.n_max.tested_up_to == 59
    by_default = probe_rows(
        rows_with_vectors(), name="default", corpus=VECTORS, temperature=0.2, sampler={"kind": "grouped"}
    )
    assert [point.batch_size for point in by_default.curve] == [2, 4, 8, 16, 32]


def test_batches_are_counted_as_they_were_measured(probe_rows):
    """Two sources of 60 rows make three batches of 20 each and no more, however many the rows would fill."""
    rows = rows_with_vectors()[:115]
    report = probe_rows(rows, corpus=VECTORS, batch_sizes=(20,), temperature=0.2, sampler={"kind": "grouped"})
    (point,) = report.curve
    assert [row["source"] for row in rows].count("source 1") == 57
    # 58 and 57 rows make two batches each.
    assert point.num_batches == 20 * 4


def test_equal_texts_alone_do_not_stop_a_probe(probe_rows):
    """`no_duplicates` is tried as a remedy, and cannot fill any batch."""
    rows = [{"text": "the same", "embedding": [1.0, 2.0]}] * 40
    report = probe_rows(rows, corpus=VECTORS, batch_sizes=(2,))
    assert report.curve[0].false_negative_softmax_share.value == 1.0
    assert "no_duplicates" not in [remedy.kind for remedy in report.advice.remedies]


def test_vectors_without_texts_have_nothing_to_keep_apart(probe_rows):
    rows = [{key: row[key] for key in ("group", "embedding")} for row in rows_with_vectors(rows=40)]
    report = probe_rows(rows, corpus=VECTORS, batch_sizes=(8,), sampler={"kind": "no_duplicates"})
    assert "no_texts_to_keep_apart" in {warning.code for warning in report.warnings}
    assert report.sampling.shortfall[0].rows_delayed == 0


def texts(count):
    return [{"text": f"row {row}"} for row in range(count)]


def tuples(lacking=()):
    rows = [{"anchor": f"q {row}", "positive": f"d {row}", "negatives": [f"n {row}"]} for row in range(12)]
    for row in lacking:
        rows[row]["negatives"] = []
    return rows


REFUSED = {
    "not a multiple of the devices": (
        texts(40),
        {"batch_sizes": (10,), "sampler": {"world_size": 4, "gather": True}},
        "batch_size_not_divisible",
        "batch_sizes",
    ),
    "one row a device": (
        texts(40),
        {"batch_sizes": (4,), "sampler": {"world_size": 4, "gather": True}},
        "batch_size_not_divisible",
        "batch_sizes",
    ),
    "no power of two": (
        texts(20),
        {"sampler": {"world_size": 16, "gather": True}},
        "batch_size_not_divisible",
        "batch_sizes",
    ),
    "a sample of the rows": (
        texts(40),
        {"corpus": {"max_rows": 20}, "batch_sizes": (4,), "sampler": {"kind": "no_duplicates"}},
        "sampler_needs_whole_corpus",
        "max_rows",
    ),
    "no sources": (
        texts(40),
        {"batch_sizes": (4,), "sampler": {"kind": "grouped"}},
        "sampler_needs_sources",
        "source",
    ),
    "sources too small": (
        [
            {"embedding": [1.0, row / 40, row % 7], "source": f"source {row % 4}", "text": f"row {row}"}
            for row in range(40)
        ],
        {"corpus": VECTORS, "batch_sizes": (16,), "sampler": {"kind": "grouped"}},
        "sampler_no_batch",
        "batch_sizes",
    ),
    "directions of sentences": (
        texts(40),
        {"batch_sizes": (4,), "loss": {"directions": ["query_to_doc", "doc_to_query"]}},
        "directions_need_pairs",
        "directions",
    ),
    "no own pair": (
        tuples(),
        {
            "batch_sizes": (4,),
            "loss": {"directions": ["query_to_doc", "doc_to_doc"], "partition_mode": "per_direction"},
        },
        "sampler_invalid",
        None,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(probe_rows, case):
    rows, request, code, column = REFUSED[case]
    with pytest.raises(ProbeError) as refused:
        probe_rows(rows, **request)
    assert isinstance(refused.value, RequestError)
    assert (refused.value.code, refused.value.column) == (code, column)


def test_the_refusal_for_want_of_a_batch_says_what_there_is(probe_rows):
    rows, request, *_ = REFUSED["sources too small"]
    with pytest.raises(RequestError, match="grouped batches of 40 rows from sources of 10, 10, 10, 10"):
        probe_rows(rows, **request)


def test_rows_without_hard_negatives_are_counted(probe_rows):
    rows = [{"anchor": " ", "positive": "d", "negatives": ["n"]}, *tuples(lacking=(3, 7, 8))]
    with pytest.raises(CorpusError) as refused:
        probe_rows(rows, batch_sizes=(4,), loss={"train_group_size": 2})
    assert refused.value.code == "corpus_hard_negatives_missing"
    # Row 1 is blank and left out; the fourth of the others is row 5 of the file.
    assert (refused.value.row, refused.value.count) == (5, 3)
