"""Attention in ONNX's own operators: K and V are written by `TensorScatter`, and `Attention` reads the whole buffers.

Which places a token attends to is said by a boolean mask alone. `nonpad_kv_seqlen`, `past_key` and `softcap` of the
operator are left out: TensorRT's parser takes none of them (docs/tensorrt.md). Soft-caps and attention sinks are
therefore written out in plain operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic

from pop_export.graph.attention import Trace, current_trace, scatter
from pop_export.graph.translate import OPSET


def standard_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write K and V into their buffers and return attention over them, [B, S, H, D]."""
    trace = current_trace()
    layer: int = module.layer_idx  # type: ignore[assignment]
    past_key, past_value = trace.past[layer]
    pair = scatter(past_key, key, trace.past_lengths), scatter(past_value, value, trace.past_lengths)
    trace.present[layer] = pair
    keep = _mask(trace, trace.windows[layer], query.shape[2], past_key.shape[2])
    scale = float(scaling if scaling is not None else query.shape[3] ** -0.5)
    if softcap or s_aux is not None:
        out = _written_out(query, *pair, keep, scale, softcap, s_aux)
    else:
        attributes: dict[str, Any] = {"scale": scale, "is_causal": 0}
        out = symbolic(
            "Attention", (query, *pair, keep), attrs=attributes, dtype=query.dtype, shape=query.shape, version=OPSET
        )
    return out.transpose(1, 2).contiguous(), None  # as transformers' own: some families go on with a view of it


def _mask(trace: Trace, window: int | None, num_new: int, capacity: int) -> Tensor:
    """Return which places of the buffer each new token attends to, [B, 1, S, S_max] bool."""
    at = (trace.past_lengths[:, None] + torch.arange(num_new)[None])[:, None, :, None]  # [B, 1, S, 1]
    places = torch.arange(capacity)[None, None, None]  # [1, 1, 1, S_max]
    keep = places <= at
    return keep & (places > at - window) if window else keep


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [B, H, S, D] in plain operators; query heads are grouped by the K and V that they share."""
    B, H, S, D = query.shape
    H_kv = key.shape[1]
    grouped = query.reshape(B, H_kv, H // H_kv, S, D)
    scores = grouped @ key.transpose(2, 3)[:, :, None] * scale  # [B, H_kv, H / H_kv, S, S_max]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = torch.where(keep[:, :, None], scores, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, H_kv, H // H_kv, 1, 1).expand(B, H_kv, H // H_kv, S, 1)
        scores = torch.cat([column, scores], 4)
    weights = scores.softmax(4, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., 1:]  # a sink takes its share and gives nothing
    return (weights @ value[:, :, None]).reshape(B, H, S, -1)
