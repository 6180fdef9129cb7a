"""How texts are put together for the model: windows to tokenize at once, and batches without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["batches_by_length", "split_by_work"]

_CHARACTERS_PER_TOKEN = 4
_ASSUMED_MAX_LENGTH = 512


def split_by_work(
    texts: Sequence[str], max_length: int | None, *, most_texts: int, most_characters: int | None
) -> Iterator[list[str]]:
    """Split texts into lists of about the same work.

    Args:
        texts: The texts, shortest first.
        max_length: Tokens that the encoder cuts at, if it says so.
        most_texts: Of one list.
        most_characters: Of one list, every text counted as long as its longest; None for no bound. A text that is
            longer than that by itself stands alone.

    Yields:
        The texts of one list, in order; never none.
    """
    longest = (max_length or _ASSUMED_MAX_LENGTH) * _CHARACTERS_PER_TOKEN
    part: list[str] = []
    for text in texts:
        # All are padded to the longest, which is the last.
        characters = (len(part) + 1) * min(len(text), longest)
        if part and (
            len(part) == most_texts or (most_characters is not None and characters > most_characters)
        ):
            yield part
            part = []
        part.append(text)
    if part:
        yield part


def batches_by_length(
    lengths: NDArray[np.intp], most_tokens: int, *, equal: bool
) -> Iterator[NDArray[np.intp]]:
    """Put rows of similar length into batches, longest first, so that the last ones are short.

    Args:
        lengths: (n,) tokens of each row.
        most_tokens: Of one batch, every row counted as long as its longest; a longer row stands alone.
        equal: Only rows of one length share a batch, so that nothing is padded.

    Yields:
        Rows of one batch; each row is in one of them.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        length = lengths[order[start]]
        end = start + max(most_tokens // max(int(length), 1), 1)
        if equal:
            end = start + int((lengths[order[start:end]] == length).sum())
        yield order[start:end]
        start = end
