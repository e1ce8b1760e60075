"""Choose the form of attention for a model: watch its layers attend once, with GroupQueryAttention's arithmetic.

The model runs a few tokens twice in plain PyTorch: by its own eager code, and with a twin of GroupQueryAttention in the
place of its attention function. Where both agree, and what reaches the function is what the cache was given, the fused
operator computes what the family means. Everything else attends over the buffer by the family's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from pop_export.decoder import cache_argument, num_layers_of, some_token_ids

PROBE = "pop_probe"  # name of the twin in transformers' registries
NUM_TOKENS = 24
TOLERANCE = 1e-3  # of the largest logit
HEAD_SIZE_STEP = 8  # GroupQueryAttention takes multiples of it only
MASK_ROWS = 1 << 20  # positions over which a mask's pattern is read: beyond any window


@dataclass(frozen=True)
class AttentionForm:
    """How a model's attention is put into the graph."""

    fused: bool
    windows: tuple[int | None, ...] = ()  # fused, per layer: tokens that a token attends to, itself included
    reason: str = ""  # why it is not fused


class NotFused(Exception):
    """What keeps a model from GroupQueryAttention."""


class _WatchedCache(Cache):
    """Notes what K and V each layer gives to its cache and hands them through."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.given: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.given[layer_idx] = (key, value)
        return key, value


class _Watch:
    """The twin of GroupQueryAttention and of its masks, with notes of what reached it."""

    def __init__(self) -> None:
        self.cache = _WatchedCache()
        self.windows: dict[int, int | None] = {}  # of the layers that attended
        self._masks: list[int | NotFused | None] = []  # window of each mask made, or why it has none

    def mask(self, *_: Any, mask_function: Callable[..., Any], q_length: int, **__: Any) -> Tensor:
        """Return a stand-in [1, 1, S, S] for a mask, full of its index: layers may slice it."""
        try:
            self._masks.append(window_of(mask_function))
        except NotFused as problem:  # of no account unless a layer attends with this mask
            self._masks.append(problem)
        return torch.full((1, 1, q_length, q_length), float(len(self._masks) - 1))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return attention [B, S, H, D] as GroupQueryAttention computes it."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.windows:
            raise NotFused("its layers do not attend once each")
        if any(a is not b for a, b in zip(self.cache.given.get(layer, ()), (key, value), strict=False)):
            raise NotFused("it changes K or V after they were cached")
        if key.shape != value.shape or layer not in self.cache.given:
            raise NotFused("K and V differ in size")
        if key.shape[3] % HEAD_SIZE_STEP or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise NotFused(f"the head size {key.shape[3]} is no multiple of {HEAD_SIZE_STEP}")
        self.windows[layer] = self._window(attention_mask, sliding_window)
        return _group_query_attention(query, key, value, self.windows[layer], scaling, softcap, s_aux), None

    def _window(self, mask: Tensor | None, sliding_window: int | None) -> int | None:
        if mask is None:
            return sliding_window
        index = float(mask.flatten()[0])
        if not bool((mask == index).all()) or index not in range(len(self._masks)):
            raise NotFused("it adds a bias to its attention scores")
        window = self._masks[int(index)]
        if isinstance(window, NotFused):
            raise window
        return window


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """Return the window of a causal mask, None where it has none.

    Args:
        mask_function: (batch, head, query position, key position) -> whether the query attends to the key.

    Raises:
        NotFused: it is another pattern (chunks, bidirectional blocks).
    """
    zero, keys = torch.zeros(1, 1, dtype=torch.long), torch.arange(MASK_ROWS)[None]
    last = torch.as_tensor(mask_function(zero, zero, torch.tensor([[MASK_ROWS - 1]]), keys)).expand(1, MASK_ROWS)
    window = int(last.sum())
    rows = torch.unique(torch.tensor([0, 1, 7, window - 1, window, window + 1, 2 * window + 3, MASK_ROWS - 1]))
    rows = rows[(rows >= 0) & (rows < MASK_ROWS)][:, None]
    wanted = (keys <= rows) & (keys > rows - window)
    if not torch.equal(torch.as_tensor(mask_function(zero, zero, rows, keys)).expand(wanted.shape), wanted):
        raise NotFused("its mask is neither causal nor a sliding window")
    return window if window < MASK_ROWS else None


def _group_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [B, S, H, D]: the operator's arithmetic over tokens that all are new."""
    B, H, S, D = query.shape
    key, value = (part.repeat_interleave(H // part.shape[1], 1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else D**-0.5)  # [B, H, S, S]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    keep = torch.ones(S, S, dtype=torch.bool).tril()
    if window:
        keep &= torch.ones(S, S, dtype=torch.bool).triu(1 - window)
    scores = scores.masked_fill(~keep, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(B, H, S, 1)], 3)
    return (scores.softmax(3)[..., :S] @ value).transpose(1, 2).contiguous()


@torch.no_grad()
def choose_attention(model: PreTrainedModel) -> AttentionForm:
    """Return the form of attention that computes what the model's own code does."""
    ids = some_token_ids(model, NUM_TOKENS)
    own = model(input_ids=ids, use_cache=False).logits
    watch, implementation = _Watch(), model.config._attn_implementation
    AttentionInterface.register(PROBE, watch.attend)
    AttentionMaskInterface.register(PROBE, watch.mask)
    try:
        model.set_attn_implementation(PROBE)
        twin = model(input_ids=ids, use_cache=True, **{cache_argument(model): watch.cache}).logits
    except NotFused as problem:
        return AttentionForm(False, reason=str(problem))
    except Exception as error:  # a family's own code may take our mask or cache for anything
        return AttentionForm(False, reason=f"its attention takes no other function ({type(error).__name__})")
    finally:
        model.set_attn_implementation(implementation)
    num_layers = num_layers_of(model)
    if sorted(watch.windows) != list(range(num_layers)):
        return AttentionForm(False, reason="its attention is not behind transformers' attention interface")
    if not float((own - twin).abs().max()) <= TOLERANCE * float(own.abs().max()):
        return AttentionForm(False, reason="its attention is not GroupQueryAttention's arithmetic")
    return AttentionForm(True, tuple(watch.windows[layer] for layer in range(num_layers)))
