"""How well a floating-point type computes the gradients of InfoNCE and FlatNCE (the FlatNCE article's analysis)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from probe_service.errors import RequestError

__all__ = ["DTYPES", "GradientErrors", "gradient_errors"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_BLOCK_ELEMENTS = 1_000_000


@dataclass(frozen=True)
class GradientErrors:
    """Errors of one dtype on one batch.

    Args:
        infonce: ‖ĝ − g‖ / ‖g‖ of the InfoNCE gradient with respect to the batch's logits, g in float64.
        flatnce: The same for FlatNCE.
        zero_loss_share: Share of anchors whose InfoNCE loss rounds to 0, 0–1.
    """

    infonce: float
    flatnce: float
    zero_loss_share: float


def gradient_errors(
    anchors: torch.Tensor,
    positives: torch.Tensor,
    *,
    temperature: float,
    own_similarity: torch.Tensor | None = None,
) -> dict[str, GradientErrors]:
    """Compare gradients computed in each of `DTYPES` with the true ones, on one batch of pairs.

    With logits L = S/T, the gradient of InfoNCE (eq. 1) is softmax(L) − I, that of FlatNCE is softmax over the
    negatives, with −1 at the positive. The logits are rounded to the dtype first, as they are when a model trains in it.
    The true gradients are computed in float64, at the positive as minus the sum of the others': 1 − softmax is 0 in float64
    as well once ξ is below 1e-16.

    Args:
        anchors: (N, d) float32 unit rows.
        positives: (N, d) float32 unit rows; the anchors themselves for sentences.
        temperature: T > 0.
        own_similarity: (N,) s_ii⁺ where it comes from elsewhere (two dropout passes); None: that of the positives.

    Returns:
        The errors by name of dtype.
    """
    if len(anchors) < 2:
        raise RequestError("batch_size_too_small", "gradients need a batch of at least 2 pairs")
    size = len(anchors)
    squares = {name: [0.0, 0.0, 0.0, 0.0, 0] for name in DTYPES}
    step = max(1, _BLOCK_ELEMENTS // size)
    for start in range(0, size, step):
        stop = min(size, start + step)
        logits = (anchors[start:stop] @ positives.T).double() / temperature
        own = torch.zeros_like(logits, dtype=torch.bool)
        own[torch.arange(stop - start), torch.arange(start, stop)] = True
        if own_similarity is not None:
            logits[own] = own_similarity[start:stop].double() / temperature
        true_infonce, true_flatnce, _ = _gradients(logits, own)
        true_infonce[own] = 0.0
        true_infonce[own] = -true_infonce.sum(dim=1)
        for name, dtype in DTYPES.items():
            infonce, flatnce, loss = _gradients(logits.to(dtype), own)
            sums = squares[name]
            sums[0] += float((infonce.double() - true_infonce).square().sum())
            sums[1] += float(true_infonce.square().sum())
            sums[2] += float((flatnce.double() - true_flatnce).square().sum())
            sums[3] += float(true_flatnce.square().sum())
            sums[4] += int((loss == 0).sum())
    return {
        name: GradientErrors((a / b) ** 0.5 if b else float(a > 0), (c / d) ** 0.5, zero / size)
        for name, (a, b, c, d, zero) in squares.items()
    }


def _gradients(logits: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of InfoNCE and FlatNCE with respect to the logits, and the InfoNCE loss, in the logits' dtype."""
    one = own.to(logits.dtype)
    infonce = torch.softmax(logits, dim=1) - one
    negatives = torch.softmax(logits.masked_fill(own, -torch.inf), dim=1)
    loss = -torch.log_softmax(logits, dim=1)[own]
    return infonce, negatives - one, loss
