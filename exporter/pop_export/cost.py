"""Predict what a plan saves: the work of each layer in prefill, counted in multiplications and additions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from pop_export.decoder import decoder_layers
from pop_export.projections import Projection, linear_modules, output_axis
from pop_runtime.manifest import KvLayer, Windows
from pop_runtime.prompt_work import PromptWork, speedup_limit

NUM_TOKENS = 1024  # prompt that speedups are predicted for, the one that speed.py measures


@dataclass(frozen=True)
class LayerCost:
    """Floating-point operations of one layer per prompt token."""

    linear: float  # all its weights; of experts those of every expert, since the graph computes them all
    kv: float  # those that make K and V
    attention: float  # per token attended to: scores and their sum
    surrogate: float  # the linear map that may stand in for it


def layer_costs(
    model: PreTrainedModel, projections: Sequence[Projection], kv_layers: Sequence[KvLayer]
) -> tuple[LayerCost, ...]:
    """Return what each layer costs, read off the shapes of its weights."""
    config = model.config.get_text_config(decoder=True)
    modules = linear_modules(model)
    costs = []
    for index, layer in enumerate(decoder_layers(model)):
        num_weights = sum(p.numel() for p in layer.parameters() if p.ndim in (2, 3))
        of_layer = [projection for projection in projections if projection.layer == index]
        features = {p.module: _num_features(modules[p.module]) for p in of_layer}
        kv = kv_layers[index]
        costs.append(
            LayerCost(
                linear=2.0 * num_weights,
                kv=2.0 * sum(len(p.columns) * features[p.module] for p in of_layer),
                attention=2.0 * config.num_attention_heads * (kv.key_head_size + kv.value_head_size),
                surrogate=2.0 * config.hidden_size * next(iter(features.values()), config.hidden_size),
            )
        )
    return tuple(costs)


def prompt_work(
    costs: Sequence[LayerCost], skipped: Collection[int], surrogates: Collection[int]
) -> tuple[PromptWork, PromptWork]:
    """Return the work of the full model and of a pruned prefill.

    The last layer of the prefill graph never attends: nothing reads what it would leave.

    Args:
        costs: of every layer.
        skipped: layers that only write K and V.
        surrogates: those of them with a surrogate.
    """
    last = len(costs) - 1
    kept = [cost for layer, cost in enumerate(costs) if layer not in skipped and layer != last]
    cut = [(layer, cost) for layer, cost in enumerate(costs) if layer in skipped or layer == last]
    writing = sum(cost.kv + (cost.surrogate if layer in surrogates else 0.0) for layer, cost in cut)
    full, part = (
        PromptWork(sum(cost.linear for cost in layers), sum(cost.attention for cost in layers))
        for layers in (costs, kept)
    )
    return full, PromptWork(part.linear + writing, part.attention)


def predicted_speedup(
    costs: Sequence[LayerCost],
    skipped: Collection[int],
    surrogates: Collection[int],
    windows: Windows,
    num_tokens: int = NUM_TOKENS,
) -> float:
    """Return the full model's work on a prompt over that of a turn with this plan, windows at full depth included.

    Args:
        costs: of every layer.
        skipped: layers that only write K and V.
        surrogates: those of them with a surrogate.
        windows: tokens that run at full depth.
        num_tokens: prompt length.
    """
    full, pruned = prompt_work(costs, skipped, surrogates)
    return speedup_limit(full, pruned, windows, num_tokens)


def _num_features(module: nn.Module) -> int:
    """Return the inputs of a linear module."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1 - output_axis(module)]
