"""Measure how far a pruned prefill is from the full model: what the full model predicts on the pruned cache.

Protocol: a text's first `context` tokens are the prompt, its next `continuation` tokens are fed as they are; each of
these is predicted twice, after a full and after a pruned prefill. Windows are honoured: the sink and the boundary run
at full depth. The full model runs once; every plan then starts at its first skipped layer and is charged nothing for
what it skips, so that dozens of plans can be tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pop_export.full_pass import batches
from pop_export.layer_stack import Calls, LayerStack, StopLayer, watched
from pop_export.reference import PrefillPlan
from pop_runtime.manifest import Windows

CONTEXT_TOKENS, CONTINUATION_TOKENS = 384, 128
BATCH_TOKENS = 1024
ROWS_AT_A_TIME = 64  # positions compared at once: 64 MB for 262,144 tokens


@dataclass(frozen=True)
class Protocol:
    """How damage is measured; windows of text have `context + continuation` tokens."""

    context_tokens: int = CONTEXT_TOKENS
    continuation_tokens: int = CONTINUATION_TOKENS
    windows: Windows = field(default_factory=Windows)


@dataclass(frozen=True)
class Damage:
    """How far the full model on a pruned cache is from the full model on its own."""

    kl_mean_nats: float  # KL(full || pruned) per scored position
    kl_p95_nats: float
    top1_agreement: float  # share of positions where both prefer the same token
    num_positions: int


class DamageMeter:
    """Holds what the full model does with some texts, and measures plans against it.

    Args:
        stack: the model's layers.
        texts: by source, windows of `context + continuation` token ids.
        protocol: how to measure.
    """

    def __init__(self, stack: LayerStack, texts: Mapping[str, Sequence[np.ndarray]], protocol: Protocol) -> None:
        self._stack, self.protocol = stack, protocol
        self._batches = [
            (source, _FullRun(stack, ids, protocol))
            for source, windows in texts.items()
            for ids in batches(windows, BATCH_TOKENS)
        ]

    @torch.no_grad()
    def measure(self, plan: PrefillPlan, windows: Windows | None = None) -> dict[str, Damage]:
        """Return the damage that a plan does, by source; "all" is over the positions of all sources.

        Args:
            plan: what prefill leaves out.
            windows: other ones than the protocol's; their sink may not be larger.
        """
        windows = windows or self.protocol.windows
        assert windows.sink_tokens <= self.protocol.windows.sink_tokens
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for source, run in self._batches:
            found.setdefault(source, []).append(run.compare(plan, windows))
        damage = {source: _damage(parts) for source, parts in found.items()}
        return {"all": _damage([part for parts in found.values() for part in parts]), **damage}

    @torch.no_grad()
    def kl_by_window(self, plan: PrefillPlan) -> np.ndarray:
        """Return the mean KL divergence over each window of text, in nats per token: [W]."""
        divergences = [run.compare(plan, self.protocol.windows)[0] for _, run in self._batches]
        return np.concatenate(divergences).reshape(-1, self.protocol.continuation_tokens).mean(1)


def _damage(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Damage:
    divergences = np.concatenate([kl for kl, _ in parts])
    agreements = np.concatenate([same for _, same in parts])
    return Damage(
        float(divergences.mean()), float(np.quantile(divergences, 0.95)), float(agreements.mean()), len(divergences)
    )


class _PrefixCache(DynamicCache):
    """K and V of a prefix, whatever layers have been run; a layer told to stop ends when its K and V are in."""

    def __init__(self, sink: Mapping[int, tuple[Tensor, Tensor]], num_sink: int) -> None:
        super().__init__()
        self.num_past, self.stopping, self._num_sink = 0, False, num_sink
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._sink = sink

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.num_past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length + self.num_past, 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
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


class _FullRun:
    """The full model on one batch of texts: hidden states between layers, and what it predicts."""

    def __init__(self, stack: LayerStack, ids: Tensor, protocol: Protocol) -> None:
        self._stack = stack
        self._context, self._continuation = protocol.context_tokens, protocol.continuation_tokens
        sink = protocol.windows.sink_tokens
        self._ids = ids[:, :-1]  # the last token is predicted, never fed
        cache = _PrefixCache({}, 0)
        calls = stack.calls(self._ids, cache)
        self._entered: list[Tensor] = []
        hidden = calls.entered
        for layer in range(len(stack)):
            self._entered.append(hidden)
            hidden = stack.run(calls, layer, hidden)
        self._sink = (
            {
                layer: (key[:, :, :sink].clone(), value[:, :, :sink].clone())
                for layer, (key, value) in cache.kept.items()
            }
            if sink
            else {}
        )
        self._log_probs = self._predict(hidden)  # [B, C, V]

    def compare(self, plan: PrefillPlan, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
        """Return KL divergence and agreement at each scored position, both [B * C]."""
        full = self._log_probs.flatten(0, 1)  # [B * C, V]
        start, stop = windows.sink_tokens, self._context - windows.boundary_tokens
        if not plan.skipped_layers or stop <= start:
            return np.zeros(len(full)), np.ones(len(full), dtype=bool)
        pruned = self._predict(self._after_pruned(plan, windows.sink_tokens, stop)).flatten(0, 1)
        divergences, same = [], []
        for at in range(0, len(full), ROWS_AT_A_TIME):
            p, q = full[at : at + ROWS_AT_A_TIME], pruned[at : at + ROWS_AT_A_TIME]
            divergences.append((p.exp() * (p - q)).sum(-1).double())
            same.append(p.argmax(-1) == q.argmax(-1))
        return torch.cat(divergences).numpy(), torch.cat(same).numpy()

    def _after_pruned(self, plan: PrefillPlan, sink: int, num_pruned: int) -> Tensor:
        """Return what leaves the last layer at the positions after the pruned ones, [B, S - num_pruned, E]."""
        first = min(plan.skipped_layers)
        cache = _PrefixCache(self._sink, sink)
        calls = self._stack.calls(self._ids[:, :num_pruned], cache)
        hidden = self._entered[first][:, :num_pruned]
        with plan_weights(self._stack.model, plan):
            for layer in range(first, len(self._stack)):
                if layer not in plan.skipped_layers:
                    hidden = self._stack.run(calls, layer, hidden)
                    continue
                hidden = self._skip(plan, calls, cache, layer, hidden)
                if layer + 1 < len(self._stack):
                    hidden = torch.cat([self._entered[layer + 1][:, :sink], hidden[:, sink:]], dim=1)
        cache.num_past = num_pruned
        calls = self._stack.calls(self._ids[:, num_pruned:], cache, num_pruned)
        hidden = self._entered[first][:, num_pruned:]
        for layer in range(first, len(self._stack)):
            hidden = self._stack.run(calls, layer, hidden)
        return hidden

    def _skip(self, plan: PrefillPlan, calls: Calls, cache: _PrefixCache, layer: int, hidden: Tensor) -> Tensor:
        """Write the skipped layer's K and V and return what it passes on."""
        surrogate = plan.surrogates.get(layer)
        cache.stopping = True
        names = {surrogate.module} if surrogate else set()
        with watched(self._stack.model, names, stop=False) as seen, suppress(StopLayer):
            self._stack.run(calls, layer, hidden)
        cache.stopping = False
        return hidden if surrogate is None else hidden + seen[surrogate.module][0] @ surrogate.matrix

    def _predict(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities [B, C, V] of the continuation, from what left the last layer."""
        return self._stack.logits(hidden[:, -self._continuation :]).float().log_softmax(-1)


@contextmanager
def plan_weights(model: PreTrainedModel, plan: PrefillPlan) -> Iterator[None]:
    """Let the model use the plan's own weights while the context is open."""
    parameters = {name: model.get_parameter(name) for name in plan.weights}
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, weight in plan.weights.items():
            parameters[name].data = weight
        yield
    finally:
        for name, original in originals.items():
            parameters[name].data = original
