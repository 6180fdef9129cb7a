"""How similar a text is to itself through dropout: the positives of sentences that have none (SimCSE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.protocol import CheckedEncoder
from probe_service.errors import EncoderError

__all__ = ["DropoutSimilarities", "dropout_similarities"]


@dataclass(frozen=True)
class DropoutSimilarities:
    """s⁺ of n texts from two dropout passes.

    Args:
        similarity: (n,) float32, cosine of the two vectors of each text; NaN where one is zero or not finite.
        rates: The different dropout rates above 0 in the model, ascending; most have one, such as 0.1.
    """

    similarity: NDArray[np.float32]
    rates: tuple[float, ...]


def dropout_similarities(
    encoder: CheckedEncoder, texts: Sequence[str], *, seed: int, checkpoint: Callable[[], None]
) -> DropoutSimilarities:
    """Encode every text twice with the encoder's own dropout on, and return the cosine of the two vectors.

    These are the positives of unsupervised SimCSE (Gao et al. 2021, §3), where a sentence is its own positive. Texts are
    read as by `encode`: same prompt, cut, pooling. The same texts in the same order, seed, device and versions give the
    same numbers; one text's number depends on those that it is fed with.

    Args:
        encoder: One that runs here.
        texts: n texts.
        seed: Of the request; torch's own generator is left as it was.
        checkpoint: Called before each call of the model; may raise to abandon the work.

    Raises:
        EncoderError: encoder_without_dropout where the encoder runs on a server, or has no dropout above 0;
            encoder_out_of_memory, encoder_failed.
    """
    model = encoder.encoder
    if not isinstance(model, ModuleEncoder):
        raise EncoderError(
            "encoder_without_dropout",
            f"{encoder.info.name} runs on a server, whose dropout cannot be turned on; give pairs, or an encoder that runs"
            " here.",
        )
    rates = model.dropout_rates
    if not rates:
        raise EncoderError(
            "encoder_without_dropout",
            f"{encoder.info.name} has no dropout above 0, so both passes would give the same vector; give pairs.",
        )
    similarity = np.empty(len(texts), dtype=np.float32)
    for number, (rows, call) in enumerate(model.dropout_calls(texts)):
        checkpoint()
        call_seed = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
        similarity[rows] = _cosines(*model.dropout_views(call, call_seed))
    return DropoutSimilarities(similarity, rates)


def _cosines(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float64]:
    left, right = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (left * right).sum(axis=1) / np.sqrt((left**2).sum(axis=1) * (right**2).sum(axis=1))
    clamped: NDArray[np.float64] = np.clip(cosines, -1.0, 1.0)
    return clamped
