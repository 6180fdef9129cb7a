"""Make the linear layers of a loaded model fast on its device, and say what that changes. Imports torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.same_meaning import same_meaning_pairs
from probe_service.errors import EncoderError
from probe_service.settings import EncodeDtype

__all__ = ["pack"]

_PAIRS_COMPARED = 16
# In float32 only the order of sums changes. In bfloat16, of 8 bits, 4e-4 on average and 4e-3 at most are usual.
_LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}


def pack(encoder: ModuleEncoder, dtype: EncodeDtype) -> str:
    """Let the linear layers of an encoder that computes in float32 run as fast as its device can in `dtype`.

    On a CPU their weights are laid out once as oneDNN's kernels read them; with bfloat16 the products of matrices are
    taken in it, while sums, normalisation, attention and all that flows between the layers stay float32. On a GPU
    bfloat16 is the dtype of everything, and float32 changes nothing.

    Args:
        encoder: Its modules are changed in place.
        dtype: Of the products of matrices.

    Returns:
        What was done and how far it moves the cosines of 32 texts, in words for the report. A model whose layers cannot
        be packed in float32 stays as it was, and this says so.

    Raises:
        EncoderError: encoder_dtype_unavailable where bfloat16 is asked for and the CPU has no instructions for it, or
            it moves cosines too far; encoder_failed, encoder_out_of_memory.
    """
    on_cpu = encoder.model.device.type == "cpu"
    fault = _missing(dtype) if on_cpu else None
    if fault is None and (on_cpu or dtype == "bfloat16"):
        texts = [text for pair in same_meaning_pairs()[:_PAIRS_COMPARED] for text in pair]
        before = _cosines(encoder, texts)
        unpacked = _pack_linear_layers(encoder.model[0], getattr(torch, dtype)) if on_cpu else []
        if not on_cpu:
            encoder.model.to(torch.bfloat16)
        try:
            errors = np.abs(_cosines(encoder, texts) - before)
        except EncoderError as error:
            fault = error.message
        else:
            if errors.max() <= _LARGEST_ERROR[dtype]:
                return _words(dtype, errors, len(texts))
            fault = f"it moves a cosine by {errors.max():.1g}"
        for parent, name, child in unpacked:
            setattr(parent, name, child)
    if dtype == "bfloat16":
        raise EncoderError(
            "encoder_dtype_unavailable",
            f"PROBE_ENCODE_DTYPE is bfloat16, which cannot be used: {fault}. Unset it.",
        )
    return f"linear layers not packed: {fault}" if fault else "linear layers as loaded"


class _PackedLinear(nn.Module):
    """x Wᵀ + b, and GELU of it where asked for, with W laid out for oneDNN; x and the result are float32.

    With GELU and bfloat16 the result stays bfloat16: the next layer takes nothing else.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, *, gelu: bool) -> None:
        super().__init__()
        self._dtype = dtype
        self._gelu = gelu
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype))
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, rows: Tensor) -> Tensor:
        after, kind = ("gelu", "none") if self._gelu else ("none", "")
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self._dtype).contiguous(), self._weight, self._bias, after, [], kind
        )
        return product if self._gelu else product.float()


def _pack_linear_layers(root: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put packed layers in place of the plain ones; return what was there: module, name, child."""
    unpacked: list[tuple[nn.Module, str, nn.Module]] = []

    def put(parent: nn.Module, name: str, child: nn.Module) -> None:
        unpacked.append((parent, name, getattr(parent, name)))
        setattr(parent, name, child)

    for module in list(root.modules()):
        # As BERT and its kin name the layer that widens and the function after it.
        widening, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
        if type(widening) is nn.Linear and isinstance(activation, nn.Module) and _is_gelu(activation):
            put(module, "dense", _PackedLinear(widening, dtype, gelu=True))
            put(module, "intermediate_act_fn", nn.Identity())
        for name, child in list(module.named_children()):
            # Not its subclasses, which may do something else.
            if type(child) is nn.Linear:
                put(module, name, _PackedLinear(child, dtype, gelu=False))
    return unpacked


def _is_gelu(activation: nn.Module) -> bool:
    points = torch.linspace(-6.0, 6.0, 97)
    return torch.equal(activation(points), nn.functional.gelu(points))


def _missing(dtype: EncodeDtype) -> str | None:
    """What this machine lacks for packed layers of the dtype; None where it has all."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return "this build of torch has no oneDNN"
    # Without such instructions bfloat16 is emulated, and slower than float32.
    has_bfloat16 = any(
        getattr(torch.cpu, name, lambda: False)()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return None if dtype == "float32" or has_bfloat16 else "this CPU has neither AVX512-BF16 nor AMX"


def _cosines(encoder: ModuleEncoder, texts: list[str]) -> NDArray[np.float64]:
    vectors = encoder.encode(texts).vectors.astype(np.float64)
    cosines: NDArray[np.float64] = (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]
    return cosines


def _words(dtype: EncodeDtype, errors: NDArray[np.float64], count: int) -> str:
    if dtype == "float32":
        return f"linear layers packed, cosines of {count} texts within {_LARGEST_ERROR[dtype]:.0e} of the unpacked"
    return (
        f"products of matrices in bfloat16, which moves cosines of {count} texts by {errors.mean():.1e} on average and"
        f" {errors.max():.1e} at most"
    )
