"""Find the decoder layers of a Hugging Face model, whatever its family calls them, and hook their hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pop_runtime.errors import ModelError

# (layer, hidden state that entered it, hidden state that left it) -> hidden state to pass on; each [B, S, E]
ReplaceOutput = Callable[[int, Tensor, Tensor], Tensor]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the model's decoder layers, first to last.

    Raises:
        ModelError: no list of `num_hidden_layers` modules, or more than one, is found.
    """
    config = model.config.get_text_config(decoder=True)
    num_layers = config.num_hidden_layers
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks", "block")
    ]
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__}: expected one list of {num_layers} decoder layers, found {len(found)}; "
            "this family is not supported"
        )
    return found[0]


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state [B, S, E] that a decoder layer was called with."""
    return args[0] if args else kwargs["hidden_states"]


@contextmanager
def replaced_outputs(model: PreTrainedModel, replace: ReplaceOutput) -> Iterator[None]:
    """Let `replace` decide what each decoder layer passes on while the context is open.

    The layer itself still runs, so its K and V reach the cache as they always do.
    """

    def hook(layer: int) -> Callable[..., Any]:
        def run(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if isinstance(output, tuple):
                return (replace(layer, layer_input(args, kwargs), output[0]), *output[1:])
            return replace(layer, layer_input(args, kwargs), output)

        return run

    handles = [
        module.register_forward_hook(hook(index), with_kwargs=True)
        for index, module in enumerate(decoder_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def num_layers_of(model: PreTrainedModel) -> int:
    """Return how many decoder layers the model has."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def max_positions_of(model: PreTrainedModel, default: int = 1 << 20) -> int:
    """Return the longest sequence the model's config allows, prompt and new tokens together."""
    config = model.config.get_text_config(decoder=True)
    value = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(value) if value else default


def cache_argument(model: PreTrainedModel) -> str:
    """Return what the model's forward calls its KV cache: transformers renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def largest_attention_window(model: PreTrainedModel) -> int:
    """Return the most tokens that any windowed layer attends to; 0 where no layer has a window."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "sliding_window", None) or 0)


@contextmanager
def last_position_head(model: PreTrainedModel) -> Iterator[None]:
    """Let the head see the last position only, whether or not the family's forward offers `logits_to_keep`."""
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0][:, -1:],))
    try:
        yield
    finally:
        handle.remove()
