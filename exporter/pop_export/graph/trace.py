"""Trace a Hugging Face model into an ONNX graph over static KV buffers, by its family's own code.

The model's forward runs unchanged under `torch.export`. Few things are put in its way, none of them per family:
attention and cache (`attention.py`), the mixture of experts (`experts.py`), length-dependent rotary embeddings
(`rope.py`), and hooks on the decoder layers that mark the hidden states between layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pop_export.config import Dialect
from pop_export.decoder import (
    cache_argument,
    decoder_layers,
    last_position_head,
    layer_input,
    layer_input_name,
    position_arguments,
)
from pop_export.graph.attention import AttentionFunction, BufferCache, FusedCache, Trace, attention_in_graph, tracing
from pop_export.graph.attention_form import AttentionForm
from pop_export.graph.experts import dense_experts
from pop_export.graph.marker import mark
from pop_export.graph.ort_attention import group_query_attention
from pop_export.graph.rope import frozen_rope
from pop_export.graph.standard_attention import standard_attention
from pop_export.graph.translate import OPSET, quiet_tracing, translate
from pop_runtime.manifest import KvLayer

ATTENTION: dict[Dialect, AttentionFunction] = {"ort": group_query_attention, "standard": standard_attention}


class _DecodeForward(nn.Module):
    """The forward that is traced: I/O as docs/bundle.md lists it."""

    def __init__(self, model: PreTrainedModel, form: AttentionForm) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        S = input_ids.shape[1]
        total = symbolic(
            "Shape", (attention_mask,), attrs={"start": 1, "end": 2}, dtype=torch.int64, shape=(1,), version=OPSET
        )  # [1]
        lengths = attention_mask.sum(1)  # [B]
        past_lengths = mark(lengths - S, "past_lengths")  # [B]
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        trace = Trace(pairs, past_lengths, lengths, total.to(torch.int32).reshape(()), self.form.windows)
        positions = position_arguments(self.model, past_lengths[:, None] + torch.arange(S)[None])  # [B, S]
        cache: Cache = FusedCache() if self.form.fused else BufferCache()
        with tracing(trace):
            out = self.model(input_ids=input_ids, use_cache=True, **positions, **{cache_argument(self.model): cache})
        present = [buffer for layer in range(len(pairs)) for buffer in trace.present[layer]]
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
        marked = mark(layer_input(args, kwargs), f"layers.{layer}.input")
        return ((marked, *args[1:]), kwargs) if args else (args, {**kwargs, layer_input_name(kwargs): marked})

    return hook


def _mark_output(layer: int) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (mark(output[0], f"layers.{layer}.output"), *output[1:])
        return mark(output, f"layers.{layer}.output")

    return hook


def trace_decode_graph(
    model: PreTrainedModel, kv_layers: tuple[KvLayer, ...], form: AttentionForm, dialect: Dialect = "ort"
) -> ir.Model:
    """Return the full model as an ONNX graph in which markers still stand.

    Args:
        model: causal LM in eval mode.
        kv_layers: shape of each layer's buffers.
        form: how attention is put into the graph.
        dialect: operators of the fused form.
    """
    batch, seq, total, capacity = (torch.export.Dim(name) for name in ("batch", "seq", "total", "capacity"))
    past = tuple(
        torch.zeros(2, kv.num_heads, 64, size, dtype=model.dtype)
        for kv in kv_layers
        for size in (kv.key_head_size, kv.value_head_size)
    )
    names = [f"{layer}.{part}" for layer in range(len(kv_layers)) for part in ("key", "value")]
    with (
        quiet_tracing(),
        torch.no_grad(),
        attention_in_graph(model, ATTENTION[dialect] if form.fused else None),
        dense_experts(model),
        frozen_rope(model),
        _marked_layers(model),
        last_position_head(model),
        torch.fx.experimental._config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
    ):
        program = torch.export.export(
            _DecodeForward(model, form),
            (torch.full((2, 7), 3), torch.ones(2, 10, dtype=torch.int64), *past),
            dynamic_shapes=({0: batch, 1: seq}, {0: batch, 1: total}, tuple({0: batch, 2: capacity} for _ in past)),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # a guard on an example's size would freeze that size
        )
    return translate(
        program,
        ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names)],
        ["logits", *(f"present.{name}" for name in names)],
    )
