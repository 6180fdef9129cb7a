"""What is known of an encoder that passed its check, kept so that the next process need not load it to know."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from dataclasses import asdict
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from probe_service.encode.weights import CheckpointFiles
from probe_service.known_encoders import KnownEncoder
from probe_service.schemas import EncoderInfo
from probe_service.settings import EncodeDtype

__all__ = ["CheckRecord"]

_LIBRARIES = ("numpy", "safetensors", "sentence-transformers", "tokenizers", "torch", "transformers")


class CheckRecord:
    """The facts about an encoder that passed its check, in a small JSON file named after all that they rest on.

    Where anything of that is another, so is the name, and nothing is found. The file may be deleted at any time.

    Args:
        folder: Of the cache of vectors; made if need be.
        name: As the report states it.
        known: The recipe; None for a model that says itself how it is put together.
        files: Located, and allowed to be loaded.
        device: torch device.
        dtype: Of the products of matrices.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        known: KnownEncoder | None,
        files: CheckpointFiles,
        device: str,
        dtype: EncodeDtype,
    ) -> None:
        rests_on: dict[str, Any] = {
            "name": name,
            "recipe": None if known is None else asdict(known),
            "location": files.location,
            "revision": files.revision,
            "revision_pinned": files.revision_pinned,
            "files_sha256": files.sha256(),
            "dtype": dtype,
            "device": device,
            "processors": _processors(device),
            "code_sha256": _code_sha256(),
            "versions": {library: importlib.metadata.version(library) for library in _LIBRARIES},
        }
        digest = hashlib.sha256(json.dumps(rests_on, sort_keys=True).encode()).hexdigest()
        self._file = folder / f"checked-{digest}.json"

    def read(self) -> EncoderInfo | None:
        """Return the facts; None where there are none, or none that can be read."""
        try:
            return EncoderInfo.model_validate_json(self._file.read_bytes())
        except (OSError, ValueError):
            return None

    def write(self, info: EncoderInfo) -> None:
        """Keep the facts, where the folder can be written: without them the next process loads the encoder."""
        partial = self._file.with_name(f"{self._file.name}.partial-{os.getpid()}")
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(info.model_dump_json(), encoding="utf-8")
                partial.replace(self._file)
            finally:
                partial.unlink(missing_ok=True)

    def drop(self) -> None:
        """Forget the facts."""
        with contextlib.suppress(OSError):
            self._file.unlink()


def _processors(device: str) -> list[str]:
    """Name what a device computes with: some layouts of a model are only for some, and their errors differ."""
    import torch

    if device.startswith("cuda"):
        return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    from probe_service.encode.packing import bfloat16_instructions

    return [torch.backends.cpu.get_cpu_capability(), *bfloat16_instructions()]


@cache
def _code_sha256() -> str:
    """Return the SHA-256 of this package's files: what loads and checks, and the texts and cosines to check with.

    A version would not do: in a checkout it stays while the code changes.
    """
    digest = hashlib.sha256()
    for file in sorted(package_files("probe_service.encode").iterdir(), key=lambda file: file.name):
        if file.is_file():
            digest.update(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n".encode())
    return digest.hexdigest()
