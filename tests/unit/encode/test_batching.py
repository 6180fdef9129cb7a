"""Every text is in one batch, and batches are of the sizes that they may have."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from probe_service.encode.batching import batches_by_length, split_by_work


@given(st.lists(st.integers(0, 30), max_size=80), st.integers(1, 100), st.booleans())
def test_every_row_is_in_one_batch_of_allowed_size(lengths: list[int], most_tokens: int, equal: bool) -> None:
    batches = [
        rows.tolist()
        for rows in batches_by_length(np.array(lengths, dtype=np.intp), most_tokens, equal=equal)
    ]

    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        longest = max(lengths[row] for row in rows)
        assert len(rows) == 1 or len(rows) * longest <= most_tokens
        assert not equal or len({lengths[row] for row in rows}) == 1
    in_order = [lengths[row] for rows in batches for row in rows]
    assert in_order == sorted(lengths, reverse=True)


def test_batches_are_as_large_as_they_may_be() -> None:
    lengths = np.array([3, 9, 3, 3, 9, 3], dtype=np.intp)

    assert [rows.tolist() for rows in batches_by_length(lengths, 9, equal=True)] == [
        [1],
        [4],
        [0, 2, 3],
        [5],
    ]
    assert [rows.tolist() for rows in batches_by_length(lengths, 40, equal=False)] == [[1, 4, 0, 2], [3, 5]]


def test_texts_are_split_by_number_and_by_padded_characters() -> None:
    texts = ["a"] * 5 + ["b" * 10] * 5 + ["c" * 500]

    parts = list(split_by_work(texts, None, most_texts=4, most_characters=30))

    # The fifth "a" would be padded to ten with the tens; three tens are 30 characters.
    assert [len(part) for part in parts] == [4, 3, 3, 1]
    assert [text for part in parts for text in part] == texts
    assert [len(part) for part in split_by_work(texts, None, most_texts=8, most_characters=None)] == [8, 3]


def test_characters_that_the_encoder_cuts_do_not_count() -> None:
    # An encoder that cuts at 2 tokens reads about 8 characters of each.
    assert [len(part) for part in split_by_work(["d" * 1000] * 6, 2, most_texts=100, most_characters=24)] == [
        3,
        3,
    ]
