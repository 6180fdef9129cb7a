"""How texts are split into calls to the model: little padding, and calls short enough to cancel between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["split_by_work"]

_CPU_TEXTS_PER_CALL = 32
_GPU_TEXTS_PER_CALL = 128
# About 4,000 tokens: on a CPU a call stays near a second for a small model, and a long text does not pad 31 short
# ones to its own length.
_CPU_CHARACTERS_PER_CALL = 16_384
_CHARACTERS_PER_TOKEN = 4
_ASSUMED_MAX_LENGTH = 512


def split_by_work(texts: Sequence[str], max_length: int | None, *, on_cpu: bool) -> Iterator[list[str]]:
    """Split texts into calls of about the same work.

    Args:
        texts: The texts, shortest first.
        max_length: Tokens that the encoder cuts at, if it says so.
        on_cpu: On a CPU the padded characters of a call are bounded, elsewhere only the number of texts.

    Yields:
        The texts of one call, in order; never none.
    """
    texts_per_call = _CPU_TEXTS_PER_CALL if on_cpu else _GPU_TEXTS_PER_CALL
    longest = (max_length or _ASSUMED_MAX_LENGTH) * _CHARACTERS_PER_TOKEN
    call: list[str] = []
    for text in texts:
        # All are padded to the longest of the call, which is the last.
        padded_characters = (len(call) + 1) * min(len(text), longest)
        if call and (
            len(call) == texts_per_call or (on_cpu and padded_characters > _CPU_CHARACTERS_PER_CALL)
        ):
            yield call
            call = []
        call.append(text)
    if call:
        yield call
