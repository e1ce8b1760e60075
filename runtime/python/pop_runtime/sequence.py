"""One growing sequence over one cache row: turns are appended, never prefilled again."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from typing import Literal

import numpy as np

from pop_runtime.cancel import Cancellation
from pop_runtime.checks import check_least, is_within
from pop_runtime.errors import UsageError
from pop_runtime.joined import joined_graphs
from pop_runtime.kv_cache import EMPTY, FULL, PRUNED, KvCache, decode_graph, grown_cache, prefill_graph
from pop_runtime.manifest import Manifest, Windows
from pop_runtime.schedule import Stage, Stretch, plan_joined_turn, plan_turn
from pop_runtime.sessions import SessionPair

Prefill = Literal["pop", "full"]
# Longest stretch fed at once: the largest that costs no more memory than a smaller one. SmolLM2, 4000 tokens, CPU s and
# peak MB without the cache (benchmarks/prefill_memory.py): 128: 17.2, 1156; 512: 16.7, 1175; 2048: 19.4, 1258.
CHUNK_TOKENS = 512
DEPTH = {"prefill": PRUNED, "decode": FULL}


class Sequence:
    """Tokens and their KV cache, of batch 1.

    The last token that `accept` took is not in the cache yet: the next `step` or `append` feeds it, at full depth
    like every generated token. Whatever fails or is cancelled leaves the sequence as it was.
    """

    def __init__(self, sessions: SessionPair, cache: KvCache) -> None:
        self._sessions, self._manifest = sessions, cache.manifest
        self.token_ids: list[int] = []
        self.num_cached = 0  # tokens whose K and V are in the cache
        self._bind(cache)

    def _bind(self, cache: KvCache) -> None:
        """Use this cache from now on."""
        prefill, decode = prefill_graph(self._sessions, cache), decode_graph(self._sessions, cache)
        self.cache, self._prefill, self._decode = cache, prefill, decode
        self._joined = joined_graphs(prefill, decode)

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

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens in all: at least twice the room there is, if more is needed.

        Raises:
            UsageError: the model has fewer positions.
            BackendError: the system refuses the memory.
        """
        if capacity > self._manifest.max_positions:
            raise UsageError(f"capacity: expected at most {self._manifest.max_positions} tokens, found {capacity}")
        if capacity > self.capacity:
            roomy = max(capacity, min(2 * self.capacity, self._manifest.max_positions))
            self._bind(grown_cache(self.cache, roomy, self.num_cached))

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on.

        Raises:
            UsageError: `length` is not within 0 and the tokens there are.
        """
        check_position(length, len(self))
        del self.token_ids[length:]
        self.num_cached = min(self.num_cached, length)
        self.cache.depth[0, length:] = EMPTY

    def append(
        self, ids: Iterable[int], prefill: Prefill = "pop", windows: Windows | None = None,
        chunk_tokens: int = CHUNK_TOKENS, cancellation: Cancellation | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Feed a turn's tokens after those already there and return the logits of the last one, [V] float32.

        Args:
            ids: the new tokens, at least one.
            prefill: "pop" runs what lies between the windows through the pruned graph, "full" nothing.
            windows: sink and boundary of this turn; None takes the manifest's.
            chunk_tokens: longest stretch fed at once.
            cancellation: ends the work when it is set.

        Raises:
            UsageError: no ids, an id outside the embedding, more tokens than the sequence holds, an unknown `prefill`,
                windows that the bundle's fit does not cover.
            BackendError: a session fails.
            Cancelled: by `cancellation`.
        """
        ids = checked_ids(ids, self._manifest)
        check_prefill(prefill)
        check_least("prefill_chunk_tokens", chunk_tokens, 1)
        windows = windows or self._manifest.windows
        check_windows(windows, self._manifest, prefill)
        self._check_room(len(ids))
        start = len(self)
        try:
            if self.num_cached < start:
                self.feed(self.token_ids[-1:], "decode", cancellation)
            chunk = min(chunk_tokens, self.cache.place.longest_run)
            for stretches in self._plan(start, len(ids), windows if prefill == "pop" else None, chunk):
                piece = ids[stretches[0].start : stretches[-1].stop]
                self.feed_stretches(piece, stretches, cancellation)
                self.token_ids.extend(piece)
        except BaseException:  # an interrupt from the keyboard too
            self.rewind(start)
            raise
        return self._decode.logits()[0]

    def accept(self, token: int) -> None:
        """Take a chosen token into the sequence; the one before it has to be in the cache.

        Raises:
            UsageError: the sequence is full.
        """
        assert self.num_cached == len(self)
        self._check_room(1)
        self.token_ids.append(token)

    def step(self, cancellation: Cancellation | None = None) -> np.ndarray:
        """Return the logits after the last token, [V] float32, fed through the full graph.

        That is the accepted token, or, if it is in the cache already, the last token again.
        """
        if not self.token_ids:
            raise UsageError("sequence: expected at least one token to go on from, found none; append some")
        self.num_cached = len(self) - 1
        self.feed(self.token_ids[-1:], "decode", cancellation)
        return self._decode.logits()[0]

    def _check_room(self, num_new: int) -> None:
        """Raise UsageError if so many more tokens do not fit."""
        total = len(self) + num_new
        if total > self.capacity:
            raise UsageError(
                f"sequence: expected at most {self.capacity} tokens, found {total}; make a larger sequence"
            )

    def feed(self, ids: Ids[int], stage: Stage, cancellation: Cancellation | None = None) -> np.ndarray | None:
        """Run one stretch through the graph of its stage: what `append` and `step` are made of.

        Its tokens count only once the run is over: after a failure the sequence is what it was before.

        Args:
            ids: the next tokens, checked and with room for them.
            stage: "prefill" or "decode".
            cancellation: ends the run when it is set.

        Returns:
            Logits of the last token, [V] float32; None from the prefill graph.
        """
        stop = self.num_cached + len(ids)
        graph = self._prefill if stage == "prefill" else self._decode
        graph.run(np.array([ids], np.int64), np.array([stop], np.int64), cancellation)
        self.cache.depth[0, self.num_cached : stop] = DEPTH[stage]
        self.num_cached = stop
        return None if stage == "prefill" else graph.logits()[0]

    def feed_stretches(
        self, ids: Ids[int], stretches: Ids[Stretch], cancellation: Cancellation | None = None
    ) -> np.ndarray | None:
        """Run stretches of one chunk, each through the graph of its stage, at once where both graphs lie in segments.

        Args:
            ids: the next tokens, checked and with room for them.
            stretches: they cover `ids` in order; only where they begin and end relative to each other counts.
            cancellation: ends the run when it is set.

        Returns:
            Logits of the last token, [V] float32; None if its stage is prefill.
        """
        start, past = stretches[0].start, self.num_cached
        within = [Stretch(part.start - start, part.stop - start, part.stage) for part in stretches]
        if self._joined is None or len(within) == 1:
            return [self.feed(ids[part.start : part.stop], part.stage, cancellation) for part in within][-1]
        self._joined.run(np.array([ids], np.int64), past, within, cancellation)
        for part in within:
            self.cache.depth[0, past + part.start : past + part.stop] = DEPTH[part.stage]
        self.num_cached = past + len(ids)
        return None if within[-1].stage == "prefill" else self._decode.logits()[0]

    def _plan(self, num_past: int, num_new: int, windows: Windows | None, chunk_tokens: int) -> list[list[Stretch]]:
        """Return the stretches of a turn, chunk by chunk."""
        if self._joined is None:
            return [[stretch] for stretch in plan_turn(num_past, num_new, windows, chunk_tokens)]
        return plan_joined_turn(num_past, num_new, windows, chunk_tokens)


def check_position(position: object, length: int) -> None:
    """Raise UsageError unless a sequence of `length` tokens can be rewound to a position."""
    if not is_within(position, 0, length):
        raise UsageError(f"rewind: expected a position of 0..{length}, found {position!r}")


def check_prefill(prefill: str) -> None:
    """Raise UsageError unless `prefill` is "pop" or "full"."""
    if prefill not in ("pop", "full"):
        raise UsageError(f"prefill: expected 'pop' or 'full', found {prefill!r}")


def checked_ids(ids: Iterable[int], manifest: Manifest) -> list[int]:
    """Return the ids as plain integers.

    Raises:
        UsageError: there are none, or one is no integer or has no row in the embedding.
    """
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):  # bytes would pass for small ids
        raise UsageError(f"prompt: expected token ids, found {type(ids).__name__}; give a list of whole numbers")
    ids = list(ids)
    if not ids:
        raise UsageError("prompt: expected at least one token, found none; give some text or ids")
    for index, token in enumerate(ids):
        if not is_within(token, 0, manifest.vocab_size - 1):
            raise UsageError(
                f"prompt, token {index}: expected an id of 0..{manifest.vocab_size - 1}, found {token!r}; "
                "check that the ids come from this model's tokenizer"
            )
    return [int(token) for token in ids]


def windows_in_force(
    manifest: Manifest, sink_tokens: int | None, boundary_tokens: int | None, prefill: str = "pop"
) -> Windows:
    """Return a turn's windows, the bundle's own where None is given.

    Raises:
        UsageError: as `check_windows`.
    """
    own = manifest.windows
    windows = Windows(
        own.sink_tokens if sink_tokens is None else sink_tokens,
        own.boundary_tokens if boundary_tokens is None else boundary_tokens,
    )
    check_windows(windows, manifest, prefill)
    return Windows(int(windows.sink_tokens), int(windows.boundary_tokens))


def check_windows(windows: Windows, manifest: Manifest, prefill: str = "pop") -> None:
    """Refuse windows that no turn can have, or that the pruned graph's projections were not fitted for.

    Raises:
        UsageError: the sink is no whole number of at least 0, the boundary none of at least 1, or a fitted prefill
            graph is to be run with a smaller sink than it was fitted for.
    """
    check_least("sink_tokens", windows.sink_tokens, 0)
    check_least("boundary_tokens", windows.boundary_tokens, 1, " (the last token predicts the next)")
    is_fitted = bool(manifest.plan.refitted_layers or manifest.plan.surrogate_layers)
    if prefill == "pop" and is_fitted and windows.sink_tokens < manifest.windows.sink_tokens:
        raise UsageError(
            f"sink_tokens: expected at least {manifest.windows.sink_tokens}, found {windows.sink_tokens}; the bundle's "
            "K and V projections were fitted without those positions and do much more damage on them; raise it, use "
            f"prefill 'full', or export again with --sink-tokens {windows.sink_tokens}"
        )
