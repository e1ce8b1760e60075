"""Many prompts at once: prefilled row by row, decoded together, each row cut at its own end."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from pop_runtime.generate import Request, StopReason
from pop_runtime.kv_cache import FULL, BoundGraph, KvCache, allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.sampling import Sampler
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt of a batch, without its end token."""

    token_ids: list[int]
    text: str
    stop_reason: StopReason


class _Row:
    """One prompt of the batch and what it has generated."""

    def __init__(self, sessions: SessionPair, cache: KvCache, request: Request) -> None:
        self.request, self.token_ids = request, list[int]()
        self.stop_reason: StopReason | None = None
        self.fed, self.length = request.prompt_token_ids[-1], len(request.prompt_token_ids)  # last token in the cache
        self._sampler = Sampler(request.sampling, cache.manifest.vocab_size, request.prompt_token_ids)
        self.take(Sequence(sessions, cache).append(request.prompt_token_ids, request.prefill, request.windows))

    def take(self, logits: np.ndarray) -> None:
        """Choose the next token from logits [V] and line it up to be fed, unless the row ends with it."""
        token = self._sampler.choose(logits)
        if token in self.request.end_token_ids:
            self.stop_reason = "end"
            return
        self.token_ids.append(token)
        if len(self.token_ids) == self.request.limit_tokens:
            self.stop_reason = "length"
            return
        self.fed, self.length = token, self.length + 1


def complete_batch(
    sessions: SessionPair, manifest: Manifest, requests: Rows[Request]
) -> list[tuple[list[int], StopReason]]:
    """Return the new token ids and the stop reason of each request, in order.

    A row that has ended is fed its last token again, at the same position: its length and its cache stay as they are
    until the others are done.
    """
    capacity = max(len(request.prompt_token_ids) + request.limit_tokens for request in requests)
    cache = allocate_cache(manifest, len(requests), capacity)
    rows = [_Row(sessions, cache.row(index), request) for index, request in enumerate(requests)]
    graph = BoundGraph(sessions.decode, cache, manifest.decode_graph, has_logits=True)
    while any(row.stop_reason is None for row in rows):
        ids = np.array([[row.fed] for row in rows], np.int64)  # [B, 1]
        lengths = np.array([row.length for row in rows], np.int64)  # [B]
        graph.run(ids, lengths)
        cache.depth[np.arange(len(rows)), lengths - 1] = FULL
        for row, logits in zip(rows, graph.logits(), strict=True):
            if row.stop_reason is None:
                row.take(logits)
    return [(row.token_ids, row.stop_reason or "length") for row in rows]
