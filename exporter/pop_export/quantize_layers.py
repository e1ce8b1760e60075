"""Quantise a model's layers one after another, each fitted to what the quantised ones before it hand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pop_export.full_pass import batches
from pop_export.gptq import correction, gptq
from pop_export.layer_stack import Calls, LayerStack, watched
from pop_export.progress import progress
from pop_export.quantized_matrix import QuantizedMatrix, Scheme
from pop_export.split_matrix import StoredMatrix
from pop_export.stored_weights import stored_weights

MAX_TOKENS = 8192  # of the samples, spread evenly over them


@dataclass
class _Inputs:
    """What some modules of a layer read, as sums over tokens: x after quantised layers, x0 after original ones."""

    modules: tuple[str, ...]
    hessian: Tensor  # [K, K], of x x^T
    cross: Tensor  # [K, K], of x0 x^T


@torch.no_grad()
def quantize_layers(
    model: PreTrainedModel,
    schemes: Mapping[str, Scheme],
    samples: Sequence[np.ndarray],
    matrices: Mapping[str, StoredMatrix],
) -> dict[str, QuantizedMatrix]:
    """Return the weights of linear modules inside decoder layers, quantised by GPTQ, by name of the parameter.

    Each is fitted so that it makes of the inputs which it will get, those that quantised layers leave, what the
    original made of the original inputs. What lies elsewhere, and what the text does not reach, is left out.

    Args:
        model: in fp32; unchanged afterwards.
        schemes: by name of the parameter.
        samples: windows of token ids.
        matrices: parameters outside the layers that are quantised already: the embedding.
    """
    found: dict[str, QuantizedMatrix] = {}
    stack = LayerStack(model)
    text = batches(_spread(samples))
    calls = [stack.calls(ids) for ids in text]
    original = [call.entered for call in calls]  # [B, S, E] each
    with stored_weights(model, matrices):
        changed = [stack.calls(ids).entered for ids in text]
    names = {id(module): name for name, module in model.named_modules()}
    with progress("fitting quantised weights", len(stack)) as advance:
        for layer, module in enumerate(stack.layers):
            modules = _linear_modules(module, names[id(module)], schemes)
            inputs, original = _inputs(stack, layer, set(modules), calls, original, changed)
            now: dict[str, QuantizedMatrix] = {}
            for read in inputs:
                change = correction(read.hessian, read.cross)
                for name in read.modules:
                    weight = modules[name]
                    now[f"{name}.weight"] = gptq(weight + weight @ change, read.hessian, schemes[f"{name}.weight"])
            with stored_weights(model, now):
                changed = [stack.run(call, layer, hidden) for call, hidden in zip(calls, changed, strict=True)]
            found |= now
            advance(1)
    return found


def _spread(samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return windows spread over all, about MAX_TOKENS together where there are more, at least one."""
    share = min(1.0, MAX_TOKENS / sum(map(len, samples)))
    chosen = np.linspace(0, len(samples) - 1, max(1, round(share * len(samples)))).astype(int)
    return [samples[index] for index in chosen]


def _linear_modules(layer: nn.Module, prefix: str, schemes: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """Return the weights [N, K] that are to be quantised, by name of the module."""
    found = {}
    for name, module in layer.named_modules(prefix=prefix):
        if f"{name}.weight" in schemes and isinstance(module, nn.Linear | Conv1D):
            weight = module.weight.detach()
            found[name] = weight if isinstance(module, nn.Linear) else weight.T  # Conv1D keeps [K, N]
    return found


def _inputs(
    stack: LayerStack,
    layer: int,
    modules: set[str],
    calls: Sequence[Calls],
    original: Sequence[Tensor],
    changed: Sequence[Tensor],
) -> tuple[list[_Inputs], list[Tensor]]:
    """Return what the modules of a layer read, those that read the same together, and what the original layer gives."""
    sums: dict[tuple[str, ...], _Inputs] = {}
    left: list[Tensor] = []
    for call, before, after in zip(calls, original, changed, strict=True):
        (x0, output), (x, _) = (_read(stack, layer, modules, call, hidden) for hidden in (before, after))
        left.append(output)
        for names in _readers(x):
            rows = x[names[0]].flatten(0, -2)  # [tokens, K]
            rows0 = x0[names[0]].flatten(0, -2) if names[0] in x0 else rows
            if len(rows0) != len(rows):  # of an expert that was sent other tokens
                rows0 = rows
            hessian, cross = rows.T @ rows, rows0.T @ rows
            if names in sums:
                sums[names].hessian += hessian
                sums[names].cross += cross
            else:
                sums[names] = _Inputs(names, hessian, cross)
    return list(sums.values()), left


def _read(
    stack: LayerStack, layer: int, modules: set[str], call: Calls, hidden: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what each module reads when the layer runs on a hidden state, and what the layer gives."""
    with watched(stack.model, modules, stop=False) as seen:
        left = stack.run(call, layer, hidden)
    return {name: entered for name, (entered, _) in seen.items()}, left


def _readers(inputs: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return the names of modules in groups that read one and the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, entered in inputs.items():
        groups.setdefault(id(entered), []).append(name)
    return [tuple(names) for names in groups.values()]
