"""From a name to an encoder that passed its check: located, loaded, verified, described."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any

from probe_service.encode.canaries import check_canaries
from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.protocol import LoadedEncoder
from probe_service.encode.remote import REMOTE_PREFIX, load_remote
from probe_service.encode.weights import (
    CheckpointFiles,
    locate_by_name,
    locate_known,
    refuse_pickled_weights,
    refuse_remote_code,
    require_pinned_checksum,
)
from probe_service.errors import EncoderError
from probe_service.known_encoders import KnownEncoder, find_known_encoder
from probe_service.schemas import EncoderInfo
from probe_service.settings import EncodeDtype, Settings

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["default_encoder_name", "load_encoder", "load_for_training"]

_loaded: dict[tuple[str, str, str], LoadedEncoder] = {}
_loading = threading.Lock()


def default_encoder_name(settings: Settings) -> str:
    """Return the encoder for requests that name none: the setting, else by whether there is a GPU."""
    if settings.encoder is not None:
        return settings.encoder
    return "minilm" if _resolve_device(settings) == "cpu" else "simcse-roberta-large"


def load_encoder(name: str, settings: Settings) -> LoadedEncoder:
    """Load an encoder and check it; within one process the same name, device and dtype are loaded once.

    Args:
        name: A known encoder (by short or hub name), ``owner/model`` on the hub, a local folder, or
            ``openai:MODEL@URL``.
        settings: Chooses device and dtype.

    Returns:
        The encoder with the facts for the report.

    Raises:
        EncoderError: encoder_unknown, encoder_unavailable, encoder_device_unavailable, encoder_checksum_mismatch,
            encoder_checkpoint_incomplete, encoder_structure_mismatch, encoder_canary_mismatch,
            encoder_weights_pickled, encoder_remote_code, encoder_pooling_unknown, encoder_load_failed,
            encoder_dtype_unavailable.
    """
    if name.startswith(REMOTE_PREFIX):
        key = (name, "", "")
        with _loading:
            if key not in _loaded:
                _loaded[key] = load_remote(name)
            return _loaded[key]
    device, dtype = _resolve_device(settings), settings.encode_dtype
    key = (name, device, dtype)
    with _loading:
        if key not in _loaded:
            known = find_known_encoder(name)
            _loaded[key] = (
                _load_saved(name, device, dtype) if known is None else _load_known(known, device, dtype)
            )
        return _loaded[key]


def load_for_training(name: str, settings: Settings) -> SentenceTransformer:
    """Return the modules of an encoder as its checkpoint has them: a copy of one's own, for training.

    Args:
        name: As for `load_encoder`, which checks it first.
        settings: Chooses the device.

    Raises:
        EncoderError: As of `load_encoder`; encoder_not_trainable for one that runs elsewhere.
    """
    from probe_service.encode.transformer import build_known, build_saved

    if name.startswith(REMOTE_PREFIX):
        raise EncoderError(
            "encoder_not_trainable",
            f"{name} runs on a server; only an encoder that is loaded here can be trained.",
        )
    load_encoder(name, settings)
    device, known = _resolve_device(settings), find_known_encoder(name)
    if known is None:
        return build_saved(locate_by_name(name), device)
    return build_known(known, locate_known(known), device)


def _load_known(known: KnownEncoder, device: str, dtype: EncodeDtype) -> LoadedEncoder:
    from probe_service.encode.packing import pack
    from probe_service.encode.transformer import build_known

    files = locate_known(known)
    if not known.pickled_weights_allowed:
        refuse_pickled_weights(files)
    require_pinned_checksum(files, known)
    encoder = ModuleEncoder(build_known(known, files, device))
    checks = ["modules and weights of the recipe"]
    if known.weights_sha256 is not None:
        checks.append("SHA-256 of the weights")
    if known.pooling == "cls_dense_tanh":
        checks.append("vector equal to the checkpoint's pooler output")
    canaries = check_canaries(known.name, encoder)
    if canaries:
        checks.append(f"{canaries} canary cosines from transformers")
    checks += [pack(encoder, dtype), *_replicate(encoder, device)]
    return LoadedEncoder(
        encoder, _describe(known.name, files, encoder, dtype, known.pooling, "; ".join(checks))
    )


def _load_saved(name: str, device: str, dtype: EncodeDtype) -> LoadedEncoder:
    from probe_service.encode.packing import pack
    from probe_service.encode.transformer import build_saved, describe_pooling

    files = locate_by_name(name)
    refuse_remote_code(files)
    refuse_pickled_weights(files)
    model = build_saved(files, device)
    prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
    encoder = ModuleEncoder(model, prompt or None)
    checks = [
        "safetensors only, no code from the repository; pooling as the model's own configuration says",
        pack(encoder, dtype),
        *_replicate(encoder, device),
    ]
    return LoadedEncoder(
        encoder, _describe(name, files, encoder, dtype, describe_pooling(model), "; ".join(checks))
    )


def _replicate(encoder: ModuleEncoder, device: str) -> list[str]:
    """Put a copy of the model on every other GPU that is visible, where none is named; say so."""
    import torch

    others = range(1, torch.cuda.device_count()) if device == "cuda" else ()
    if not others:
        return []
    encoder.add_replicas([copy.deepcopy(encoder.model).to(f"cuda:{number}") for number in others])
    return [f"calls shared out among {len(others) + 1} GPUs"]


def _describe(
    name: str,
    files: CheckpointFiles,
    encoder: ModuleEncoder,
    dtype: EncodeDtype,
    pooling: str,
    check: str,
) -> EncoderInfo:
    weights_sha256 = files.weights_sha256()
    facts: dict[str, Any] = {
        "weights_sha256": weights_sha256,
        "interpretation_sha256": files.interpretation_sha256(),
        "pooling": pooling,
        "prompt": encoder.prompt,
        "max_length": encoder.max_length,
        "dtype": dtype,
        "normalized": True,
    }
    return EncoderInfo(
        name=name,
        backend="sentence-transformers",
        location=files.location,
        revision=files.revision,
        revision_pinned=files.revision_pinned,
        weights_sha256=weights_sha256,
        pooling=pooling,
        normalized=True,
        max_length=encoder.max_length,
        dimension=encoder.dimension,
        dtype=dtype,
        device=str(encoder.model.device),
        prompt=encoder.prompt,
        check=check,
        fingerprint=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
    )


def _resolve_device(settings: Settings) -> str:
    import torch

    if settings.device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=settings.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise EncoderError(
            "encoder_device_unavailable",
            f"PROBE_DEVICE is {settings.device!r}, which torch cannot use here; unset it or use cpu.",
        ) from error
    return settings.device
