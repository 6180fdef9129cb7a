"""What every encoder is: something that turns texts into unit vectors, all at once or as they come."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from probe_service.schemas import EncoderInfo

__all__ = [
    "DIGEST_BYTES",
    "CheckedEncoder",
    "EncodedTexts",
    "Encoder",
    "concatenate_encoded",
    "digest_texts",
    "to_unit_length",
]

DIGEST_BYTES = 16


@dataclass(frozen=True)
class EncodedTexts:
    """Vectors of n texts, in the order of the texts.

    Args:
        vectors: (n, d) float32, each of length 1. A row that came out zero or not finite is left as it is.
        was_truncated: (n,) bool; True where the tokenizer cut the text at the encoder's maximum length.
        input_digests: (n, 16) uint8, digest of what the model was fed (token ids after the cut), so that rows
            equal only after the cut can be found. A back end that does not show its tokens digests the text.
    """

    vectors: NDArray[np.float32]
    was_truncated: NDArray[np.bool_]
    input_digests: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """Width d of the vectors."""
        return int(self.vectors.shape[1])

    @classmethod
    def empty(cls, count: int, dimension: int) -> EncodedTexts:
        """Return room for `count` rows: zero vectors, not truncated, zero digests."""
        return cls(
            np.zeros((count, dimension), dtype=np.float32),
            np.zeros(count, dtype=np.bool_),
            np.zeros((count, DIGEST_BYTES), dtype=np.uint8),
        )

    def take(self, rows: NDArray[np.intp]) -> EncodedTexts:
        """Return the given rows, in the given order; a row may be taken more than once."""
        return EncodedTexts(self.vectors[rows], self.was_truncated[rows], self.input_digests[rows])

    def put(self, rows: NDArray[np.intp], given: EncodedTexts) -> None:
        """Write the given rows, in their order, into the rows named; one that is named twice holds the last."""
        self.vectors[rows] = given.vectors
        self.was_truncated[rows] = given.was_truncated
        self.input_digests[rows] = given.input_digests


class Encoder(Protocol):
    """Anything that turns texts into vectors."""

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return one vector a text, in order; an empty list gives shape (0, d)."""
        ...

    def stream(self, texts: Sequence[str]) -> Generator[tuple[NDArray[np.intp], EncodedTexts], None, None]:
        """Yield the same as `encode`, as it comes: some rows, and what they are; every row once, in any order.

        The encoder may be at work on later rows while the caller holds earlier ones. Closing the iterator ends that.
        """
        ...


class CheckedEncoder:
    """An encoder that passed its check, and the facts about it that go into the report.

    The facts may be known before the encoder is loaded: that happens when `encoder` is first asked for.

    Args:
        info: The facts.
        load: Gives the encoder, and is called until it has, by one thread at a time.
    """

    def __init__(self, info: EncoderInfo, load: Callable[[], Encoder]) -> None:
        self.info = info
        self._load = load
        self._loading = threading.Lock()
        self._encoder: Encoder | None = None

    @property
    def encoder(self) -> Encoder:
        """The encoder itself.

        Raises:
            EncoderError: As `load_encoder`; encoder_changed where it is no longer what the facts say.
        """
        with self._loading:
            if self._encoder is None:
                self._encoder = self._load()
            return self._encoder


def to_unit_length(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return v / ‖v‖ of each row in float32; a zero or non-finite row is returned unchanged.

    Lengths are taken in float64, so that a row of large float32 values does not overflow.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
        usable = np.isfinite(lengths) & (lengths > 0.0)
        scaled: NDArray[np.float32] = (vectors / np.where(usable, lengths, 1.0)).astype(np.float32)
    return scaled


def digest_texts(texts: Iterable[str]) -> list[bytes]:
    """Return the 16-byte BLAKE2b digest of each text's UTF-8 bytes; lone surrogates are digested as they are."""
    return [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
        for text in texts
    ]


def concatenate_encoded(parts: Sequence[EncodedTexts], dimension: int) -> EncodedTexts:
    """Return the rows of all parts, one after another; (0, dimension) if there are none."""
    if not parts:
        return EncodedTexts.empty(0, dimension)
    return EncodedTexts(
        np.concatenate([part.vectors for part in parts]),
        np.concatenate([part.was_truncated for part in parts]),
        np.concatenate([part.input_digests for part in parts]),
    )
