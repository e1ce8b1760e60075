"""Find the decoder layers of a Hugging Face model, whatever its family calls them, and hook their hidden states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
    num_layers = num_layers_of(model)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    }
    # a list of experts inside a layer may have that length too
    found = [module for name, module in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    if len(found) != 1:
        raise ModelError(
            f"{type(model).__name__}: expected one list of {num_layers} decoder layers, found {len(found)}; "
            "this family is not supported"
        )
    return found[0]


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state [B, S, E] that a decoder layer was called with."""
    return args[0] if args else kwargs[layer_input_name(kwargs)]


def layer_input_name(kwargs: dict[str, Any]) -> str:
    """Return what a decoder layer that is called by keywords alone calls its hidden state."""
    return next((name for name in ("hidden_states", "x") if name in kwargs), "hidden_states")


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
    """Return how many decoder layers the model has.

    Raises:
        ModelError: its config names no number of layers.
    """
    num_layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    if num_layers is None:
        raise ModelError(
            f"{type(model).__name__}: expected num_hidden_layers, found none; this family is not supported"
        )
    return int(num_layers)


def max_positions_of(model: PreTrainedModel, default: int = 1 << 20) -> int:
    """Return the longest sequence the model's config allows, prompt and new tokens together."""
    config = model.config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    value = next((getattr(config, name) for name in names if getattr(config, name, None)), default)
    return int(min([value, *_original_lengths(getattr(config, "rope_parameters", None) or {})]))


def _original_lengths(rope: dict[str, Any]) -> list[int]:
    """Return where rotary embeddings whose frequencies depend on the length change them: the graph ends there."""
    if any(isinstance(part, dict) for part in rope.values()):  # one rope per kind of layer
        return [length for part in rope.values() if isinstance(part, dict) for length in _original_lengths(part)]
    length = rope.get("original_max_position_embeddings")
    return [int(length)] if length and rope.get("rope_type") in ("longrope", "dynamic") else []


def position_arguments(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """Return positions [B, S] as the arguments that the model's forward takes: none where it counts by itself."""
    forwards = (model.forward, model.base_model.forward)
    takes = any("position_ids" in inspect.signature(forward).parameters for forward in forwards)
    return {"position_ids": positions} if takes else {}


def some_token_ids(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Return different token ids [1, num_tokens] to try a model with."""
    num_rows = model.get_input_embeddings().weight.shape[0]
    return torch.arange(num_tokens)[None] * 37 % min(num_rows, 251)


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


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter of the model want a gradient while the context is open."""
    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)
