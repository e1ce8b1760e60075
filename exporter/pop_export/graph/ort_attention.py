"""Attention of dialect `ort`: one operator of ONNX Runtime's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic_multi_out

from pop_export.graph.attention import current_trace


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).reshape(heads.shape[0], heads.shape[2], -1)  # [B, H, S, D] -> [B, S, H * D]


def group_query_attention(
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
    """Emit GroupQueryAttention, which appends K and V to their buffers and attends to all that is in them."""
    trace = current_trace()
    layer: int = module.layer_idx  # type: ignore[assignment]
    B, H, S, D = query.shape
    past_key, past_value = trace.past[layer]
    inputs = (_flat(query), _flat(key), _flat(value), past_key, past_value,
              (trace.lengths - 1).to(torch.int32), trace.total_length)  # fmt: skip
    if s_aux is not None:  # attention sinks [H]: input 11, after rope tables, positions and bias
        inputs = (*inputs, None, None, None, None, s_aux.to(query.dtype))  # type: ignore[assignment]
    out, *present = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attrs={
            "num_heads": H,
            "kv_num_heads": key.shape[1],
            "scale": float(scaling if scaling is not None else D**-0.5),
            "do_rotary": 0,
            "local_window_size": int(trace.windows[layer] or -1),
            "softcap": float(softcap or 0.0),
        },
        dtypes=(query.dtype,) * 3,
        shapes=((B, S, H * D), past_key.shape, past_value.shape),
        version=1,
    )
    trace.present[layer] = (present[0], present[1])
    return out.reshape(B, S, H, D), None
