"""Candidates by hand: small batches whose terms can be written down."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from probe_service.corpus.candidates import (
    candidates_per_anchor,
    draw_hard_negatives,
    softmax_candidates,
)
from probe_service.errors import CorpusError, RequestError
from probe_service.schemas import Direction, PartitionMode

ALL = tuple(Direction)


@pytest.mark.parametrize(
    ("size", "world", "gather", "hard", "expected"),
    [
        (64, 1, False, 0, 63),
        (64, 4, False, 1, 127),
        (64, 4, True, 0, 255),
        (64, 4, True, 1, 511),
        (64, 4, True, 3, 1023),
        (64, 4, False, 3, 255),
        (16, 4, True, 1, 127),
    ],
)
def test_candidates_of_an_anchor(size, world, gather, hard, expected):
    assert candidates_per_anchor(size, world, gather=gather, hard_negatives=hard) == expected


def terms_written_down(direction, rows, hard):
    """Every pair that row 0 is compared with, by name."""
    docs = [("positive", row) for row in range(rows)]
    docs += [(f"negative {h}", row) for h in range(hard) for row in range(rows)]
    anchors = [("anchor", row) for row in range(rows)]
    match direction:
        case "query_to_doc":
            return docs
        case "query_to_query":
            return [term for term in anchors if term[1] != 0]
        case "doc_to_query":
            return anchors
        case "doc_to_doc":
            return [term for term in docs if term[1] != 0]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("hard", [0, 1, 3])
def test_populations_of_each_direction(rows, hard):
    more = [choice for size in range(4) for choice in itertools.combinations(ALL[1:], size)]
    for directions in [(Direction.QUERY_TO_DOC, *choice) for choice in more]:
        (found,) = softmax_candidates(directions, PartitionMode.JOINT, rows, hard)
        terms = [
            (direction, *term)
            for direction in directions
            for term in terms_written_down(direction, rows, hard)
        ]
        own = [
            term
            for term in terms
            if term[1:] == ("positive", 0) or (term[0] == "doc_to_query" and term[1:] == ("anchor", 0))
        ]
        assert found.own_pair == len(own)
        assert found.terms == len(terms)
        assert found.other_anchors == sum(term[1] == "anchor" and term[2] != 0 for term in terms)
        assert found.other_positives == sum(term[1] == "positive" and term[2] != 0 for term in terms)
        hard_terms = [term for term in terms if term[1].startswith("negative")]
        assert found.own_hard_negatives == sum(term[2] == 0 for term in hard_terms)
        assert found.other_hard_negatives == sum(term[2] != 0 for term in hard_terms)


@pytest.mark.parametrize(
    ("directions", "mode"),
    [
        ((Direction.DOC_TO_QUERY,), PartitionMode.JOINT),
        ((), PartitionMode.JOINT),
        ((Direction.QUERY_TO_DOC, Direction.QUERY_TO_DOC), PartitionMode.JOINT),
        ((Direction.QUERY_TO_DOC, Direction.QUERY_TO_QUERY), PartitionMode.PER_DIRECTION),
        ((Direction.QUERY_TO_DOC, Direction.DOC_TO_DOC), PartitionMode.PER_DIRECTION),
    ],
)
def test_what_the_loss_refuses_is_refused(directions, mode):
    with pytest.raises(RequestError) as caught:
        softmax_candidates(directions, mode, 4)
    assert caught.value.code == "sampler_invalid"


@pytest.mark.parametrize(("size", "world", "hard"), [(0, 1, 0), (4, 0, 0), (4, 1, -1)])
def test_impossible_batches_are_refused(size, world, hard):
    with pytest.raises(RequestError):
        candidates_per_anchor(size, world, hard_negatives=hard)


def test_a_long_list_is_drawn_from_and_a_short_one_repeated():
    drawn = draw_hard_negatives([1, 2, 4, 9], 5, np.random.default_rng(0))
    assert drawn.places.shape == (4, 4)
    one, two, four, nine = (np.bincount(row, minlength=9) for row in drawn.places)
    assert one.tolist() == [4] + [0] * 8
    # Two negatives, written down twice, of which four are drawn: each twice.
    assert two.tolist() == [2, 2] + [0] * 7
    assert four.tolist() == [1, 1, 1, 1] + [0] * 5
    assert (nine.max(), nine.sum()) == (1, 4)
    assert (drawn.rows_repeating, drawn.rows_choosing) == (2, 1)


def test_a_list_that_does_not_divide_repeats_unevenly():
    # Three negatives, four wanted: from two copies of each, four of six are drawn.
    rng = np.random.default_rng(0)
    counts = np.array(
        [np.bincount(draw_hard_negatives([3], 5, rng).places[0], minlength=3) for _ in range(3000)]
    )
    assert counts.max() == 2
    # (2, 2, 0) in 3 of 15 choices of four from six, (2, 1, 1) in the other 12; sd of the share .0073.
    assert abs((counts.min(axis=1) == 0).mean() - 3 / 15) < 0.03


def test_groups_of_one_need_no_hard_negative():
    drawn = draw_hard_negatives([0, 3], 1, np.random.default_rng(0))
    assert drawn.places.shape == (2, 0)
    assert (drawn.rows_repeating, drawn.rows_choosing) == (0, 1)


def test_rows_without_any_are_refused():
    with pytest.raises(CorpusError) as caught:
        draw_hard_negatives([2, 0, 1, 0], 3, np.random.default_rng(0))
    assert (caught.value.code, caught.value.count) == ("corpus_hard_negatives_missing", 2)
    with pytest.raises(RequestError):
        draw_hard_negatives([2], 0, np.random.default_rng(0))
