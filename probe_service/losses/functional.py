"""InfoNCE, GS-InfoNCE and FlatNCE of a batch of vectors, all three from one quantity: log ξ.

A row has an own pair with logit s_t = cosine / T and negatives with logits s_j. With ξ = Σ_{j ≠ t} exp(s_j − s_t),

===========  ========================================  =============================================
InfoNCE      log(1 + ξ)                                the cross-entropy of the softmax over t and all j
GS-InfoNCE   log(1 + ξ + λ Σ_k exp(s_k − s_t))         s_k: logits of M Gaussian vectors
FlatNCE      log ξ                                     the gradient of ξ / stop_gradient(ξ)
===========  ========================================  =============================================

Sums are taken in log-space, so that nothing overflows at any temperature and a tiny ξ keeps all its digits: the gradient
of InfoNCE on the own pair is −ξ/(1 + ξ) here and never a rounded softmax less one. Vectors in half precision are
compared in float32, also under autocast; float64 stays float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize

from probe_service.errors import RequestError

__all__ = [
    "Contrast",
    "MarginStrategy",
    "Noise",
    "at_least_float32",
    "below_positive",
    "check_choice",
    "check_noise",
    "cosine_similarities",
    "expected_noise",
    "expected_noise_logits",
    "flat_nce",
    "flat_nce_of_rows",
    "gaussian_vectors",
    "gs_info_nce",
    "info_nce",
    "info_nce_of_rows",
    "other_group",
]

MarginStrategy = Literal["absolute", "relative"]
Noise = Literal["gaussian", "expected"]
FlatForm = Literal["log", "ratio"]

_LOG_OF_LARGEST = math.log(torch.finfo(torch.float64).max)


@dataclass(frozen=True)
class Contrast:
    """One softmax for each of n rows: an own pair and what it is compared with.

    Args:
        vectors: (n, d), the rows themselves; noise is compared with them.
        positives: (n,) logits of the own pairs.
        logits: (n, C) logits of the candidates.
        mask: (n, C) bool, True where a candidate is a negative of the row: never at an own pair.
        own_pairs: How often the own pair stands in the denominator: 2 where one softmax runs over both directions.
    """

    vectors: Tensor
    positives: Tensor
    logits: Tensor
    mask: Tensor
    own_pairs: int = 1

    def log_xi(self) -> Tensor:
        """(n,) log Σ_j exp(logit_j − positive) over the negatives j; −inf, with a gradient of 0, where there are none."""
        none = ~self.mask.any(dim=1)
        # The gradient of logsumexp of nothing is NaN: such rows keep their logits, and the result is overwritten.
        logits = self.logits.masked_fill(~(self.mask | none[:, None]), -torch.inf)
        return (torch.logsumexp(logits, dim=1) - self.positives).masked_fill(none, -torch.inf)

    def with_negatives(self, logits: Tensor) -> Contrast:
        """Return the same rows with (n, M) more logits in their denominators; a weight w is log w added to a logit."""
        mask = torch.ones_like(logits, dtype=torch.bool)
        return replace(
            self,
            logits=torch.cat([self.logits, logits], dim=1),
            mask=torch.cat([self.mask, mask], dim=1),
        )


def info_nce_of_rows(contrast: Contrast) -> Tensor:
    """(n,) log(own pairs + ξ): 0 for a row without negatives."""
    log_xi = contrast.log_xi()
    return torch.logaddexp(log_xi, torch.full_like(log_xi, math.log(contrast.own_pairs)))


def flat_nce_of_rows(contrast: Contrast) -> Tensor:
    """(n,) log ξ; 0, with a gradient of 0, for a row without negatives, since it compares nothing."""
    return contrast.log_xi().masked_fill(~contrast.mask.any(dim=1), 0.0)


def info_nce(
    anchors: Tensor,
    candidates: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 0.05,
    symmetric: bool = False,
) -> Tensor:
    """InfoNCE: mean over i of −log [exp(s_ii) / Σ_j exp(s_ij)], with s_ij = cos(anchor i, candidate j) / T.

    j runs over i itself and the candidates that the mask leaves. Symmetric, it is the mean of that and of the same with
    the N positives as rows and the N anchors as candidates (hard negatives take no part in it).

    Args:
        anchors: (N, d), any floating-point type; length does not matter.
        candidates: (N + H, d): row i < N is the positive of anchor i, the rest are hard negatives, and each is a negative
            of every other anchor.
        mask: (N, N + H) bool, True where candidate j may be a negative of anchor i; its diagonal is not read. All, if
            None. In the other direction positive i meets anchor j where mask[j, i].
        temperature: T > 0.
        symmetric: Take both directions.

    Returns:
        A scalar, ≥ 0, in float32 or better.

    Raises:
        RequestError: ``loss_invalid`` where shapes or temperature do not fit.

    Source: van den Oord et al. 2018 (arXiv:1807.03748); GS-InfoNCE paper, eq. 1, with j over the candidates as in SimCSE.
    """
    contrasts = _contrasts(anchors, candidates, mask, temperature, symmetric)
    return _mean([info_nce_of_rows(each) for each in contrasts])


def gs_info_nce(
    anchors: Tensor,
    candidates: Tensor,
    mask: Tensor | None = None,
    *,
    noise_count: int,
    noise_weight: float = 1.0,
    noise_mean: float = 0.0,
    noise_std: float = 1.0,
    noise: Noise = "gaussian",
    generator: torch.Generator | None = None,
    temperature: float = 0.05,
    symmetric: bool = False,
) -> Tensor:
    """GS-InfoNCE: mean over i of −log [exp(s_ii) / (Σ_j exp(s_ij) + λ Σ_k exp(cos(anchor i, g_k) / T))].

    g_1 … g_M are drawn anew at each call, each coordinate from N(μ, σ²): one draw for all rows (and, where symmetric, for
    both directions). Since the cosine normalises them, σ has no effect at μ = 0, and there each vector adds about
    exp(1/(2dT²)) to the denominator (`expected_noise`).

    The control arm, ``noise="expected"``, adds λ·M·E[exp(cos/T)] instead: the same in the mean, but neither random nor with
    a gradient of its own.

    Args:
        anchors: (N, d), as in `info_nce`.
        candidates: (N + H, d), as in `info_nce`.
        mask: (N, N + H) bool, as in `info_nce`; noise is never masked.
        noise_count: M ≥ 1; the paper takes 3·N.
        noise_weight: λ > 0.
        noise_mean: μ; 0 in the control arm.
        noise_std: σ > 0.
        noise: `gaussian`, or `expected` for the control arm.
        generator: Source of the noise, on the anchors' device; None is torch's own.
        temperature: T > 0.
        symmetric: Take both directions, as in `info_nce`.

    Returns:
        A scalar, ≥ 0, in float32 or better.

    Raises:
        RequestError: ``loss_invalid`` where shapes or numbers do not fit.

    Source: Wu et al. 2022, "Smoothed Contrastive Learning for Unsupervised Sentence Embedding" (COLING), eq. 2 and listing 1.
    """
    check_noise(noise_weight, noise_mean, noise_std, noise)
    if noise_count < 1:
        raise RequestError(
            "loss_invalid", f"noise_count is {noise_count}; it is at least 1 (else use InfoNCE)."
        )
    contrasts = _contrasts(anchors, candidates, mask, temperature, symmetric)
    if noise == "expected":
        logits = [expected_noise_logits(each.vectors, noise_count, temperature) for each in contrasts]
    else:
        vectors = gaussian_vectors(noise_count, anchors, noise_mean, noise_std, generator)
        logits = [cosine_similarities(each.vectors, vectors) / temperature for each in contrasts]
    log_weight = math.log(noise_weight)
    return _mean(
        [
            info_nce_of_rows(each.with_negatives(added + log_weight))
            for each, added in zip(contrasts, logits, strict=True)
        ]
    )


def flat_nce(
    anchors: Tensor,
    candidates: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 0.05,
    symmetric: bool = False,
    form: FlatForm = "log",
) -> Tensor:
    """FlatNCE: mean over i of log ξ_i = log Σ_{j ≠ i} exp(s_ij) − s_ii. The same as decoupled contrastive learning (DCL).

    ``form="ratio"`` is the paper's ξ / stop_gradient(ξ): always 1, with the gradient of log ξ.

    Args:
        anchors: (N, d), as in `info_nce`.
        candidates: (N + H, d), as in `info_nce`.
        mask: (N, N + H) bool, as in `info_nce`. An anchor that is left without a negative adds 0, without a gradient, and
            is still counted in the mean.
        temperature: T > 0.
        symmetric: Take both directions, as in `info_nce`.
        form: `log`, whose value tells how training goes, or `ratio`.

    Returns:
        A scalar in float32 or better; the logarithm may be negative.

    Raises:
        RequestError: ``loss_invalid`` where shapes or numbers do not fit.

    Source: Chen et al. 2021 (arXiv:2107.01152); Su 2021 (kexue.fm/archives/8586) for log ξ; DCL: arXiv:2110.06848.
    """
    check_choice("form", form, FlatForm)
    contrasts = _contrasts(anchors, candidates, mask, temperature, symmetric)
    log_xi = [flat_nce_of_rows(each) for each in contrasts]
    return _mean(log_xi if form == "log" else [torch.exp(each - each.detach()) for each in log_xi])


def other_group(row_groups: Tensor, candidate_groups: Tensor) -> Tensor:
    """Mask the candidates that mean the same as the row because they are in its group.

    Args:
        row_groups: (N,) integers; negative where a row is in no group.
        candidate_groups: (C,) integers likewise.

    Returns:
        (N, C) bool, True where candidate and row are not in one group.
    """
    return (row_groups[:, None] != candidate_groups[None, :]) | (row_groups[:, None] < 0)


def below_positive(
    similarities: Tensor,
    positives: Tensor,
    *,
    margin: float = 0.0,
    margin_strategy: MarginStrategy = "absolute",
) -> Tensor:
    """Mask the candidates that are too similar to the row, measured by its positive: similarity > threshold.

    The threshold is positive − margin (`absolute`) or positive − margin·|positive| (`relative`). The similarities are those
    of a guide model, as in GISTEmbed, or the model's own.

    Args:
        similarities: (N, C), not divided by T.
        positives: (N,) similarities of the own pairs, by the same model.
        margin: 0 removes what is more similar than the positive, more removes more; a negative margin lets candidates pass
            that are a little more similar (−0.1 in Qwen3 Embedding, arXiv:2506.05176).
        margin_strategy: `absolute` or `relative`.

    Returns:
        (N, C) bool, True where the candidate may be a negative.

    Raises:
        RequestError: ``loss_invalid`` for any other strategy.

    Source: Solatorio 2024 (arXiv:2402.16829), and its ``GISTEmbedLoss`` in sentence-transformers.
    """
    check_choice("margin_strategy", margin_strategy, MarginStrategy)
    unit = positives.abs() if margin_strategy == "relative" else 1.0
    threshold = positives - margin * unit
    return ~(similarities.detach() > threshold.detach()[:, None])


def expected_noise(dimension: int, temperature: float) -> float:
    """E[exp(cos(g, h) / T)] of a Gaussian g with mean 0 and any h: 1.22 at d = 1024, T = 0.05.

    The cosine of a uniform direction has the moment generating function Γ(d/2) (2/κ)^(d/2 − 1) I_{d/2 − 1}(κ) at κ = 1/T, the
    sum over k of (κ²/4)^k / (k! (d/2)_k); about exp(κ²/(2d)) for large d.

    Args:
        dimension: d ≥ 1.
        temperature: T > 0.

    Returns:
        A number > 1; inf where it exceeds float64.
    """
    log_value = _log_expected_noise(dimension, temperature)
    return math.exp(log_value) if log_value < _LOG_OF_LARGEST else math.inf


def cosine_similarities(rows: Tensor, columns: Tensor) -> Tensor:
    """(N, C) cosines of (N, d) and (C, d), in float32 or better; 0 where a vector is zero."""
    with torch.autocast(rows.device.type, enabled=False):
        return normalize(at_least_float32(rows), dim=1) @ normalize(at_least_float32(columns), dim=1).T


def at_least_float32(vectors: Tensor) -> Tensor:
    """Return half precision as float32 and anything else as it is."""
    return vectors.float() if vectors.dtype in (torch.float16, torch.bfloat16) else vectors


def gaussian_vectors(
    count: int, like: Tensor, mean: float, std: float, generator: torch.Generator | None = None
) -> Tensor:
    """(count, d) draws from N(mean, std²), for vectors `like` (…, d), in float32 or better and on their device."""
    like = at_least_float32(like)
    shape = (count, like.shape[-1])
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device) * std + mean


def expected_noise_logits(vectors: Tensor, count: int, temperature: float) -> Tensor:
    """(N, 1) log of count·E[exp(cos/T)] for N vectors: one candidate that stands for the noise."""
    constant = math.log(count) + _log_expected_noise(vectors.shape[1], temperature)
    return at_least_float32(vectors).new_full((len(vectors), 1), constant)


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not among those of a Literal.

    Raises:
        RequestError: ``loss_invalid``.
    """
    if value not in get_args(choices):
        raise RequestError(
            "loss_invalid", f"{name} is {value!r}; it is one of {', '.join(get_args(choices))}."
        )


def check_noise(weight: float, mean: float, std: float, noise: Noise) -> None:
    """Refuse noise that GS-InfoNCE cannot use.

    Raises:
        RequestError: ``loss_invalid``.
    """
    check_choice("noise", noise, Noise)
    if not (weight > 0 and std > 0):
        raise RequestError("loss_invalid", f"noise_weight {weight} and noise_std {std} must be positive.")
    if noise == "expected" and mean != 0:
        raise RequestError("loss_invalid", "noise='expected' is known for noise_mean 0 only.")


def _contrasts(
    anchors: Tensor, candidates: Tensor, mask: Tensor | None, temperature: float, symmetric: bool
) -> list[Contrast]:
    """The softmaxes of the anchors and, where symmetric, those of their positives."""
    size = len(anchors)
    _check_batch(anchors, candidates, mask, temperature)
    logits = cosine_similarities(anchors, candidates) / temperature
    negatives = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.clone()
    negatives.fill_diagonal_(False)
    own = logits.diagonal()
    contrasts = [Contrast(anchors, own, logits, negatives)]
    if symmetric:
        contrasts.append(Contrast(candidates[:size], own, logits[:, :size].T, negatives[:, :size].T))
    return contrasts


def _check_batch(anchors: Tensor, candidates: Tensor, mask: Tensor | None, temperature: float) -> None:
    if not temperature > 0:
        raise RequestError("loss_invalid", f"temperature is {temperature}; it must be positive.")
    if anchors.ndim != 2 or candidates.ndim != 2 or anchors.shape[1] != candidates.shape[1]:
        shapes = f"{tuple(anchors.shape)} and {tuple(candidates.shape)}"
        raise RequestError(
            "loss_invalid", f"anchors and candidates are {shapes}; give (N, d) and (N + H, d)."
        )
    if not 1 <= len(anchors) <= len(candidates):
        numbers = f"{len(anchors)} anchors have {len(candidates)} candidates"
        raise RequestError("loss_invalid", f"{numbers}; the first candidates are the anchors' positives.")
    expected = (len(anchors), len(candidates))
    if mask is not None and (mask.shape != expected or mask.dtype != torch.bool):
        raise RequestError(
            "loss_invalid", f"mask is {mask.dtype} {tuple(mask.shape)}; give torch.bool {expected}."
        )


def _mean(losses: list[Tensor]) -> Tensor:
    """Mean over the directions of the mean over the rows."""
    return torch.stack([each.mean() for each in losses]).mean()


@lru_cache
def _log_expected_noise(dimension: int, temperature: float) -> float:
    """The logarithm of the sum in `expected_noise`; its terms fall from k = κ/2 on at the latest."""
    half, kappa = dimension / 2, 1 / temperature
    k = torch.arange(math.ceil(kappa) + 64, dtype=torch.float64)
    log_rising = torch.lgamma(half + k) - math.lgamma(half)
    return float(torch.logsumexp(2 * k * math.log(kappa / 2) - torch.lgamma(k + 1) - log_rising, dim=0))
