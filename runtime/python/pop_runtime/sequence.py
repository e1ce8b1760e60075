"""One growing sequence over one cache row: turns are appended, never prefilled again."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from numbers import Integral
from typing import Literal

import numpy as np

from pop_runtime.errors import UsageError
from pop_runtime.kv_cache import FULL, PRUNED, BoundGraph, KvCache
from pop_runtime.manifest import Manifest, Windows
from pop_runtime.schedule import Stage, plan_turn
from pop_runtime.sessions import SessionPair

Prefill = Literal["pop", "full"]
# Longest stretch fed at once. The attention kernel's scores take chunk x total numbers, and chunks of 128 to 1024
# tokens differ by less than 15 % in time on a CPU (SmolLM2).
CHUNK_TOKENS = 512


class Sequence:
    """Tokens and their KV cache, of batch 1.

    The last token that `accept` took is not in the cache yet: the next `step` or `append` feeds it, at full depth
    like every generated token.
    """

    def __init__(self, sessions: SessionPair, cache: KvCache, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._manifest, self.cache, self._chunk_tokens = cache.manifest, cache, chunk_tokens
        self._prefill = BoundGraph(sessions.prefill, cache, cache.manifest.prefill_graph, has_logits=False)
        self._decode = BoundGraph(sessions.decode, cache, cache.manifest.decode_graph, has_logits=True)
        self.token_ids: list[int] = []
        self.num_cached = 0  # tokens whose K and V are in the cache

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def capacity(self) -> int:
        """How many tokens the sequence can hold."""
        return self.cache.capacity

    @property
    def vocab_size(self) -> int:
        """Rows of the head: the length of the logits."""
        return self._manifest.vocab_size

    @property
    def depth(self) -> np.ndarray:
        """[tokens in the cache] uint8: PRUNED or FULL for each position (`pop_runtime.kv_cache`)."""
        return self.cache.depth[0, : self.num_cached].copy()

    def num_pruned(self, start: int = 0) -> int:
        """Return how many positions from `start` on went through the pruned graph."""
        return int((self.cache.depth[0, start : self.num_cached] == PRUNED).sum())

    def append(self, ids: Iterable[int], prefill: Prefill = "pop", windows: Windows | None = None) -> np.ndarray:
        """Feed a turn's tokens after those already there and return the logits of the last one, [V] float32.

        Args:
            ids: the new tokens, at least one.
            prefill: "pop" runs what lies between the windows through the pruned graph, "full" nothing.
            windows: sink and boundary of this turn; None takes the manifest's.

        Raises:
            UsageError: no ids, an id outside the embedding, more tokens than the sequence holds, an unknown `prefill`.
            BackendError: a session fails; what was fed before stays valid.
        """
        ids = checked_ids(ids, self._manifest)
        check_prefill(prefill)
        self._check_room(len(ids))
        if self.num_cached < len(self):
            self.step()
        chosen = (windows or self._manifest.windows) if prefill == "pop" else None
        for stretch in plan_turn(len(self), len(ids), chosen, self._chunk_tokens):
            piece = ids[stretch.start : stretch.stop]
            self.feed(piece, stretch.stage)
            self.token_ids.extend(piece)
        return self._decode.logits()[0]

    def accept(self, token: int) -> None:
        """Take a chosen token into the sequence; the one before it has to be in the cache.

        Raises:
            UsageError: the sequence is full.
        """
        assert self.num_cached == len(self)
        self._check_room(1)
        self.token_ids.append(token)

    def step(self) -> np.ndarray:
        """Feed the accepted token through the full graph and return the logits after it, [V] float32."""
        assert self.num_cached == len(self) - 1
        self.feed(self.token_ids[-1:], "decode")
        return self._decode.logits()[0]

    def _check_room(self, num_new: int) -> None:
        """Raise UsageError if so many more tokens do not fit."""
        total = len(self) + num_new
        if total > self.capacity:
            raise UsageError(
                f"sequence: expected at most {self.capacity} tokens, found {total}; make a larger sequence"
            )

    def feed(self, ids: Ids[int], stage: Stage) -> np.ndarray | None:
        """Run one stretch through the graph of its stage: what `append` and `step` are made of.

        Its tokens count only once the run is over: after a failure the sequence is what it was before.

        Args:
            ids: the next tokens, checked and with room for them.
            stage: "prefill" or "decode".

        Returns:
            Logits of the last token, [V] float32; None from the prefill graph.
        """
        stop = self.num_cached + len(ids)
        graph = self._prefill if stage == "prefill" else self._decode
        graph.run(np.array([ids], np.int64), np.array([stop], np.int64))
        self.cache.depth[0, self.num_cached : stop] = PRUNED if stage == "prefill" else FULL
        self.num_cached = stop
        return None if stage == "prefill" else graph.logits()[0]


def check_prefill(prefill: str) -> None:
    """Raise UsageError unless `prefill` is "pop" or "full"."""
    if prefill not in ("pop", "full"):
        raise UsageError(f"prefill: expected 'pop' or 'full', found {prefill!r}")


def checked_ids(ids: Iterable[int], manifest: Manifest) -> list[int]:
    """Return the ids as plain integers.

    Raises:
        UsageError: there are none, or one is no integer or has no row in the embedding.
    """
    ids = list(ids)
    if not ids:
        raise UsageError("prompt: expected at least one token, found none; give some text or ids")
    for index, token in enumerate(ids):
        if not isinstance(token, Integral) or not 0 <= token < manifest.vocab_size:
            raise UsageError(
                f"prompt, token {index}: expected an id of 0..{manifest.vocab_size - 1}, found {token!r}; "
                "check that the ids come from this model's tokenizer"
            )
    return [int(token) for token in ids]


def check_windows(windows: Windows) -> None:
    """Raise UsageError unless the sink is at least 0 and the boundary at least 1 token."""
    if windows.sink_tokens < 0:
        raise UsageError(f"sink_tokens: expected at least 0, found {windows.sink_tokens}")
    if windows.boundary_tokens < 1:
        raise UsageError(
            f"boundary_tokens: expected at least 1 (the last token predicts the next), found {windows.boundary_tokens}"
        )
