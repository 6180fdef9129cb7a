"""How big may a contrastive batch be on a corpus before false negatives spoil training?

``probe_service.probe(...)`` measures in this process; `probe_client` does so over HTTP. Importing the package is light:
torch is loaded when a probe runs.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["probe"]


def __getattr__(name: str) -> Any:
    if name == "probe":
        return importlib.import_module("probe_service.probe")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
