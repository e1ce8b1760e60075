"""Mixtures of experts in the graph: every expert sees every token, and the router's weights pick.

transformers' grouped matrix product has no ONNX translation. The dense form is exact and needs plain operators only; it
computes `num_experts / experts per token` times as much as the sparse one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

DENSE = "pop_dense"  # name of our experts function in transformers' registry


def _dense_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the routed experts' sum [N, E] for tokens `hidden` [N, E], k experts each with its weight [N, k]."""
    num_experts = module.down_proj.shape[0]
    chosen = top_k_index[..., None] == torch.arange(num_experts)  # [N, k, experts]
    routing = (chosen.to(hidden.dtype) * top_k_weights[..., None].to(hidden.dtype)).sum(1)  # [N, experts]
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear_each(module, name, hidden)  # [experts, N, I] or [experts, N, 2 I]
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _linear_each(module, "down_proj", inner)  # [experts, N, E]
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return (out * routing.transpose(0, 1)[..., None]).sum(0).to(hidden.dtype)


def _linear_each(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return every expert's projection `name` of `x`, [experts, N, features]."""
    weight = getattr(module, name)
    out = torch.matmul(x, weight if module.is_transposed else weight.transpose(1, 2))
    return out + getattr(module, f"{name}_bias")[:, None] if module.has_bias else out


ExpertsInterface.register(DENSE, _dense_experts)


@contextmanager
def dense_experts(model: PreTrainedModel) -> Iterator[None]:
    """Let every mixture of experts compute its dense form while the context is open."""
    if not model._can_set_experts_implementation():
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation(DENSE)
    try:
        yield
    finally:
        model.set_experts_implementation(before)
