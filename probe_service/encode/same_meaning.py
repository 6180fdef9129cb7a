"""How similar an encoder finds texts that mean the same: the floor that the worst case assumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files

import numpy as np

from probe_service.encode.cache import VectorCache, encode_with_cache
from probe_service.encode.protocol import CheckedEncoder

__all__ = ["SimilarityFloor", "same_meaning_pairs", "same_meaning_similarity_floor"]

_FLOOR_QUANTILE = 0.02


@dataclass(frozen=True)
class SimilarityFloor:
    """A cosine that nearly all same-meaning pairs reach, and how it was obtained.

    Args:
        similarity: s₀, a cosine in [−1, 1].
        source: In words, for the report.
    """

    similarity: float
    source: str


@cache
def same_meaning_pairs() -> tuple[tuple[str, str], ...]:
    """Return the bundled pairs of English texts that mean the same."""
    lines = package_files("probe_service.encode").joinpath("same_meaning.jsonl").read_text("utf-8")
    return tuple(
        (pair["text"], pair["other_text"]) for pair in map(json.loads, filter(None, lines.splitlines()))
    )


def same_meaning_similarity_floor(
    encoder: CheckedEncoder, cache: VectorCache, *, checkpoint: Callable[[], None] | None = None
) -> SimilarityFloor:
    """Return the 2nd percentile of the encoder's cosines on the bundled same-meaning pairs (STATISTICS §5.6).

    The worst case then counts every unjudged pair at least this similar as a false negative. What it assumes is
    that same-meaning pairs of the corpus are as similar as these; 2 in 100 are allowed to lie below.

    Args:
        encoder: The encoder.
        cache: Its cache; the bundled texts are encoded once.
        checkpoint: Called between calls to the model; may raise to cancel.

    Raises:
        EncoderError, ServiceError: As `encode_with_cache`.
    """
    pairs = same_meaning_pairs()
    encoded = encode_with_cache(
        encoder, [text for pair in pairs for text in pair], cache, checkpoint=checkpoint
    )
    cosines = np.einsum("nd,nd->n", encoded.vectors[0::2], encoded.vectors[1::2])
    return SimilarityFloor(
        float(np.clip(np.quantile(cosines, _FLOOR_QUANTILE), -1.0, 1.0)),
        f"the 2nd percentile of the cosines of {len(pairs)} bundled pairs of English sentences that mean the same,"
        f" under {encoder.info.name}",
    )
