"""Refuse, by name and before any tracing, the families whose memory of the past is more than K and V of each layer."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pop_export.decoder import cache_argument, num_layers_of, position_arguments, some_token_ids
from pop_export.quiet import first_line
from pop_runtime.errors import ModelError
from pop_runtime.manifest import KvLayer

NUM_TOKENS, NUM_FIRST = 12, 5  # fed to try a model: at once, and as 5 + 7
PLAIN_LAYERS = {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}  # of transformers' cache
TOLERANCE = 1e-3  # of the largest logit, between two orders of the same sums in fp32


@torch.no_grad()
def kv_layout(model: PreTrainedModel) -> tuple[KvLayer, ...]:
    """Return the shape of each layer's KV buffers, read off a real forward rather than the config.

    Raises:
        ModelError: the model is not a decoder, or its layers keep something else than one K and one V each.
    """
    num_layers = num_layers_of(model)
    _refuse_state(model)
    ids = some_token_ids(model, NUM_TOKENS)
    cache = DynamicCache(config=model.config)
    try:
        whole = model(input_ids=ids, use_cache=False).logits[0]  # [12, V]
        beginning = model(input_ids=ids[:, :NUM_FIRST], use_cache=False).logits[0]
        for start, stop in ((0, NUM_FIRST), (NUM_FIRST, NUM_TOKENS)):
            inputs = {"input_ids": ids[:, start:stop], cache_argument(model): cache}
            inputs |= position_arguments(model, torch.arange(start, stop)[None])
            pieces = model(use_cache=True, **inputs).logits[0, -1]
    except Exception as error:  # a family's forward may want anything: images, an encoder's output
        raise _refused(model, f"it does not run on token ids and a KV cache alone ({first_line(error)})") from error
    layers = _layers_with_keys(model, cache, num_layers)
    if _differ(beginning, whole[:NUM_FIRST]):
        raise _refused(model, "its tokens attend to later ones: it is an encoder, not a decoder")
    if _differ(pieces, whole[-1]):
        raise _refused(
            model, "fed in pieces it computes other logits than fed at once, so K and V are not all it keeps"
        )
    return layers


def _differ(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return not float((found - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


def _layers_with_keys(model: PreTrainedModel, cache: DynamicCache, num_layers: int) -> tuple[KvLayer, ...]:
    kept = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    kept = [layer for layer in kept if layer.keys.ndim == 4 and layer.keys.numel() and layer.values.numel()]
    if len(kept) != num_layers or len(cache.layers) != num_layers:
        raise _refused(model, f"expected K and V from each of {num_layers} layers, found them from {len(kept)}")
    return tuple(KvLayer(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in kept)


def _refuse_state(model: PreTrainedModel) -> None:
    """Raise a ModelError for recurrent, state-space, convolution and linear-attention layers."""
    layers = DynamicCache(config=model.config).layers
    other = sorted({type(layer).__name__ for layer in layers} - PLAIN_LAYERS)
    if getattr(model, "_is_stateful", False) or other:
        what = f" ({', '.join(other)})" if other else ""
        raise _refused(model, f"its layers keep more than K and V: a recurrent state or an index of its own{what}")


def _refused(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(f"{type(model).__name__}: {reason}; this family is not supported")
