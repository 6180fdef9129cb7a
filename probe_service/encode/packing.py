"""Make a loaded model fast on its device, and say what that changes. Imports torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from probe_service.encode.module_encoder import ModuleEncoder
from probe_service.encode.same_meaning import same_meaning_pairs
from probe_service.errors import EncoderError
from probe_service.settings import EncodeDtype

__all__ = ["EndToEnd", "bfloat16_instructions", "lay_end_to_end", "pack"]

_PAIRS_COMPARED = 16
# They are written alike, but for their names.
_KNOWN_LAYERS = frozenset({"BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "ElectraLayer"})
_KNOWN_MODELS = frozenset({"BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel"})
# In float32 only the order of sums changes. In bfloat16, of 8 bits, 4e-4 on average and 4e-3 at most are usual.
_LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}
# Of averages of standard normal numbers in bfloat16.
_LARGEST_ERROR_OF_ATTENTION = 3e-2


def pack(encoder: ModuleEncoder, dtype: EncodeDtype) -> str:
    """Let an encoder that computes in float32 run as fast as its device can in `dtype`.

    On a CPU the weights of linear layers are laid out once as oneDNN's kernels read them; with bfloat16 the products of matrices
    are taken in it, while sums, normalisation, attention and all that flows between the layers stay float32. On a GPU the tokens
    of all rows are laid end to end, so that nothing is computed for padding; with bfloat16 it is the dtype of the whole
    transformer, but not of what pools its output.

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
    if encoder.model.device.type != "cpu":
        return lay_end_to_end(encoder, dtype)
    fault = _missing(dtype)
    if fault is None:
        texts = _compared_texts()
        before = _cosines(encoder, texts)
        unpacked = _pack_modules(encoder.model[0], getattr(torch, dtype))
        errors, fault = _errors(encoder, texts, before, _LARGEST_ERROR[dtype])
        if fault is None:
            return _words(dtype, errors, len(texts))
        for parent, name, child in unpacked:
            setattr(parent, name, child)
    if dtype == "bfloat16":
        raise _unavailable(fault)
    return f"linear layers not packed: {fault}"


def lay_end_to_end(encoder: ModuleEncoder, dtype: EncodeDtype) -> str:
    """Let the transformer of an encoder that computes in float32 compute nothing for padding; on any device.

    Two checks come before it is used: in float32 the cosines must be those of the padded model to 1e-5, and an attention for
    rows of several lengths must give what the plain one gives. A model that fails them is padded as before.

    Args:
        encoder: Its modules are changed in place.
        dtype: Of the transformer.

    Returns:
        As `pack`.

    Raises:
        EncoderError: As `pack`.
    """
    texts = _compared_texts()
    before = _cosines(encoder, texts)
    transformer: Any = encoder.model[0]
    padded = getattr(transformer, "auto_model", None)
    layout, fault = "rows end to end without padding", _unlike_bert(padded)
    if fault is None:
        (name,) = (name for name, child in transformer.named_children() if child is padded)
        setattr(transformer, name, EndToEnd(padded))
        _, fault = _errors(encoder, texts, before, _LARGEST_ERROR["float32"])
        if fault is not None:
            setattr(transformer, name, padded)
    if fault is not None:
        layout = f"rows padded to the longest of a batch: {fault}"
    if dtype == "float32":
        within = (
            f", cosines of {len(texts)} texts within {_LARGEST_ERROR[dtype]:.0e} of the padded"
            if fault is None
            else ""
        )
        return layout + within
    if fault is None:
        transformer.to(torch.bfloat16)
        layout = f"{layout}, {transformer.auto_model.choose_attention()}"
    else:
        encoder.model.to(torch.bfloat16)
    errors, fault = _errors(encoder, texts, before, _LARGEST_ERROR[dtype])
    if fault is not None:
        raise _unavailable(fault)
    return f"{_words(dtype, errors, len(texts))}; {layout}"


def bfloat16_instructions() -> list[str]:
    """Return what this CPU has for products in bfloat16, by torch's names; with none it emulates them, slower than float32."""
    return [
        name
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if getattr(torch.cpu, name, lambda: False)()
    ]


class EndToEnd(nn.Module):
    """A BERT or one of its kin over the tokens of all rows laid end to end: the same sums, but none for padding.

    Takes what the model itself takes, and gives its last hidden states in float32, zero where there is no token. While it
    trains, which is how dropout is measured, it is the model itself.

    Args:
        model: On its device, in its dtype; its layers are used, not copied, but for queries, keys and values.
    """

    takes_rows_end_to_end = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.padded = model
        self.config = model.config
        self.layers = nn.ModuleList(_TokenLayer(layer) for layer in model.encoder.layer)
        self._attend: _Attend = _attend_by_length
        self.train(model.training)

    def choose_attention(self) -> str:
        """Use the one kernel for rows of any length where this torch has it and it gives what the plain attention gives."""
        parameter = next(self.parameters())
        heads = self.config.num_attention_heads
        fault = _fault_of_varlen(parameter, heads, self.config.hidden_size // heads)
        self._attend = _attend_by_length if fault else _attend_varlen
        return f"attention by runs of equal length ({fault})" if fault else "variable-length attention"

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        token_places: Tensor | None = None,
        row_lengths: tuple[int, ...] | None = None,
        **_: Any,
    ) -> Any:
        """Return an output of transformers with `last_hidden_state`, (b, longest, width).

        Args:
            input_ids: (b, longest).
            attention_mask: (b, longest), 1 at tokens.
            token_type_ids: (b, longest) or None.
            token_places: (T,) places of the tokens among the b · longest; None: taken from the mask, which waits for it.
            row_lengths: Tokens of each row, on the host; None: likewise.
        """
        from transformers.modeling_outputs import BaseModelOutput

        if self.training:
            padded = self.padded(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            )
            return BaseModelOutput(last_hidden_state=padded.last_hidden_state.float())
        if token_places is None or row_lengths is None:
            token_places = attention_mask.flatten().nonzero().squeeze(1)
            row_lengths = tuple(attention_mask.sum(dim=1).tolist())
        # Of the padded rows, so that every token has the position that its model gives it.
        embedded = self.padded.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        states = embedded.flatten(0, 1)[token_places]
        rows = _Rows.of(row_lengths, states.device)
        for layer in self.layers:
            states = layer(states, self._attend, rows)
        last = torch.zeros((input_ids.numel(), states.shape[1]), dtype=torch.float32, device=states.device)
        last[token_places] = states.float()
        return BaseModelOutput(last_hidden_state=last.view(*input_ids.shape, -1))


@dataclass(frozen=True)
class _Rows:
    """Where the rows lie among T tokens laid end to end.

    Args:
        lengths: Of every row.
        ends: (b + 1,) int32 on the device, where each begins; the last is T.
    """

    lengths: tuple[int, ...]
    ends: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> _Rows:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if device.type == "cuda":
            ends = ends.pin_memory()
        return cls(lengths, ends.to(device, non_blocking=True))


_Attend = Callable[[Tensor, Tensor, Tensor, _Rows], Tensor]


def _attend_by_length(query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
    """Attention of each row to itself, (T, heads, width) each; rows of one length that lie together in one call."""
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    start = 0
    for length, run in itertools.groupby(length for length in rows.lengths if length):
        end = start + length * len(list(run))
        of_query, of_key, of_value = (
            each[start:end].view(-1, length, *each.shape[1:]).transpose(1, 2) for each in (query, key, value)
        )
        found = nn.functional.scaled_dot_product_attention(of_query, of_key, of_value)
        attended[start:end] = found.transpose(1, 2).reshape(end - start, *query.shape[1:])
        start = end
    return attended


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, rows: _Rows) -> Tensor:
    """The same in one kernel, which takes half precision on a GPU only."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(rows.lengths)
    return varlen_attn(query, key, value, rows.ends, rows.ends, longest, longest)  # type: ignore[return-value]


def _fault_of_varlen(like: Tensor, heads: int, width: int) -> str | None:
    """Why the variable-length attention cannot be used with such a tensor; None where it gives what the plain one gives."""
    rows = _Rows.of((70, 33, 33, 1, 5, 128, 14), like.device)
    generator = torch.Generator().manual_seed(0)
    three = torch.randn((sum(rows.lengths), 3, heads, width), generator=generator).to(like)
    query, key, value = three.unbind(1)
    try:
        with torch.inference_mode():
            difference = _attend_varlen(query, key, value, rows) - _attend_by_length(query, key, value, rows)
            largest = float(difference.float().abs().max())
    except Exception as error:  # noqa: BLE001 - whatever this torch, device or dtype lacks
        return f"this torch has no other here: {type(error).__name__}"
    # One token more in a row of 70, or one less, moves some number by more.
    return None if largest <= _LARGEST_ERROR_OF_ATTENTION else f"the other is off by {largest:.1g}"


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


class _TokenLayer(nn.Module):
    """One layer of BERT or its kin over tokens laid end to end, without dropout."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, after_attention, output = layer.attention.self, layer.attention.output, layer.output
        self._heads = attention.num_attention_heads
        self._three = _side_by_side([attention.query, attention.key, attention.value])
        self._project, self._norm = after_attention.dense, after_attention.LayerNorm
        self._widen, self._narrow, self._last_norm = layer.intermediate.dense, output.dense, output.LayerNorm

    def forward(self, states: Tensor, attend: _Attend, rows: _Rows) -> Tensor:
        query, key, value = self._three(states).view(len(states), 3, self._heads, -1).unbind(1)
        attended = attend(query, key, value, rows).flatten(1)
        states = self._norm(self._project(attended) + states)
        return self._last_norm(self._narrow(nn.functional.gelu(self._widen(states))) + states)  # type: ignore[no-any-return]


def _side_by_side(linear: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer that gives what several give of the same rows, one after the other."""
    weight = torch.cat([each.weight.detach() for each in linear])
    joined = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([each.bias.detach() for each in linear]), requires_grad=False)
    return joined


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


def _unlike_bert(model: Any) -> str | None:
    """Why the rows of a model cannot be laid end to end; None where they can."""
    if type(model).__name__ not in _KNOWN_MODELS or not type(model).__module__.startswith("transformers."):
        return f"{type(model).__name__} is none of {', '.join(sorted(_KNOWN_MODELS))}"
    if not all(_is_known_layer(layer) for layer in model.encoder.layer):
        return "its layers are not BERT's"
    return None


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
    if dtype == "float32" or bfloat16_instructions():
        return None
    return "this CPU has neither AVX512-BF16 nor AMX"


def _compared_texts() -> list[str]:
    return [text for pair in same_meaning_pairs()[:_PAIRS_COMPARED] for text in pair]


def _errors(
    encoder: ModuleEncoder, texts: list[str], before: NDArray[np.float64], largest: float
) -> tuple[NDArray[np.float64], str | None]:
    """How far cosines are from those before, and what is wrong with that, if anything is."""
    try:
        errors = np.abs(_cosines(encoder, texts) - before)
    except EncoderError as error:
        return np.full(len(before), np.nan), error.message
    # A NaN is no small error.
    return errors, None if errors.max() <= largest else f"it moves a cosine by {errors.max():.1g}"


def _unavailable(fault: str | None) -> EncoderError:
    return EncoderError(
        "encoder_dtype_unavailable",
        f"PROBE_ENCODE_DTYPE is bfloat16, which cannot be used: {fault}. Unset it.",
    )


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
