"""Find which modules compute each layer's K and V, by where the gradient of K and V goes.

Names would do for most families; the gradient proves it for all of them, fused projections included, and says which
outputs of a module are K and which are V.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pop_export.decoder import cache_argument, decoder_layers

Part = Literal["key", "value"]
PARTS: tuple[Part, Part] = ("key", "value")
NUM_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Projection:
    """The outputs of one module that are a layer's K, before rope and any norm of K, or its V."""

    layer: int
    part: Part
    module: str  # its name in the model; it computes `x @ W (+ bias)`
    columns: np.ndarray  # [R] int64, ascending: which of the module's outputs


def find_kv_projections(model: PreTrainedModel) -> tuple[Projection, ...]:
    """Return the K and V projections of every layer that has them, by layer, K before V.

    A part that more than one module writes to directly (multi-head latent attention) is left out: it is not one linear
    projection of one input.
    """
    outputs: dict[str, Tensor] = {}
    written: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Callable[..., Tensor]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):  # a router may be a linear module that returns more than its product
                return output
            # Cut off from what lies before it, so that only the nearest module's output gets a gradient; a copy, since
            # some families change it in place.
            outputs[name] = output.detach().requires_grad_()
            return outputs[name].clone()

        return hook

    class Tap(DynamicCache):
        def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            written[layer_idx] = (key, value)
            return super().update(key, value, layer_idx, *args, **kwargs)

    ids = torch.arange(1, 1 + NUM_PROBE_TOKENS)[None]  # [1, S]
    with ExitStack() as stack, torch.enable_grad():
        for name, module in linear_modules(model).items():
            stack.callback(module.register_forward_hook(watch(name)).remove)
        model(input_ids=ids, use_cache=True, **{cache_argument(model): Tap(config=model.config)})
        found = [
            projection
            for layer in sorted(written)
            for part, tensor in zip(PARTS, written[layer], strict=True)
            if (projection := _source_of(tensor, layer, part, outputs)) is not None
        ]
    return tuple(found)


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear modules inside the decoder layers by their name in the model."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D)
    }


def output_axis(module: nn.Module) -> int:
    """Return the axis of the module's weight that its outputs lie along."""
    return 1 if isinstance(module, Conv1D) else 0


def _source_of(tensor: Tensor, layer: int, part: Part, outputs: dict[str, Tensor]) -> Projection | None:
    """Return the one projection that K or V `tensor` [B, H_kv, S, D] comes from, or None."""
    if not tensor.requires_grad:
        return None
    names = list(outputs)
    weights = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) + 0.5
    grads = torch.autograd.grad((tensor * weights).sum(), list(outputs.values()), retain_graph=True, allow_unused=True)
    columns = {
        name: grad.abs().flatten(0, -2).sum(0).nonzero().flatten().numpy()
        for name, grad in zip(names, grads, strict=True)
        if grad is not None
    }
    sources = [(name, found) for name, found in columns.items() if len(found)]
    if len(sources) != 1:
        return None
    return Projection(layer, part, sources[0][0], sources[0][1])
