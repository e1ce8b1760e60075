"""The decode loop: one token after another from a sequence, as text that streams."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

from pop_runtime.manifest import Windows
from pop_runtime.sampling import Sampler, SamplingSettings
from pop_runtime.sequence import Prefill, Sequence
from pop_runtime.text import TextStream, Token, decode

StopReason = Literal["end", "length"]


@dataclass(frozen=True)
class Request:
    """Everything that decides a generation, defaults filled in."""

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int  # what was asked for
    limit_tokens: int  # what the sequence has room for, at most `max_new_tokens`
    prefill: Prefill
    windows: Windows
    sampling: SamplingSettings
    end_token_ids: frozenset[int]  # empty when end tokens are ignored
    threads: int

    def in_force(self) -> dict[str, Any]:
        """Return the settings for people and programs to read."""
        return {
            "prefill": self.prefill,
            **dataclasses.asdict(self.windows),
            **dataclasses.asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "end_token_ids": sorted(self.end_token_ids),
            "threads": self.threads,
        }


@dataclass(frozen=True)
class Stats:
    """Counts and times of a generation so far; only the runtime's own time counts, not the caller's between tokens."""

    num_prompt_tokens: int
    num_past_tokens: int  # of earlier turns, already in the cache
    num_pruned_tokens: int  # prompt tokens of this turn that went through the pruned graph
    num_new_tokens: int
    time_to_first_token_ms: float | None  # None before the first token
    tokens_per_second: float | None  # decode alone, after the first token; None before the second
    settings: dict[str, Any]


class Generation(Iterator[Token]):
    """An iterator over the tokens of one answer; work starts with the first `next`.

    The end token is not among the tokens: it ends the iteration with `stop_reason` "end". "length" means that
    `max_new_tokens` or the capacity was reached.
    """

    def __init__(self, sequence: Sequence, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.stop_reason: StopReason | None = None
        self._tokenizer = tokenizer
        self._num_past, self._num_pruned = len(sequence), 0
        self._first_s: float | None = None
        self._rest_s, self._num_timed = 0.0, 0
        self._stream = self._streamed(TextStream(tokenizer))

    def __next__(self) -> Token:
        return next(self._stream)

    @property
    def text(self) -> str:
        """The text of the tokens so far."""
        return decode(self._tokenizer, self.token_ids)

    @property
    def stats(self) -> Stats:
        """Counts and times so far."""
        return Stats(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_past_tokens=self._num_past,
            num_pruned_tokens=self._num_pruned,
            num_new_tokens=len(self.token_ids),
            time_to_first_token_ms=None if self._first_s is None else self._first_s * 1e3,
            tokens_per_second=self._num_timed / self._rest_s if self._num_timed else None,
            settings=self.request.in_force(),
        )

    def _streamed(self, stream: TextStream) -> Iterator[Token]:
        """Yield the chosen ids as tokens with text."""
        for token in self._chosen():
            self.token_ids.append(token)
            yield from stream.push(token)
        yield from stream.flush()

    def _chosen(self) -> Iterator[int]:
        """Yield one id after another, and set `stop_reason` before the last step."""
        request, sequence = self.request, self.sequence
        started = time.perf_counter()
        sampler = Sampler(request.sampling, sequence.vocab_size, [*sequence.token_ids, *request.prompt_token_ids])
        logits = sequence.append(request.prompt_token_ids, request.prefill, request.windows)
        self._num_pruned = sequence.num_pruned(self._num_past)
        token = sampler.choose(logits)
        self._first_s = time.perf_counter() - started
        for count in range(1, request.limit_tokens + 1):
            if token in request.end_token_ids:
                self.stop_reason = "end"
                return
            sequence.accept(token)
            if count == request.limit_tokens:
                self.stop_reason = "length"
            yield token
            if self.stop_reason:
                return
            started = time.perf_counter()
            token = sampler.choose(sequence.step())
            self._rest_s += time.perf_counter() - started
            self._num_timed += 1
