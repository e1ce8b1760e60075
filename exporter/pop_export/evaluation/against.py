"""The full side as the original checkpoint in PyTorch, so that the damage of quantisation shows too."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from pop_export.checkpoint import load_checkpoint
from pop_export.decoder import cache_argument, last_position_head, position_arguments
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Manifest

_LOG = logging.getLogger(__name__)


class CheckpointSide:
    """A causal LM in PyTorch, rows together; see `sides.Side`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache: Any = None
        self._after_prompt: Any = None
        self._num_prompt = self._length = 0

    def start(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        """Read prompts [B, S] and return the logits after them, [B, V] float32; the cache grows by itself."""
        del num_new
        self._cache, self._length = DynamicCache(config=self._model.config), 0
        logits = self._feed(torch.tensor(prompts))
        # a copy, for a windowed layer's cache forgets what it would need to go back
        self._num_prompt, self._after_prompt = self._length, copy.deepcopy(self._cache)
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Take one token per row, [B], and return the logits after it, [B, V] float32."""
        return self._feed(torch.tensor(tokens)[:, None])

    def rewind(self) -> None:
        """Forget every token after the prompts."""
        self._cache, self._length = copy.deepcopy(self._after_prompt), self._num_prompt

    @torch.no_grad()
    def _feed(self, ids: torch.Tensor) -> np.ndarray:
        """Feed [B, S] and return the last position's logits, [B, V]."""
        positions = torch.arange(self._length, self._length + ids.shape[1])[None].expand(len(ids), -1)  # [B, S]
        kwargs = {cache_argument(self._model): self._cache, **position_arguments(self._model, positions)}
        with last_position_head(self._model):
            logits = self._model(input_ids=ids, use_cache=True, **kwargs).logits  # [B, 1, V]
        self._length += ids.shape[1]
        return logits[:, -1].float().numpy()


def open_checkpoint_side(model: str, manifest: Manifest, threads: int | None, **how: Any) -> CheckpointSide:
    """Return the side for `--against`; warns where its weights are not those that the bundle was exported from.

    Args:
        model: as for `load_checkpoint`.
        manifest: of the bundle.
        threads: for PyTorch; None leaves them as they are.
        how: the other arguments of `load_checkpoint`.

    Raises:
        ModelError: no such checkpoint.
        UsageError: its vocabulary is not the bundle's.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = load_checkpoint(model, **how)
    num_rows = checkpoint.model.get_output_embeddings().weight.shape[0]
    if num_rows != manifest.vocab_size:
        raise UsageError(
            f"--against {model}: expected {manifest.vocab_size} tokens in the vocabulary (manifest.json), found "
            f"{num_rows}; give the checkpoint that the bundle was exported from"
        )
    found, wanted = checkpoint.source["sha256"], manifest.model.get("sha256")
    if found != wanted:
        _LOG.warning(
            "--against %s: its weights have sha256 %s, the bundle's had %s (manifest.json)", model, found, wanted
        )
    return CheckpointSide(checkpoint.model)
