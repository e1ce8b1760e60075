"""The full model on some text, and on the same text once a pruned pass has read its beginning.

The full model runs once; a pruned prompt then starts at the first skipped layer and is charged nothing for what it
skips, so that dozens of plans can be tried, or the weights of one plan many times. Gradients reach the plan's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pop_export.layer_stack import Calls, LayerStack, StopLayer, watched
from pop_export.reference import PrefillPlan, plan_weights


class PrefixCache(DynamicCache):
    """K and V of a prefix, whatever layers have been run; a layer told to stop ends when its K and V are in."""

    def __init__(self, sink: Mapping[int, tuple[Tensor, Tensor]], num_sink: int) -> None:
        super().__init__()
        self.num_past, self.stopping, self._num_sink = 0, False, num_sink
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._sink = sink

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the prefix."""
        return self.num_past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the next token."""
        return self.num_past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many positions a mask covers, and the first of them."""
        return query_length + self.num_past, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep the prefix's K and V [B, H_kv, S, D]; behind it, return them followed by the new ones."""
        if self.num_past:
            past_key, past_value = self.kept[layer_idx]
            return torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        if self.stopping and layer_idx in self._sink:
            key, value = (
                torch.cat([full[:, :, : self._num_sink], new[:, :, self._num_sink :]], dim=2)
                for full, new in zip(self._sink[layer_idx], (key, value), strict=True)
            )
        self.kept[layer_idx] = (key, value)
        if self.stopping:
            raise StopLayer
        return key, value


@dataclass(frozen=True)
class TextRun:
    """What the full model made of one batch of texts, as much of it as pruned prompts need."""

    stack: LayerStack
    ids: Tensor  # [B, S]
    entered: tuple[Tensor, ...]  # per layer [B, S, E]; layers behind the first skipped one may have the sink alone
    sink: Mapping[int, tuple[Tensor, Tensor]]  # by layer, K and V [B, H_kv, at least the sink, D]; empty without sink
    left: Tensor  # [B, S, E]: what left the last layer

    def row(self, index: int) -> TextRun:
        """Return the run of one text alone."""
        rows = slice(index, index + 1)
        sink = {layer: (key[rows], value[rows]) for layer, (key, value) in self.sink.items()}
        entered = tuple(states[rows] for states in self.entered)
        return TextRun(self.stack, self.ids[rows], entered, sink, self.left[rows])

    def after_pruned(self, plan: PrefillPlan, sink_tokens: int, num_pruned: int, stop: int) -> Tensor:
        """Return what leaves the last layer at positions `num_pruned .. stop`, [B, stop - num_pruned, E].

        Positions before `num_pruned` are read by the plan, but for the sink; those from there on by the full model.
        """
        first = min(plan.skipped_layers)
        cache = PrefixCache(self.sink, sink_tokens)
        calls = self.stack.calls(self.ids[:, :num_pruned], cache)
        hidden = self.entered[first][:, :num_pruned]
        with plan_weights(self.stack.model, plan):
            for layer in range(first, len(self.stack)):
                if layer not in plan.skipped_layers:
                    hidden = self.stack.run(calls, layer, hidden)
                    continue
                hidden = self._skip(plan, calls, cache, layer, hidden)
                if layer + 1 < len(self.stack):
                    hidden = torch.cat([self.entered[layer + 1][:, :sink_tokens], hidden[:, sink_tokens:]], dim=1)
        cache.num_past = num_pruned
        calls = self.stack.calls(self.ids[:, num_pruned:stop], cache, num_pruned)
        hidden = self.entered[first][:, num_pruned:stop]
        for layer in range(first, len(self.stack)):
            hidden = self.stack.run(calls, layer, hidden)
        return hidden

    def _skip(self, plan: PrefillPlan, calls: Calls, cache: PrefixCache, layer: int, hidden: Tensor) -> Tensor:
        """Write the skipped layer's K and V and return what it passes on."""
        surrogate = plan.surrogates.get(layer)
        cache.stopping = True
        names = {surrogate.module} if surrogate else set()
        with watched(self.stack.model, names, stop=False) as seen, suppress(StopLayer):
            self.stack.run(calls, layer, hidden)
        cache.stopping = False
        return hidden if surrogate is None else hidden + seen[surrogate.module][0] @ surrogate.matrix


@torch.no_grad()
def run_text(stack: LayerStack, ids: Tensor, sink_tokens: int) -> TextRun:
    """Run the full model over token ids [B, S] and keep what plans with any first skipped layer need."""
    cache = PrefixCache({}, 0)
    calls = stack.calls(ids, cache)
    hidden, entered = calls.entered, []
    for layer in range(len(stack)):
        entered.append(hidden)
        hidden = stack.run(calls, layer, hidden)
    sink = {
        layer: (key[:, :, :sink_tokens].clone(), value[:, :, :sink_tokens].clone())
        for layer, (key, value) in cache.kept.items()
        if sink_tokens
    }
    return TextRun(stack, ids, tuple(entered), sink, hidden)


@torch.no_grad()
def resume_text(stack: LayerStack, ids: Tensor, sink_tokens: int, first: int, entered: Tensor, left: Tensor) -> TextRun:
    """Return the run of a text that the full model has read already, for plans whose first skipped layer is known.

    Args:
        stack: the model's layers.
        ids: [B, S].
        sink_tokens: positions whose K, V and hidden states plans take from the full model.
        first: the first skipped layer.
        entered: [B, S, E], what entered it.
        left: [B, S, E], what left the last layer.
    """
    start = run_text(stack, ids[:, : max(1, sink_tokens)], sink_tokens)
    states = [entered if layer == first else states for layer, states in enumerate(start.entered)]
    return TextRun(stack, ids, tuple(states), start.sink, left)
