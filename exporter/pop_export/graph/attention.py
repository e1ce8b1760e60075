"""How attention is put into the traced graph, in one of two forms; `attention_form.py` chooses for a model.

- fused: transformers' attention function is replaced by one that writes K and V to their buffers, masks and attends:
  `ort_attention.py` or `standard_attention.py`, by dialect. The cache only hands the new K and V through.
- buffer: the family's own eager attention runs over the whole KV buffer. The cache writes K and V with `TensorScatter`
  and returns the buffers, and the mask covers all of their places. Right for any code that takes a cache and a 4-D
  mask, but it computes as many scores as the buffer has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.onnx.ops import symbolic
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, eager_mask

from pop_export.graph.marker import mark
from pop_export.graph.translate import OPSET

FUSED = "pop_graph"  # name of our attention function in transformers' registries
SEQUENCE_AXIS = -2  # of the KV buffers, counted from the end: TensorRT's parser takes TensorScatter in no other way


@dataclass
class Trace:
    """What the attention function, the mask function and the cache of one traced forward share."""

    past: list[tuple[Tensor, Tensor]]  # per layer: K and V buffers, each [B, H_kv, S_max, D]
    past_lengths: Tensor  # [B] int64: tokens in the buffers before this call
    lengths: Tensor  # [B] int64: tokens in the buffers after it
    total_length: Tensor  # [] int32: T
    windows: tuple[int | None, ...]  # per layer, fused form: tokens that a token attends to, itself included
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


AttentionFunction = Callable[..., tuple[Tensor, None]]
_current: Trace | None = None  # set while a forward is traced; transformers' registries leave no other way in


def current_trace() -> Trace:
    """Return the trace whose forward is running."""
    assert _current is not None
    return _current


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Make `trace` what the functions of this module work on while the context is open."""
    global _current
    _current = trace
    try:
        yield
    finally:
        _current = None


@contextmanager
def attention_in_graph(model: PreTrainedModel, fused: AttentionFunction | None) -> Iterator[None]:
    """Let the model attend by `fused`, or without one by its own code over the buffers, while the context is open."""
    implementation = model.config._attn_implementation
    if fused is not None:
        AttentionInterface.register(FUSED, fused)
    else:
        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _buffer_mask
    try:
        model.set_attn_implementation("eager" if fused is None else FUSED)
        yield
    finally:
        if fused is None:
            del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        model.set_attn_implementation(implementation)


class FusedCache(Cache):
    """Stands in for the KV cache: marks new K and V and hands them through to the fused attention."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given to the model."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return new K and V, [B, H_kv, S, D], marked."""
        return mark(key, f"layers.{layer_idx}.key"), mark(value, f"layers.{layer_idx}.value")


class BufferCache(Cache):
    """Stands in for the KV cache: writes new K and V into their buffers and returns the whole buffers.

    Its length is given as 0: a family that counts positions by it is found by verification.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given to the model."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: `_buffer_mask` adds each row's own."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return S_max."""
        assert _current is not None
        return _current.past[layer_idx or 0][0].shape[2]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many places a mask covers, and the first of them."""
        return self.get_max_length(layer_idx), 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the buffers [B, H_kv, S_max, D] with the new K and V in them."""
        assert _current is not None
        past_key, past_value = _current.past[layer_idx]
        key, value = mark(key, f"layers.{layer_idx}.key"), mark(value, f"layers.{layer_idx}.value")
        pair = scatter(past_key, key, _current.past_lengths), scatter(past_value, value, _current.past_lengths)
        _current.present[layer_idx] = pair
        return pair


def scatter(past: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
    """Return the buffer [B, H_kv, S_max, D] with `new` [B, H_kv, S, D] written at each row's index."""
    return symbolic(
        "TensorScatter",
        (past, new, write_indices),
        attrs={"axis": SEQUENCE_AXIS, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=OPSET,
    )


def _buffer_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Tensor | None:
    """Return transformers' eager mask over the buffer, [B, 1, S, S_max], with each row's queries at its own places."""
    assert _current is not None
    past_lengths = _current.past_lengths

    def shifted(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return mask_function(batch, head, query + past_lengths[batch], key)

    return eager_mask(*args, **{**kwargs, "use_vmap": False, "attention_mask": None}, mask_function=shifted)


def _no_mask(*_: Any, **__: Any) -> None:
    """Our attention functions mask by themselves: causal, windowed, and by the length of each row."""


AttentionMaskInterface.register(FUSED, _no_mask)
