"""The losses of a trial on tensors: a run's loss as one function of anchors, candidates and mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from probe_service.losses import flat_nce, gs_info_nce, info_nce
from probe_service.schemas import TrialLossKind
from probe_service.trial.plan import Run

__all__ = ["Objective", "objective"]

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
