"""Make a loaded model fast on its device, and say what that changes. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
# They are written alike, but for their names.
_KNOWN_LAYERS = frozenset({"BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer"})
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
        unpacked = _pack_modules(encoder.model[0], getattr(torch, dtype)) if on_cpu else []
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


class _Product(nn.Module):
    """x Wᵀ + b in `dtype`, and GELU of it where asked for, with W laid out for oneDNN; several layers side by side."""

    def __init__(self, linear: Sequence[nn.Linear], dtype: torch.dtype, *, gelu: bool = False) -> None:
        super().__init__()
        self._dtype = dtype
        self._after, self._algorithm = ("gelu", "none") if gelu else ("none", "")
        weight = torch.cat([each.weight.detach() for each in linear]).to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        biases = [each.bias.detach() for each in linear if each.bias is not None]
        self._bias = torch.cat(biases).to(dtype) if biases else None

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self._dtype).contiguous(),
            self._weight,
            self._bias,
            self._after,
            [],
            self._algorithm,
        )
        return product


class _PackedLinear(_Product):
    """A linear layer that takes and gives float32."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).float()


class _PackedLayer(nn.Module):
    """One layer of BERT or its kin, the same sums in fewer steps; what flows between the layers is float32."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        super().__init__()
        attention, after_attention, output = layer.attention.self, layer.attention.output, layer.output
        self._heads = attention.num_attention_heads
        self._attend = _Product([attention.query, attention.key, attention.value], dtype)
        self._project = _Product([after_attention.dense], dtype)
        self._widen = _Product([layer.intermediate.dense], dtype, gelu=True)
        self._narrow = _Product([output.dense], dtype)
        self._norm, self._last_norm = after_attention.LayerNorm, output.LayerNorm
        self._weight_dropout = attention.dropout
        self._dropout, self._last_dropout = after_attention.dropout, output.dropout

    def forward(self, states: Tensor, attention_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        rows, tokens, _width = states.shape
        three = self._attend(states).float().view(rows, tokens, 3, self._heads, -1)
        query, key, value = three.permute(2, 0, 3, 1, 4).unbind()
        attended = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=self._weight_dropout.p if self.training else 0.0,
        )
        attended = attended.transpose(1, 2).reshape(states.shape)
        states = self._norm(self._dropout(self._project(attended)) + states)
        return self._last_norm(self._last_dropout(self._narrow(self._widen(states))) + states)  # type: ignore[no-any-return]


def _pack_modules(root: nn.Module, dtype: torch.dtype) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put packed modules in place of the plain ones; return what was there: parent, name, child."""
    unpacked: list[tuple[nn.Module, str, nn.Module]] = []
    for name, child in list(root.named_children()):
        if _is_known_layer(child):
            packed: nn.Module = _PackedLayer(child, dtype)
        elif type(child) is nn.Linear:  # not its subclasses, which may do something else
            packed = _PackedLinear([child], dtype)
        else:
            unpacked += _pack_modules(child, dtype)
            continue
        unpacked.append((root, name, child))
        setattr(root, name, packed.train(child.training))
    return unpacked


def _is_known_layer(module: nn.Module) -> bool:
    layer: Any = module
    return (
        type(layer).__name__ in _KNOWN_LAYERS
        and type(layer).__module__.startswith("transformers.")
        and not layer.is_decoder
        and _is_gelu(layer.intermediate.intermediate_act_fn)
    )


def _is_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
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
