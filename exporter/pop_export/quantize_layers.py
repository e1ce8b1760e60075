"""Quantise a model's layers one after another, each fitted to what the quantised ones before it hand on."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pop_export.channel_matrix import ChannelMatrix, ChannelScheme
from pop_export.full_pass import batches
from pop_export.gptq import gptq
from pop_export.layer_stack import Calls, LayerStack, watched
from pop_export.progress import progress
from pop_export.projections import linear_modules, output_axis
from pop_export.quantized_matrix import QuantizedMatrix, Scheme
from pop_export.split_matrix import StoredMatrix
from pop_export.stored_weights import stored_weights

MAX_TOKENS = 8192  # of the samples, spread evenly over them


@torch.no_grad()
def quantize_layers(
    model: PreTrainedModel,
    schemes: Mapping[str, Scheme | ChannelScheme],
    samples: Sequence[np.ndarray],
    matrices: Mapping[str, StoredMatrix],
    multiplied: Mapping[str, NDArray[np.float32]],
) -> dict[str, QuantizedMatrix | ChannelMatrix]:
    """Return the weights of linear modules inside decoder layers, quantised by GPTQ, by name of the parameter.

    Each is fitted to the inputs that it will get: those that quantised layers before it leave. What lies elsewhere, and
    what the text does not reach, is left out.

    Args:
        model: in fp32; unchanged afterwards.
        schemes: by name of the parameter.
        samples: windows of token ids.
        matrices: parameters outside the layers that are quantised already: the embedding.
        multiplied: by name of the parameter, what it is multiplied by [K] before, and its input divided by.
    """
    found: dict[str, QuantizedMatrix | ChannelMatrix] = {}
    stack = LayerStack(model)
    with stored_weights(model, matrices):
        calls = [stack.calls(ids) for ids in batches(spread(samples, MAX_TOKENS))]
    hidden = [call.entered for call in calls]  # [B, S, E] each
    with progress("fitting quantised weights", len(stack)) as advance:
        for layer, modules in enumerate(weights_by_layer(stack, schemes)):
            now = {
                f"{name}.weight": _fitted(
                    modules[name], hessian, schemes[f"{name}.weight"], multiplied.get(f"{name}.weight")
                )
                for readers, hessian in _hessians(stack, layer, set(modules), calls, hidden).items()
                for name in readers
            }
            with stored_weights(model, now):
                hidden = stack.run_all(calls, layer, hidden)
            found |= now
            advance(1)
    return found


def _fitted(
    weight: Tensor, hessian: Tensor, scheme: Scheme | ChannelScheme, by: NDArray[np.float32] | None
) -> QuantizedMatrix | ChannelMatrix:
    """Return a weight [N, K] times `by` [K], fitted to inputs that are divided by it."""
    if by is None:
        return gptq(weight, hessian, scheme)
    scales = torch.from_numpy(by)
    fitted = gptq(weight * scales, hessian / torch.outer(scales, scales), scheme)
    return dataclasses.replace(fitted, input_scales=by)


def spread(samples: Sequence[np.ndarray], max_tokens: int) -> list[np.ndarray]:
    """Return windows spread over all, about `max_tokens` together where there are more, at least one."""
    share = min(1.0, max_tokens / sum(map(len, samples)))
    chosen = np.linspace(0, len(samples) - 1, max(1, round(share * len(samples)))).astype(int)
    return [samples[index] for index in chosen]


def weights_by_layer(stack: LayerStack, wanted: Container[str]) -> list[dict[str, Tensor]]:
    """Return per layer the weights [N, K] of linear modules whose parameter is wanted, by name of the module."""
    names = {id(module): name for name, module in linear_modules(stack.model).items() if f"{name}.weight" in wanted}
    return [{names[id(module)]: _rows(module) for module in layer.modules() if id(module) in names}
            for layer in stack.layers]  # fmt: skip


def _rows(linear: nn.Module) -> Tensor:
    """Return the weight of a linear module as [N, K]."""
    weight: Tensor = linear.get_parameter("weight").detach()
    return weight if output_axis(linear) == 0 else weight.T


def _hessians(
    stack: LayerStack, layer: int, modules: set[str], calls: Sequence[Calls], hidden: Sequence[Tensor]
) -> dict[tuple[str, ...], Tensor]:
    """Return the sum over tokens of x x^T, [K, K], of the input x that each group of modules reads."""
    sums: dict[tuple[str, ...], Tensor] = {}
    for call, entered in zip(calls, hidden, strict=True):
        with watched(stack.model, modules, stop=False) as seen:
            stack.run(call, layer, entered)
        inputs = {name: x for name, (x, _) in seen.items()}
        for readers in _readers(inputs):
            rows = inputs[readers[0]].flatten(0, -2)  # [tokens, K]
            hessian = rows.T @ rows
            sums[readers] = sums[readers] + hessian if readers in sums else hessian
    return sums


def _readers(inputs: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return the names of modules in groups that read one and the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, entered in inputs.items():
        groups.setdefault(id(entered), []).append(name)
    return [tuple(names) for names in groups.values()]
