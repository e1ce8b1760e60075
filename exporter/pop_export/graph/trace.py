"""Trace a Hugging Face model into an ONNX graph over static KV buffers, by its family's own code.

The model's forward runs unchanged under `torch.export`. Three things are put in its way, none of them per family:
the attention function (through transformers' `AttentionInterface`) emits a fused ONNX attention, the cache hands new K
and V through and collects the updated buffers, and hooks on the decoder layers mark the hidden states between layers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic, symbolic_multi_out
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from pop_export.decoder import cache_argument, decoder_layers, last_position_head, layer_input
from pop_runtime.manifest import KvLayer

OPSET = 24
MARKER = "Marker"  # op type, in domain "pop": names a value of the graph and is then removed
ATTENTION = "pop_graph"  # name of our attention function in transformers' registries


@dataclass
class _Trace:
    """What the attention function and the cache of one traced forward share."""

    past: list[tuple[Tensor, Tensor]]  # per layer: K and V buffers, each [B, H_kv, S_max, D]
    past_lengths: Tensor  # [B] int64: tokens in the buffers before this call
    total_length: Tensor  # [] int32: T
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


_current: _Trace | None = None  # set while a forward is traced; transformers' registries leave no other way in


class _GraphCache(Cache):
    """Stands in for the KV cache while the graph is traced: marks new K and V and hands them through."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return _mark(key, f"layers.{layer_idx}.key"), _mark(value, f"layers.{layer_idx}.value")


def _mark(value: Tensor, name: str) -> Tensor:
    return symbolic(f"pop::{MARKER}", (value,), attrs={"name": name}, dtype=value.dtype, shape=value.shape, version=1)


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).reshape(heads.shape[0], heads.shape[2], -1)  # [B, H, S, D] -> [B, S, H * D]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Emit GroupQueryAttention, which appends K and V to their buffers and attends to all that is in them."""
    assert _current is not None
    layer: int = module.layer_idx  # type: ignore[assignment]
    B, H, S, D = query.shape
    past_key, past_value = _current.past[layer]
    out, *present = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        (_flat(query), _flat(key), _flat(value), past_key, past_value,
         (_current.past_lengths + S - 1).to(torch.int32), _current.total_length),
        attrs={
            "num_heads": H,
            "kv_num_heads": key.shape[1],
            "scale": float(scaling if scaling is not None else D**-0.5),
            "do_rotary": 0,
            "local_window_size": int(sliding_window or -1),
            "softcap": float(softcap or 0.0),
        },
        dtypes=(query.dtype,) * 3,
        shapes=((B, S, H * D), past_key.shape, past_value.shape),
        version=1,
    )  # fmt: skip
    _current.present[layer] = (present[0], present[1])
    return out.reshape(B, S, H, D), None


def _no_mask(*_: Any, **__: Any) -> None:
    """GroupQueryAttention masks by itself: causal, windowed, and by the length of each row."""


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)


class _DecodeForward(nn.Module):
    """The forward that is traced: I/O as docs/bundle.md lists it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        global _current
        S = input_ids.shape[1]
        total = symbolic(
            "Shape", (attention_mask,), attrs={"start": 1, "end": 2}, dtype=torch.int64, shape=(1,), version=OPSET
        )  # [1]
        past_lengths = _mark(attention_mask.sum(1) - S, "past_lengths")  # [B]
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        _current = _Trace(pairs, past_lengths, total.to(torch.int32).reshape(()))
        try:
            positions = past_lengths[:, None] + torch.arange(S)[None]  # [B, S]
            cache = {cache_argument(self.model): _GraphCache()}
            out = self.model(input_ids=input_ids, position_ids=positions, use_cache=True, **cache)
            present = [buffer for layer in range(len(pairs)) for buffer in _current.present[layer]]
        finally:
            _current = None
        return (out.logits, *present)


@contextmanager
def _marked_layers(model: PreTrainedModel) -> Iterator[None]:
    """Mark each decoder layer's input and output hidden state while the context is open."""
    with ExitStack() as stack:
        for index, layer in enumerate(decoder_layers(model)):
            stack.callback(layer.register_forward_pre_hook(_mark_input(index), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(_mark_output(index)).remove)
        yield


def _mark_input(layer: int) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        marked = _mark(layer_input(args, kwargs), f"layers.{layer}.input")
        return ((marked, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": marked})

    return hook


def _mark_output(layer: int) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_mark(output[0], f"layers.{layer}.output"), *output[1:])
        return _mark(output, f"layers.{layer}.output")

    return hook


def trace_decode_graph(model: PreTrainedModel, kv_layers: tuple[KvLayer, ...]) -> ir.Model:
    """Return the full model as an ONNX graph in which markers still stand.

    Args:
        model: causal LM in eval mode.
        kv_layers: shape of each layer's buffers.
    """
    implementation = model.config._attn_implementation
    batch, seq, total, capacity = (torch.export.Dim(name) for name in ("batch", "seq", "total", "capacity"))
    past = tuple(
        torch.zeros(2, kv.num_heads, 64, size, dtype=model.dtype)
        for kv in kv_layers
        for size in (kv.key_head_size, kv.value_head_size)
    )
    names = [f"{layer}.{part}" for layer in range(len(kv_layers)) for part in ("key", "value")]
    model.set_attn_implementation(ATTENTION)
    try:
        with _quiet(), torch.no_grad(), _marked_layers(model), last_position_head(model):
            program = torch.onnx.export(
                _DecodeForward(model),
                (torch.full((2, 7), 3), torch.ones(2, 10, dtype=torch.int64), *past),
                dynamo=True,
                dynamic_shapes=({0: batch, 1: seq}, {0: batch, 1: total}, tuple({0: batch, 2: capacity} for _ in past)),
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
                output_names=["logits", *(f"present.{name}" for name in names)],
            )
    finally:
        model.set_attn_implementation(implementation)
    assert program is not None
    return program.model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's and onnxscript's chatter about tracing off the user's terminal."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
