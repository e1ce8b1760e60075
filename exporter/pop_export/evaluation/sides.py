"""The two sides of a comparison: anything that reads prompts and then takes one token after another."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pop_runtime.kv_cache import BoundGraph, KvCache, allocate_cache, decode_graph
from pop_runtime.manifest import Windows
from pop_runtime.model import Model
from pop_runtime.sequence import Prefill, Sequence


class Side(Protocol):
    """B rows of equal length: read the prompts, step, and go back to where the prompts end."""

    def start(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        """Read prompts [B, S] int64, with room for `num_new` tokens more; return the logits after them, [B, V]."""

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Take one token per row, [B] int64, and return the logits after it, [B, V] float32."""

    def rewind(self) -> None:
        """Forget every token after the prompts."""


class BundleSide:
    """A bundle through the runtime: prompts row by row, steps for all rows together.

    Args:
        model: the loaded bundle.
        prefill: "pop" or "full".
        windows: sink and boundary of the prompts.
    """

    def __init__(self, model: Model, prefill: Prefill, windows: Windows) -> None:
        self._model, self._prefill, self._windows = model, prefill, windows
        self._cache: KvCache | None = None
        self._graph: BoundGraph | None = None
        self._size = (0, 0)  # rows and tokens that the cache was asked to hold
        self._num_prompt = self._length = 0
        self.num_pruned = 0  # positions of each prompt that went through the pruned graph

    def start(self, prompts: np.ndarray, num_new: int) -> np.ndarray:
        """Read the prompts into a new cache; see `Side`."""
        sessions, manifest = self._model.sessions, self._model.manifest
        num_rows, self._num_prompt = prompts.shape
        if self._cache is None or self._size != (num_rows, self._num_prompt + num_new):
            self._size = (num_rows, self._num_prompt + num_new)
            self._cache = allocate_cache(manifest, *self._size, sessions.place)
            self._graph = decode_graph(sessions, self._cache)
        self._length = self._num_prompt
        logits = []
        for index, prompt in enumerate(prompts.tolist()):
            row = Sequence(sessions, self._cache.row(index))
            logits.append(row.append(prompt, self._prefill, self._windows))
            self.num_pruned = row.num_pruned()
        return np.stack(logits)  # [B, V]

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed one token per row through the full graph; see `Side`."""
        assert self._graph is not None
        self._length += 1
        self._graph.run(tokens[:, None], np.full(len(tokens), self._length, np.int64))
        return self._graph.logits()

    def rewind(self) -> None:
        """Go back to the prompts' end: what lies behind it in the cache is written anew by the next steps."""
        self._length = self._num_prompt
