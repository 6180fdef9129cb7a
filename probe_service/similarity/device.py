"""The search for pairs on a GPU, where there is one that it works on; otherwise, and for small work, None."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["batch_top_k_by_device", "pairs_by_device", "search_device"]

_log = logging.getLogger(__name__)

_LEAST_PRODUCTS = 2**30
"""Fewer multiplications take no longer on a CPU than sending the vectors and waiting for the answer."""
_TRIED = (70, 40, 5)


@cache
def search_device() -> torch.device | None:
    """Return the GPU for the search; None where there is none, or a trial of the kernel does not give the right pairs."""
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability() < (8, 0):
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        gives_right_pairs = _try_kernel(device)
    except Exception as error:  # noqa: BLE001 - without a compiler, say, or with a driver that is too old
        _log.warning("Pairs are searched on the CPU, since the GPU's kernel failed: %s", error)
        return None
    if not gives_right_pairs:
        _log.error("Pairs are searched on the CPU, since the GPU's kernel gave wrong ones.")
        return None
    return device


def pairs_by_device(
    anchors: NDArray[np.float32], candidates: NDArray[np.float32] | None, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return rows of negative pairs that hold the k most similar ones; None where a CPU had better look for them.

    Args:
        anchors: (N, d) unit rows.
        candidates: (N, d), or None for unordered pairs of the anchors.
        k: How many.
    """
    device = search_device() if anchors.size * len(anchors) >= _LEAST_PRODUCTS else None
    if device is None:
        return None
    from probe_service.similarity.triton_pairs import pairs_near_best

    try:
        left, right = (None if side is None else _sent(side, device) for side in (anchors, candidates))
        found = None if left is None else pairs_near_best(left, right, k=k)
    except torch.OutOfMemoryError:
        return None
    return None if found is None else (found.anchor.cpu().numpy(), found.candidate.cpu().numpy())


def batch_top_k_by_device(
    anchors: torch.Tensor, candidates: torch.Tensor | None, k: int
) -> NDArray[np.float64] | None:
    """Return the k largest negative similarities of each batch, as `batch_top_k`; None as above.

    Args:
        anchors: (b, N, d) unit rows.
        candidates: (b, N, d), or None for unordered pairs of the anchors.
        k: How many.
    """
    device = search_device() if anchors.numel() * anchors.shape[1] >= _LEAST_PRODUCTS else None
    if device is None:
        return None
    from probe_service.similarity.triton_pairs import batch_top_k_on_device

    try:
        return batch_top_k_on_device(
            anchors.to(device), None if candidates is None else candidates.to(device), k=k
        )
    except (torch.OutOfMemoryError, OverflowError):
        return None


def _sent(rows: NDArray[np.float32], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


def _try_kernel(device: torch.device) -> bool:
    from probe_service.similarity.triton_pairs import top_pairs_on_device

    size, width, k = _TRIED
    rows = np.random.default_rng(0).standard_normal((size, width)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = np.triu(rows.astype(np.float64) @ rows.T.astype(np.float64), 1)
    best = np.argsort(-cosines, axis=None)[:k]
    found = top_pairs_on_device(_sent(rows, device), k=k)
    return found is not None and (found.anchor * size + found.candidate).tolist() == best.tolist()
