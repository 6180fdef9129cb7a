"""From a name to an encoder that passed its check: located, loaded, verified, described."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe_service.encode.canaries import check_canaries
from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.protocol import CheckedEncoder
from probe_service.encode.record import CheckRecord
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

_REMOTE_PREFIX = "openai:"

_checked: dict[tuple[str, str, str], CheckedEncoder] = {}
_loading = threading.Lock()


def default_encoder_name(settings: Settings) -> str:
    """Return the encoder for requests that name none: the setting, else by whether there is a GPU."""
    if settings.encoder is not None:
        return settings.encoder
    return "minilm" if _resolve_device(settings) == "cpu" else "simcse-roberta-large"


def load_encoder(name: str, settings: Settings) -> CheckedEncoder:
    """Load an encoder and check it; within one process the same name, device and dtype are loaded once.

    One that passed its check before, of the same files by the same code, is loaded when it is first used.

    Args:
        name: A known encoder (by short or hub name), ``owner/model`` on the hub, a local folder, or
            ``openai:MODEL@URL``.
        settings: Chooses device and dtype, and the folder where it is kept which encoders passed.

    Returns:
        The encoder with the facts for the report.

    Raises:
        EncoderError: encoder_unknown, encoder_unavailable, encoder_device_unavailable, encoder_checksum_mismatch,
            encoder_checkpoint_incomplete, encoder_structure_mismatch, encoder_canary_mismatch,
            encoder_weights_pickled, encoder_remote_code, encoder_pooling_unknown, encoder_load_failed,
            encoder_dtype_unavailable.
    """
    if name.startswith(_REMOTE_PREFIX):
        # Its HTTP client takes a tenth of a second to import.
        from probe_service.encode.remote import load_remote

        key = (name, "", "")
        with _loading:
            if key not in _checked:
                _checked[key] = load_remote(name)
            return _checked[key]
    device, dtype = _resolve_device(settings), settings.encode_dtype
    key = (name, device, dtype)
    with _loading:
        if key not in _checked:
            _checked[key] = _recall_or_load(name, device, dtype, settings.home / "vectors")
        return _checked[key]


def load_for_training(name: str, settings: Settings) -> SentenceTransformer:
    """Return the modules of an encoder as its checkpoint has them: a copy of one's own, for training.

    Args:
        name: As for `load_encoder`, which checks it first.
        settings: Chooses the device.

    Raises:
        EncoderError: As of `load_encoder`; encoder_not_trainable for one that runs elsewhere.
    """
    from probe_service.encode.transformer import build_known, build_saved

    if name.startswith(_REMOTE_PREFIX):
        raise EncoderError(
            "encoder_not_trainable",
            f"{name} runs on a server; only an encoder that is loaded here can be trained.",
        )
    load_encoder(name, settings)
    device, known = _resolve_device(settings), find_known_encoder(name)
    files = _locate(name, known)
    return build_saved(files, device) if known is None else build_known(known, files, device)


def _recall_or_load(name: str, device: str, dtype: EncodeDtype, folder: Path) -> CheckedEncoder:
    """Return an encoder with what a record in the folder says of it; where there is none, load it and write one."""
    known = find_known_encoder(name)
    files = _locate(name, known)
    record = CheckRecord(folder, name if known is None else known.name, known, files, device, dtype)
    recorded = record.read()
    if recorded is None:
        encoder, info = _load(name, known, files, device, dtype)
        record.write(info)
        return CheckedEncoder(info, lambda: encoder)

    def load() -> ModuleEncoder:
        with _loading:
            try:
                encoder, fresh = _load(name, known, _locate(name, known), device, dtype)
                _require_same(recorded, fresh)
            except EncoderError:
                # What the record says does not hold, or no longer: whoever asks next begins anew.
                record.drop()
                _checked.pop((name, device, dtype), None)
                raise
            return encoder

    return CheckedEncoder(recorded, load)


def _require_same(recorded: EncoderInfo, fresh: EncoderInfo) -> None:
    """Refuse an encoder that is not the one whose vectors were looked up, and which the report names.

    Nothing can be overwritten here: the probe has read vectors by the recorded fingerprint. The words of the check may
    differ, since the errors that they state may, on some devices, from one run to the next; both checks were passed.

    Raises:
        EncoderError: encoder_changed.
    """
    before, after = (info.model_dump(exclude={"check"}) for info in (recorded, fresh))
    changed = [name for name, value in after.items() if value != before[name]]
    if changed:
        raise EncoderError(
            "encoder_changed",
            f"{fresh.name} is not what it was when it was looked up: another {', '.join(changed)}. Were its files"
            " exchanged meanwhile? Run this again.",
        )


def _locate(name: str, known: KnownEncoder | None) -> CheckpointFiles:
    """Find an encoder's files, and refuse those that must not be loaded."""
    if known is None:
        files = locate_by_name(name)
        refuse_remote_code(files)
        refuse_pickled_weights(files)
        return files
    files = locate_known(known)
    if not known.pickled_weights_allowed:
        refuse_pickled_weights(files)
    require_pinned_checksum(files, known)
    return files


def _load(
    name: str, known: KnownEncoder | None, files: CheckpointFiles, device: str, dtype: EncodeDtype
) -> tuple[ModuleEncoder, EncoderInfo]:
    """Load an encoder, check it, and say what it is."""
    from probe_service.encode.packing import pack

    if known is None:
        encoder, pooling, checks = _load_saved(files, device)
    else:
        encoder, pooling, checks = _load_known(known, files, device)
    checks += [pack(encoder, dtype), *_replicate(encoder, device)]
    name = name if known is None else known.name
    return encoder, _describe(name, files, encoder, dtype, pooling, "; ".join(checks))


def _load_known(
    known: KnownEncoder, files: CheckpointFiles, device: str
) -> tuple[ModuleEncoder, str, list[str]]:
    """Return the encoder, how it pools, and what was checked."""
    from probe_service.encode.transformer import build_known

    encoder = ModuleEncoder(build_known(known, files, device))
    checks = ["modules and weights of the recipe"]
    if known.weights_sha256 is not None:
        checks.append("SHA-256 of the weights")
    if known.pooling == "cls_dense_tanh":
        checks.append("vector equal to the checkpoint's pooler output")
    canaries = check_canaries(known.name, encoder)
    if canaries:
        checks.append(f"{canaries} canary cosines from transformers")
    return encoder, known.pooling, checks


def _load_saved(files: CheckpointFiles, device: str) -> tuple[ModuleEncoder, str, list[str]]:
    """Return the same of a model that says itself how it is put together."""
    from probe_service.encode.transformer import build_saved, describe_pooling

    model = build_saved(files, device)
    prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
    checks = ["safetensors only, no code from the repository; pooling as the model's own configuration says"]
    return ModuleEncoder(model, prompt or None), describe_pooling(model), checks


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
