"""Contrastive losses of tensors, as modules for sentence-transformers' trainers, and their numerics.

`functional` needs torch only. The modules are loaded when one is asked for, since sentence-transformers takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from probe_service.losses.functional import (
    below_positive,
    cosine_similarities,
    expected_noise,
    flat_nce,
    gs_info_nce,
    info_nce,
    other_group,
)

if TYPE_CHECKING:
    from probe_service.losses.modules import (
        CachedFlatNCELoss,
        CachedGSInfoNCELoss,
        CachedInfoNCELoss,
        FlatNCELoss,
        GSInfoNCELoss,
        InfoNCELoss,
    )

__all__ = [
    "CachedFlatNCELoss",
    "CachedGSInfoNCELoss",
    "CachedInfoNCELoss",
    "FlatNCELoss",
    "GSInfoNCELoss",
    "InfoNCELoss",
    "below_positive",
    "cosine_similarities",
    "expected_noise",
    "flat_nce",
    "gs_info_nce",
    "info_nce",
    "other_group",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("probe_service.losses.modules"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
