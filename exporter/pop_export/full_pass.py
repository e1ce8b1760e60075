"""What the full model does with some text, layer by layer: the targets that a pruned prefill is fitted to."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pop_export.layer_stack import Calls, LayerStack, watched

BATCH_TOKENS = 1024  # tokens that pass a layer at once: enough for wide matmuls, little enough for eager attention


@dataclass(frozen=True)
class FullState:
    """One batch at one layer of the full model."""

    entered: Tensor  # [B, S, E]
    left: Tensor  # [B, S, E]
    outputs: Mapping[str, Tensor]  # of the watched modules by name, [B, S, N]


class FullPass:
    """The full model over batches of text; each layer is computed when it is first asked for.

    Args:
        stack: the model's layers.
        windows: 1-D token ids.
        modules: per layer the names of the modules whose outputs are wanted.
        keep: layers whose states are held, for many fits over one text; of the others only those of the layer asked for
            last, and these have to be asked for in order.
    """

    def __init__(
        self,
        stack: LayerStack,
        windows: Sequence[np.ndarray],
        modules: Mapping[int, Iterable[str]],
        keep: Container[int] = (),
    ) -> None:
        self._stack, self._keep = stack, keep
        self._modules = {layer: set(names) for layer, names in modules.items()}
        self.ids = tuple(batches(windows))  # [B, S] each
        self.calls = tuple(stack.calls(ids) for ids in self.ids)
        self._states: dict[int, tuple[FullState, ...]] = {}

    def states(self, layer: int) -> tuple[FullState, ...]:
        """Return the states of one layer, a batch each."""
        if layer not in self._states:
            before = [call.entered for call in self.calls]
            if layer > 0:
                before = [state.left for state in self.states(layer - 1)]
            self._states[layer] = tuple(
                self._state(call, layer, entered) for call, entered in zip(self.calls, before, strict=True)
            )
            if layer - 1 not in self._keep:
                self._states.pop(layer - 1, None)
        return self._states[layer]

    @torch.no_grad()
    def _state(self, calls: Calls, layer: int, entered: Tensor) -> FullState:
        names = self._modules.get(layer, set())
        with watched(self._stack.model, names, stop=False) as seen:
            left = self._stack.run(calls, layer, entered)
        return FullState(entered, left, {name: output for name, (_, output) in seen.items()})


class JoinedPass:
    """Passes over several texts as one over all: what one of them has kept is not computed again."""

    def __init__(self, parts: Sequence[FullPass]) -> None:
        self._parts = parts
        self.ids = tuple(ids for part in parts for ids in part.ids)
        self.calls = tuple(call for part in parts for call in part.calls)

    def states(self, layer: int) -> tuple[FullState, ...]:
        """Return the states of one layer, a batch each."""
        return tuple(state for part in self._parts for state in part.states(layer))


AnyPass = FullPass | JoinedPass


def batches(windows: Sequence[np.ndarray], batch_tokens: int = BATCH_TOKENS) -> list[Tensor]:
    """Return windows of token ids as batches [B, S] of equal length, nothing padded."""
    by_length: dict[int, list[np.ndarray]] = {}
    for window in windows:
        by_length.setdefault(len(window), []).append(window)
    return [
        torch.from_numpy(np.stack(alike[start : start + size]))
        for length, alike in by_length.items()
        for size in [max(1, batch_tokens // length)]
        for start in range(0, len(alike), size)
    ]
