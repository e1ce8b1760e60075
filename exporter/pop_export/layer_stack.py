"""Run a model's decoder layers one at a time, on any hidden state, by the family's own code.

The model itself says how it calls its layers: a forward in which they only note their arguments costs no more than an
embedding. Runs that share a beginning then share its work, and all texts can pass one layer before the next begins.
Whether gradients are recorded is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pop_export.decoder import cache_argument, decoder_layers, last_position_head, layer_input, position_arguments
from pop_runtime.errors import ModelError


@dataclass(frozen=True)
class Calls:
    """How the model called its layers for one batch of token ids."""

    entered: Tensor  # [B, S, E]: what the first layer got
    arguments: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]  # per layer, without the hidden state


class LayerStack:
    """The decoder layers of one model, which is unchanged afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        self._returns_tuple: tuple[bool, ...] = self._probe()

    def __len__(self) -> int:
        return len(self.layers)

    @torch.no_grad()
    def calls(self, ids: Tensor, cache: Any = None, num_past: int = 0) -> Calls:
        """Return how the model calls its layers on token ids [B, S] that follow `num_past` tokens in `cache`."""
        noted: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []

        def note(_layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            hidden = layer_input(args, kwargs)
            rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            noted.append((hidden, args[1:], rest))
            return hidden

        past = {} if cache is None else {cache_argument(self.model): cache}
        positions = torch.arange(num_past, num_past + ids.shape[1])[None]  # [1, S]
        arguments = {**position_arguments(self.model, positions), **past}
        with self._replaced(note), last_position_head(self.model):  # whose logits are not wanted
            self.model(input_ids=ids, use_cache=cache is not None, **arguments)
        return Calls(noted[0][0], tuple((args, kwargs) for _, args, kwargs in noted))

    def run(self, calls: Calls, layer: int, hidden: Tensor) -> Tensor:
        """Return what `layer` makes of a hidden state, each [B, S, E]."""
        args, kwargs = calls.arguments[layer]
        output = self.layers[layer](hidden, *args, **kwargs)
        return output[0] if self._returns_tuple[layer] else output

    def run_all(self, calls: Sequence[Calls], layer: int, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Return what `layer` makes of the hidden state of each batch."""
        return [self.run(call, layer, entered) for call, entered in zip(calls, hidden, strict=True)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, S, V] of hidden states [B, S, E] that left the last layer."""
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64)
        with self._replaced(lambda _layer, _args, _kwargs: hidden):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def _probe(self) -> tuple[bool, ...]:
        """Return which layers hand their hidden state on as the first of a tuple.

        Raises:
            ModelError: a layer hands on anything else than one hidden state per token.
        """
        found: dict[int, bool] = {}
        ids = torch.ones(1, 2, dtype=torch.int64)

        def hook(layer: int) -> Callable[..., None]:
            def note(_module: nn.Module, _args: Any, output: Any) -> None:
                found[layer] = isinstance(output, tuple)
                shape = tuple((output[0] if found[layer] else output).shape)
                if len(shape) != 3 or shape[:2] != ids.shape:
                    raise ModelError(
                        f"{type(self.model).__name__}, layer {layer}: expected one hidden state per token, [1, 2, E], "
                        f"found {list(shape)}; this family is not supported"
                    )

            return note

        handles = [module.register_forward_hook(hook(index)) for index, module in enumerate(self.layers)]
        try:
            self.model(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return tuple(found[layer] for layer in range(len(self.layers)))

    @contextmanager
    def _replaced(self, forward: Callable[[int, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
        """Let `forward` stand in for every layer while the context is open."""

        def stand_in(layer: int) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                hidden = forward(layer, args, kwargs)
                return (hidden,) if self._returns_tuple[layer] else hidden

            return run

        for index, module in enumerate(self.layers):
            module.forward = stand_in(index)
        try:
            yield
        finally:
            for module in self.layers:
                del module.forward


class StopLayer(Exception):
    """Raised inside a layer once all that is wanted of it has been seen."""


@contextmanager
def watched(model: PreTrainedModel, names: set[str], stop: bool) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Yield a dict that fills with (input, output) of the named modules as they run.

    Args:
        model: where the modules are.
        names: of the modules.
        stop: raise `StopLayer` as soon as all of them have run.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        def run(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            seen[name] = (args[0], output)
            if stop and len(seen) == len(names):
                raise StopLayer

        return run

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
