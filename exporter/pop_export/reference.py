"""The slow, obvious twin of a bundle: the same plan in plain PyTorch, by the family's own code.

Prefill runs the whole model, but a skipped layer's result is dropped and its input passed on, so nothing of it remains
but the K and V it wrote to the cache, by weights of the plan's own where it has some. A surrogate adds a linear map of
the layer's normalised input to what is passed on. Decode is the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pop_export.decoder import cache_argument, last_position_head, position_arguments, replaced_outputs
from pop_runtime.schedule import Stretch


@dataclass(frozen=True)
class Surrogate:
    """A linear map that a skipped layer adds to the hidden state in place of its own update: `h + x @ matrix`."""

    module: str  # the module whose input is x [B, S, F]: the layer's normalised input
    matrix: Tensor  # [F, E]


@dataclass(frozen=True)
class PrefillPlan:
    """How prefill differs from the full model."""

    skipped_layers: frozenset[int]
    weights: Mapping[str, Tensor] = field(default_factory=dict)  # parameter name -> its value in prefill
    surrogates: Mapping[int, Surrogate] = field(default_factory=dict)  # skipped layer -> what stands in for it


class Reference:
    """The full model and its pruned prefill over one cache, of batch 1.

    Args:
        model: causal LM; unchanged while the reference is not running.
        plan: what prefill leaves out.
    """

    def __init__(self, model: PreTrainedModel, plan: PrefillPlan) -> None:
        self._model, self._plan = model, plan
        self.cache = DynamicCache(config=model.config)
        self.num_cached = 0

    @torch.no_grad()
    def feed(self, ids: Tensor, stage: str) -> Tensor:
        """Feed new tokens in one stage and return the logits of the last one, [V].

        The logits of a prefill stage come from a pruned pass: the runtime never reads them.

        Args:
            ids: [S] int64.
            stage: "prefill" or "decode".
        """
        kwargs = {cache_argument(self._model): self.cache, "use_cache": True}
        positions = torch.arange(self.num_cached, self.num_cached + len(ids))[None]  # [1, S]
        with pruned(self._model, self._plan) if stage == "prefill" else nullcontext(), last_position_head(self._model):
            kwargs |= position_arguments(self._model, positions)
            logits = self._model(input_ids=ids[None], **kwargs).logits  # [1, 1, V]
        self.num_cached += len(ids)
        return logits[0, -1]

    def feed_stretches(self, ids: Tensor, stretches: Iterable[Stretch]) -> Tensor:
        """Feed a turn's tokens as the schedule says and return the logits after the last stretch, [V]."""
        logits = torch.empty(0)
        for stretch in stretches:
            logits = self.feed(ids[stretch.start : stretch.stop], stretch.stage)
        return logits


@contextmanager
def pruned(model: PreTrainedModel, plan: PrefillPlan) -> Iterator[None]:
    """Make the model compute the pruned prefill while the context is open."""
    inputs: dict[str, Tensor] = {}

    def skip(layer: int, entered: Tensor, left: Tensor) -> Tensor:
        if layer in plan.surrogates:
            surrogate = plan.surrogates[layer]
            return entered + inputs[surrogate.module] @ surrogate.matrix
        return entered if layer in plan.skipped_layers else left

    def note(name: str) -> Callable[..., None]:
        return lambda _module, args: inputs.__setitem__(name, args[0])

    with plan_weights(model, plan), replaced_outputs(model, skip), ExitStack() as stack:
        for name in {surrogate.module for surrogate in plan.surrogates.values()}:
            stack.callback(model.get_submodule(name).register_forward_pre_hook(note(name)).remove)
        yield


@contextmanager
def plan_weights(model: PreTrainedModel, plan: PrefillPlan) -> Iterator[None]:
    """Let the model use the plan's own weights while the context is open; gradients reach those that want them."""
    places = []
    for name in plan.weights:
        module, _, attribute = name.rpartition(".")
        places.append((model.get_submodule(module), attribute))
    originals = [module._parameters[attribute] for module, attribute in places]
    try:
        # the dict itself, which keeps its order; an assignment takes nothing but parameters there
        for (module, attribute), weight in zip(places, plan.weights.values(), strict=True):
            module._parameters[attribute] = weight
        yield
    finally:
        for (module, attribute), original in zip(places, originals, strict=True):
            module._parameters[attribute] = original
