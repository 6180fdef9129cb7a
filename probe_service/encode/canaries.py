"""Canaries: cosines of fixed text pairs, recorded from transformers itself, that an encoder must give at load.

Wrong pooling is the commonest mistake with sentence encoders, and it goes unnoticed: the vectors look fine.
The recording side shares nothing with the encoders of this package but the checkpoint's files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files as package_files
from typing import Any

import numpy as np

from probe_service.encode.protocol import Encoder
from probe_service.encode.transformer import quiet_libraries
from probe_service.encode.weights import locate_known, require_pinned_checksum
from probe_service.errors import EncoderError
from probe_service.known_encoders import find_known_encoder
from probe_service.settings import Settings

__all__ = ["CANARY_TOLERANCE", "Canary", "canaries_of", "check_canaries", "record_canaries"]

CANARY_TOLERANCE = 1e-3

_LONG_TEXT = " ".join(f"Step {step}: tighten bolt {step} and note the torque." for step in range(1, 60))
_PAIRS = (
    ("How do I reset my password?", "I forgot my password and cannot log in."),
    ("How do I reset my password?", "The bakery on the corner sells rye bread."),
    ("A man is playing the guitar on a stage.", "Someone performs music in front of an audience."),
    ("The river rose two metres overnight.", "River level up 2 m since yesterday evening!"),
    ("yes", "The committee approved the budget after a long debate about the new library."),
    # The second text is longer than any known encoder's limit, so that another limit changes the cosine.
    ("Tighten the bolts and write down the torque.", _LONG_TEXT),
)


@dataclass(frozen=True)
class Canary:
    """Two texts and the cosine of their vectors under the encoder as its authors use it."""

    text: str
    other_text: str
    cosine: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, as in canaries.json."""
        return asdict(self)


@cache
def canaries_of(name: str) -> tuple[Canary, ...]:
    """Return the recorded canaries of a known encoder; none where nobody has recorded them yet."""
    table = json.loads(package_files("probe_service.encode").joinpath("canaries.json").read_text("utf-8"))
    return tuple(Canary(**canary) for canary in table.get(name, {}).get("canaries", ()))


def check_canaries(name: str, encoder: Encoder) -> int:
    """Compare the encoder's cosines with its recorded canaries.

    Args:
        name: Name of the known encoder.
        encoder: The encoder to check.

    Returns:
        How many canaries there were; 0 says that nothing was checked.

    Raises:
        EncoderError: encoder_canary_mismatch if a cosine is off by more than 0.001.
    """
    canaries = canaries_of(name)
    if not canaries:
        return 0
    encoded = encoder.encode([text for canary in canaries for text in (canary.text, canary.other_text)])
    cosines = np.einsum("nd,nd->n", encoded.vectors[0::2], encoded.vectors[1::2])
    for canary, cosine in zip(canaries, cosines.tolist(), strict=True):
        if not abs(cosine - canary.cosine) <= CANARY_TOLERANCE:
            raise EncoderError(
                "encoder_canary_mismatch",
                f"{name} gives cosine {cosine:.4f} where {canary.cosine:.4f} is right, for {canary.text[:60]!r} and"
                f" {canary.other_text[:60]!r}: pooling, maximum length or weights are not those of {name}.",
            )
    return len(canaries)


def record_canaries(name: str, settings: Settings) -> list[Canary]:
    """Take the canary cosines of a known encoder from transformers' AutoModel, with pooling written out here.

    Args:
        name: A known encoder, on a machine that has or can fetch its weights.
        settings: Chooses the device.

    Returns:
        One canary for each built-in pair of texts.

    Raises:
        EncoderError: encoder_unknown for other names; whatever locating the weights raises.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    known = find_known_encoder(name)
    if known is None:
        raise EncoderError(
            "encoder_unknown", f"Canaries are recorded for known encoders only, not for {name!r}."
        )
    checkpoint = locate_known(known)
    require_pinned_checksum(checkpoint, known)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with quiet_libraries():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True)
        model = AutoModel.from_pretrained(checkpoint.folder, local_files_only=True, dtype=torch.float32)
    model = model.eval().to(device)

    def vector(text: str) -> Any:
        # One text at a time: no padding, so the mean over tokens needs no mask.
        tokens = tokenizer(text, truncation=True, max_length=known.max_length, return_tensors="pt").to(device)
        with torch.inference_mode():
            output = model(**tokens)
        if known.pooling == "mean":
            pooled = output.last_hidden_state[0].mean(dim=0)
        elif known.pooling == "cls":
            pooled = output.last_hidden_state[0, 0]
        else:
            pooled = output.pooler_output[0]
        return pooled.double()

    return [
        Canary(
            text,
            other_text,
            round(float(torch.cosine_similarity(vector(text), vector(other_text), dim=0)), 6),
        )
        for text, other_text in _PAIRS
    ]
