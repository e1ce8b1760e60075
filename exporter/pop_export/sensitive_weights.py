"""Find the few weights that cannot do with 4 bits: those that a layer's output hangs on most.

A trained model has some: the projection that writes the huge activations which attention sinks live on, and those of
the last layers, which nothing after them evens out. Of 210 matrices of SmolLM2-135M five carry two fifths of the
damage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pop_export.full_pass import batches
from pop_export.layer_stack import LayerStack
from pop_export.progress import progress
from pop_export.quantize_layers import spread, weights_by_layer
from pop_export.quantized_matrix import Scheme, quantize_matrix
from pop_export.stored_weights import stored_weights

SENSITIVE_SHARE = 1 / 12  # of the weights: 4 bits more for them are a third of a bit more for each
MAX_TOKENS = 2048  # of the samples, spread evenly over them


@torch.no_grad()
def sensitive_weights(
    model: PreTrainedModel,
    weights: Collection[str],
    scheme: Scheme,
    samples: Sequence[np.ndarray],
    multiplied: Mapping[str, NDArray[np.float32]],
    share: float = SENSITIVE_SHARE,
) -> frozenset[str]:
    """Return the names of the weights whose rounding changes most, for their size, of what their layer gives.

    Each is rounded to nearest alone; what counts is the squared change of the layer's output over all tokens, over the
    square of that output. They hold `share` of the numbers of all weights at most.

    Args:
        model: in fp32; unchanged afterwards.
        weights: names of linear modules' weights; those outside the decoder layers are left out.
        scheme: how they would be rounded.
        samples: windows of token ids.
        multiplied: by name, what a weight is multiplied by [K] before it is rounded.
        share: of the numbers of all weights.
    """
    stack, nearest = LayerStack(model), dataclasses.replace(scheme, method="rtn")
    calls = [stack.calls(ids) for ids in batches(spread(samples, MAX_TOKENS))]
    hidden = [call.entered for call in calls]  # [B, S, E] each
    changes: dict[str, float] = {}
    sizes: dict[str, int] = {}
    with progress("finding sensitive weights", len(stack)) as advance:
        for layer, modules in enumerate(weights_by_layer(stack, weights)):
            left = stack.run_all(calls, layer, hidden)
            whole = float(sum(state.square().sum() for state in left))
            for name, weight in modules.items():
                parameter = f"{name}.weight"
                by = multiplied.get(parameter)
                rounded = quantize_matrix(weight.numpy() if by is None else weight.numpy() * by, nearest)
                rounded = dataclasses.replace(rounded, input_scales=by)
                with stored_weights(model, {parameter: rounded}):
                    changed = stack.run_all(calls, layer, hidden)
                change = sum((a - b).square().sum() for a, b in zip(changed, left, strict=True))
                changes[parameter], sizes[parameter] = float(change) / whole, weight.numel()
            hidden = left
            advance(1)
    return _within(changes, sizes, share * sum(sizes.values()))


def _within(changes: Mapping[str, float], sizes: Mapping[str, int], budget: float) -> frozenset[str]:
    """Return the names that change most per number, as many as the budget of numbers holds."""
    chosen = []
    for name in sorted(changes, key=lambda name: (-changes[name] / sizes[name], name)):
        if sizes[name] > budget:
            break
        budget -= sizes[name]
        chosen.append(name)
    return frozenset(chosen)
