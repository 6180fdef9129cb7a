"""What runs of heads and of images have in common: the loss as one function of tensors, and the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from probe_service.losses import flat_nce, gs_info_nce, info_nce
from probe_service.schemas import TrialCurvePoint, TrialLossKind
from probe_service.trial.plan import Run

__all__ = ["Objective", "objective", "optimize"]

CURVE_POINTS = 5

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Takes (N, d) anchors, (N, d) candidates and an (N, N) mask of what may be a negative (None: all); gives a scalar."""


def objective(run: Run, noise_seed: int) -> Objective:
    """Return the loss of a run, which draws its noise from a generator of its own."""
    kind, temperature = run.loss.kind, run.temperature
    generator = torch.Generator().manual_seed(noise_seed)

    def loss(anchors: Tensor, candidates: Tensor, mask: Tensor | None) -> Tensor:
        if kind is TrialLossKind.FLATNCE:
            return flat_nce(anchors, candidates, mask, temperature=temperature)
        if kind in (TrialLossKind.GS_INFONCE, TrialLossKind.GS_INFONCE_CONTROL):
            return gs_info_nce(
                anchors,
                candidates,
                mask,
                noise_count=max(1, round(run.loss.noise_per_anchor * len(anchors))),
                noise="gaussian" if kind is TrialLossKind.GS_INFONCE else "expected",
                generator=generator,
                temperature=temperature,
            )
        return info_nce(anchors, candidates, mask, temperature=temperature)

    return loss


def optimize(
    parameters: Iterable[Tensor],
    loss_of_batch: Callable[[], Tensor],
    run: Run,
    *,
    score: Callable[[], float] | None,
    checkpoint: Callable[[], None],
) -> list[TrialCurvePoint]:
    """Take the steps of a run with Adam at its learning rate.

    Args:
        parameters: What is trained.
        loss_of_batch: Draws a batch and returns its loss.
        run: Of the trial.
        score: Evaluates what is trained as it stands; None where no learning curve is wanted.
        checkpoint: Called before every step; may raise to cancel.

    Returns:
        The learning curve, in five points.
    """
    optimizer = torch.optim.Adam(parameters, lr=run.learning_rate)
    noted = {-(-run.steps * point // CURVE_POINTS) for point in range(1, CURVE_POINTS + 1)}
    curve: list[TrialCurvePoint] = []
    losses: list[float] = []
    for step in range(1, run.steps + 1):
        checkpoint()
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if score is not None and step in noted:
            curve.append(TrialCurvePoint(step=step, loss=float(np.mean(losses)), score=score()))
            losses.clear()
    return curve
