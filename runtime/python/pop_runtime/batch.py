"""Many prompts at once: prefilled row by row, decoded together, each row cut at its own end."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pop_runtime.answer import Answer, StopReason
from pop_runtime.generate import read_turn
from pop_runtime.kv_cache import FULL, KvCache, allocate_cache, decode_graph
from pop_runtime.manifest import Manifest
from pop_runtime.request import Request
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair
from pop_runtime.text import Token


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt of a batch, without its end token."""

    token_ids: list[int]
    text: str
    stop_reason: StopReason
    settings: dict[str, Any]  # in force, the seed included: they reproduce the answer
    tokens: list[Token]  # each with its piece of the text, and its log-probability if asked for
    prompt_logprobs: list[float | None] | None


class _Row:
    """One prompt of the batch and its answer."""

    def __init__(self, sessions: SessionPair, cache: KvCache, request: Request, tokenizer: Tokenizer | None) -> None:
        prompt = request.prompt_token_ids
        self._settings = request.in_force()
        self.answer, self.tokens = Answer(request, tokenizer, cache.manifest.vocab_size, prompt), list[Token]()
        self.fed, self.length = prompt[-1], len(prompt)  # the last token in the cache
        logits, self._prompt_logprobs = read_turn(Sequence(sessions, cache), request)
        self.take(logits)

    def take(self, logits: np.ndarray) -> None:
        """Choose the next token from logits [V] and line it up to be fed, unless the row ends with it."""
        self.tokens += self.answer.take(logits)
        if self.answer.stop_reason is None:
            self.fed, self.length = self.answer.token_ids[-1], self.length + 1

    def completion(self) -> Completion:
        """Return the row's answer, once it has ended."""
        assert self.answer.stop_reason is not None
        text = "".join(token.text for token in self.tokens)
        return Completion(
            self.answer.token_ids, text, self.answer.stop_reason, self._settings, self.tokens, self._prompt_logprobs
        )


def complete_batch(
    sessions: SessionPair, manifest: Manifest, tokenizer: Tokenizer | None, requests: Rows[Request]
) -> list[Completion]:
    """Return the answer to each request, in order.

    A row that has ended is fed its last token again, at the same position: its length and its cache stay as they are
    until the others are done.
    """
    capacity = max(len(request.prompt_token_ids) + request.limit_tokens for request in requests)
    cache = allocate_cache(manifest, len(requests), capacity, sessions.place)
    rows = [_Row(sessions, cache.row(index), request, tokenizer) for index, request in enumerate(requests)]
    graph = decode_graph(sessions, cache)
    while any(row.answer.stop_reason is None for row in rows):
        ids = np.array([[row.fed] for row in rows], np.int64)  # [B, 1]
        lengths = np.array([row.length for row in rows], np.int64)  # [B]
        graph.run(ids, lengths)
        cache.depth[np.arange(len(rows)), lengths - 1] = FULL
        for row, logits in zip(rows, graph.logits(), strict=True):
            if row.answer.stop_reason is None:
                row.take(logits)
    return [row.completion() for row in rows]
