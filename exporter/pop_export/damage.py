"""Measure how far a pruned prefill is from the full model: what the full model predicts on the pruned cache.

Protocol: a text's first `context` tokens are the prompt, its next `continuation` tokens are fed as they are; each of
these is predicted twice, after a full and after a pruned prefill. Windows are honoured: the sink and the boundary run
at full depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pop_export.full_pass import batches
from pop_export.layer_stack import LayerStack
from pop_export.reference import PrefillPlan
from pop_export.text_run import run_text
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

    @property
    def num_pruned(self) -> int:
        """How many tokens of a prompt lie between sink and boundary; not above 0: no plan does any damage."""
        return self.context_tokens - self.windows.sink_tokens - self.windows.boundary_tokens


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


def kl_divergences(full: Tensor, pruned: Tensor) -> Tensor:
    """Return KL(full || pruned) in nats at each position, [...], of log-probabilities [..., V]."""
    return (full.exp() * (full - pruned)).sum(-1)


def _damage(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Damage:
    divergences = np.concatenate([kl for kl, _ in parts])
    agreements = np.concatenate([same for _, same in parts])
    return Damage(
        float(divergences.mean()), float(np.quantile(divergences, 0.95)), float(agreements.mean()), len(divergences)
    )


class _FullRun:
    """The full model on one batch of texts, and what it predicts."""

    def __init__(self, stack: LayerStack, ids: Tensor, protocol: Protocol) -> None:
        self._stack = stack
        self._context, self._continuation = protocol.context_tokens, protocol.continuation_tokens
        self._run = run_text(stack, ids[:, :-1], protocol.windows.sink_tokens)  # the last token is predicted, never fed
        self._log_probs = self._predict(self._run.left)  # [B, C, V]

    def compare(self, plan: PrefillPlan, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
        """Return KL divergence and agreement at each scored position, both [B * C]."""
        full = self._log_probs.flatten(0, 1)  # [B * C, V]
        start, stop = windows.sink_tokens, self._context - windows.boundary_tokens
        if not plan.skipped_layers or stop <= start:
            return np.zeros(len(full)), np.ones(len(full), dtype=bool)
        left = self._run.after_pruned(plan, windows.sink_tokens, stop, self._run.ids.shape[1])
        pruned = self._predict(left).flatten(0, 1)
        divergences, same = [], []
        for at in range(0, len(full), ROWS_AT_A_TIME):
            p, q = full[at : at + ROWS_AT_A_TIME], pruned[at : at + ROWS_AT_A_TIME]
            divergences.append(kl_divergences(p, q).double())
            same.append(p.argmax(-1) == q.argmax(-1))
        return torch.cat(divergences).numpy(), torch.cat(same).numpy()

    @torch.no_grad()
    def _predict(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities [B, C, V] of the continuation, from what left the last layer."""
        return self._stack.logits(hidden[:, -self._continuation :]).float().log_softmax(-1)
