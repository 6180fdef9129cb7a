"""The table of known encoders: facts only, so that the API can list and check names without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from probe_service.errors import EncoderError
from probe_service.settings import Settings

__all__ = ["KNOWN_ENCODERS", "KnownEncoder", "check_encoder_allowed", "find_known_encoder"]


@dataclass(frozen=True)
class KnownEncoder:
    """One encoder whose right use is known.

    Args:
        name: Short name that requests use.
        hub_name: Repository on the Hugging Face hub.
        revision: Commit pinned here; None where none is known, then the resolved commit is reported with a warning.
        pooling: ``mean`` over tokens, ``cls`` (first token), or ``cls_dense_tanh`` (the checkpoint's pooler output).
        max_length: Tokens that a text is cut at.
        weights_sha256: SHA-256 of ``model.safetensors`` where it is pinned.
        pickled_weights_allowed: The repository holds only a ``.bin``; it is loaded with ``weights_only=True``.
        source: Where the facts come from.
    """

    name: str
    hub_name: str
    revision: str | None
    pooling: Literal["mean", "cls", "cls_dense_tanh"]
    max_length: int
    weights_sha256: str | None
    pickled_weights_allowed: bool
    source: str


_SIMCSE = "Gao et al. 2021, SimCSE, https://github.com/princeton-nlp/SimCSE"

KNOWN_ENCODERS: dict[str, KnownEncoder] = {
    known.name: known
    for known in (
        KnownEncoder(
            name="minilm",
            hub_name="sentence-transformers/all-MiniLM-L6-v2",
            revision="1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
            pooling="mean",
            max_length=256,
            weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            pickled_weights_allowed=False,
            source="model card of sentence-transformers/all-MiniLM-L6-v2",
        ),
        *(
            KnownEncoder(
                name=f"{prefix}simcse-{size}",
                hub_name=f"princeton-nlp/{'unsup' if prefix else 'sup'}-simcse-{hub_size}",
                revision=None,
                pooling="cls" if prefix else "cls_dense_tanh",
                max_length=512,
                weights_sha256=None,
                pickled_weights_allowed=True,
                source=_SIMCSE,
            )
            for prefix in ("", "unsup-")
            for size, hub_size in (
                ("bert-base", "bert-base-uncased"),
                ("bert-large", "bert-large-uncased"),
                ("roberta-base", "roberta-base"),
                ("roberta-large", "roberta-large"),
            )
        ),
    )
}


def find_known_encoder(name: str) -> KnownEncoder | None:
    """Return the known encoder of this short or hub name; None for any other name.

    The hub name counts as well, because a plain load of a SimCSE repository would pool it wrongly.
    """
    if name in KNOWN_ENCODERS:
        return KNOWN_ENCODERS[name]
    return next((known for known in KNOWN_ENCODERS.values() if known.hub_name == name), None)


def check_encoder_allowed(name: str, settings: Settings) -> None:
    """Refuse an encoder that a server's requests may not name.

    Allowed are the names in ``settings.allowed_encoders``, or, where that is unset, the known encoders; and always
    the server's own default, ``settings.encoder``. A known encoder may be given by its short or its hub name.

    Raises:
        EncoderError: encoder_not_allowed.
    """
    allowed = list(KNOWN_ENCODERS) if settings.allowed_encoders is None else [*settings.allowed_encoders]
    if settings.encoder is not None:
        allowed.append(settings.encoder)
    known = find_known_encoder(name)
    names = {name} if known is None else {known.name, known.hub_name}
    if names.isdisjoint(allowed):
        raise EncoderError(
            "encoder_not_allowed",
            f"This server does not run the encoder {name!r}. Allowed: {', '.join(dict.fromkeys(allowed))}."
            " Its operator can add to PROBE_ALLOWED_ENCODERS.",
        )
