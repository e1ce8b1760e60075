"""One answer as an iterator: read the turn, then one token after another, as text that streams."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pop_runtime.answer import Answer, StopReason
from pop_runtime.cancel import Cancellation, Cancelled
from pop_runtime.request import Request
from pop_runtime.sampling import log_probabilities
from pop_runtime.sequence import Sequence
from pop_runtime.text import Token


@dataclass(frozen=True)
class Stats:
    """Counts and times of a generation so far; only the runtime's own time counts, not the caller's between tokens."""

    num_prompt_tokens: int
    num_past_tokens: int  # of earlier turns, already in the cache
    num_rewound_tokens: int  # cached tokens that had to go because a conversation no longer begins with them
    num_pruned_tokens: int  # prompt tokens of this turn that went through the pruned graph
    num_new_tokens: int
    time_to_first_token_ms: float | None  # None before the first token
    tokens_per_second: float | None  # decode alone, after the first token; None before the second
    settings: dict[str, Any]


class Generation(Iterator[Token]):
    """An iterator over the tokens of one answer; work starts with the first `next`.

    The end token is not among the tokens. `stop_reason` says why the answer ended: "end" (an end token), "stop" (a stop
    string, named by `stop_string`), "length" (`max_new_tokens` or the capacity) or "cancelled".

    A generation may be left at any time: `close()` from the thread that iterates, `cancel()` from any. The sequence
    then holds what it held before if the prompt was still being read, else the tokens that were handed out. Tokens that
    reach into a stop string leave the sequence.
    """

    def __init__(
        self, sequence: Sequence, request: Request, tokenizer: Tokenizer | None,
        num_rewound: int = 0, on_end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.request = request
        self.sequence = sequence
        self.tokens: list[Token] = []  # handed out
        self.prompt_logprobs: list[float | None] | None = None  # nats, None for the first; None unless asked for
        seen = [*sequence.token_ids, *request.prompt_token_ids]
        self._has_text = tokenizer is not None
        self._answer = Answer(request, tokenizer, sequence.vocab_size, seen)
        self._stop_reason: StopReason | None = None
        self._cancellation = Cancellation()
        self._on_end = on_end
        self._num_past, self._num_pruned, self._num_rewound = len(sequence), 0, num_rewound
        self._settled = deque[Token]()  # to be handed out
        self._has_begun = self._has_ended = False
        self._first_s: float | None = None
        self._rest_s, self._num_timed = 0.0, 0

    def __next__(self) -> Token:  # no generator: one that refers to self would keep the cache until a collection
        try:
            while not self._settled and self.stop_reason is None:
                self._advance()
            self._cancellation.check()
        except Cancelled:
            self._end()
        except BaseException:  # an interrupt from the keyboard too
            self._end()
            raise
        if not self._settled:
            self._end()
            raise StopIteration
        token = self._settled.popleft()
        self.tokens.append(token)
        if not self._settled and self.stop_reason is not None:
            self._end()
        return token

    @property
    def text(self) -> str:
        """The text of the tokens handed out."""
        return "".join(token.text for token in self.tokens)

    @property
    def has_read_prompt(self) -> bool:
        """Whether the prompt is in the sequence."""
        return self._has_begun

    @property
    def token_ids(self) -> list[int]:
        """The ids of the answer so far; some may still be held back until their text is settled."""
        return self._answer.token_ids

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the answer ended; None while it has not."""
        return self._stop_reason or self._answer.stop_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer; None if none did."""
        return self._answer.stop_string if self.stop_reason == "stop" else None

    @property
    def stats(self) -> Stats:
        """Counts and times so far."""
        return Stats(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_past_tokens=self._num_past,
            num_rewound_tokens=self._num_rewound,
            num_pruned_tokens=self._num_pruned,
            num_new_tokens=len(self.token_ids),
            time_to_first_token_ms=None if self._first_s is None else self._first_s * 1e3,
            tokens_per_second=self._num_timed / self._rest_s if self._num_timed else None,
            settings=self.request.in_force(),
        )

    def cancel(self) -> None:
        """End the iteration, from any thread: a run in progress is broken off and no further token comes."""
        self._cancellation.cancel()

    def close(self) -> None:
        """End the iteration now, from the thread that iterates."""
        self._end()

    def _advance(self) -> None:
        """Choose one more token, and put those whose text it settles in line."""
        answer, sequence = self._answer, self.sequence
        self._cancellation.check()
        started = time.perf_counter()
        if self._has_begun:
            logits = sequence.step(self._cancellation)
        else:
            logits, self.prompt_logprobs = read_turn(sequence, self.request, self._cancellation)
            self._num_pruned, self._has_begun = sequence.num_pruned(self._num_past), True
        num_chosen = len(answer.token_ids)
        self._settled.extend(answer.take(logits))
        for token in answer.token_ids[num_chosen:]:  # none if it was an end token
            sequence.accept(token)
        elapsed = time.perf_counter() - started
        if self._first_s is None:
            self._first_s = elapsed
        else:
            self._rest_s += elapsed
            self._num_timed += 1

    def _end(self) -> None:
        """Once: take back what was chosen and not handed out, or reaches into a stop string, and tell the owner."""
        if self._has_ended:
            return
        self._has_ended = True
        num_kept = self._num_kept()
        if len(self.token_ids) > len(self.tokens) or self._answer.stop_reason is None:
            self._stop_reason = "cancelled"
            del self.token_ids[len(self.tokens) :]
        if self._has_begun:
            start = self._num_past + len(self.request.prompt_token_ids)
            self.sequence.rewind(min(start + num_kept, len(self.sequence)))
        self._settled.clear()
        if self._on_end is not None:
            self._on_end()

    def _num_kept(self) -> int:
        """Return how many of the tokens handed out stay in the sequence."""
        num_chosen, kept = len(self.token_ids), len(self.tokens)
        if self._has_text and kept < num_chosen:  # left: perhaps among the tokens of one character
            while kept and not self.tokens[kept - 1].text:
                kept -= 1
        return min(kept, num_chosen - self._answer.num_cut_tokens)


def read_turn(
    sequence: Sequence, request: Request, cancellation: Cancellation | None = None
) -> tuple[np.ndarray, list[float | None] | None]:
    """Feed a request's prompt and return the logits after it, [V] float32, and the prompt's log-probabilities.

    Without a prompt the answer goes on from the sequence's last token.

    Raises:
        BackendError: a session fails.
        Cancelled: by `cancellation`; the sequence is what it was.
    """
    ids = request.prompt_token_ids
    if not ids:
        return sequence.step(cancellation), [] if request.prompt_logprobs else None
    if not request.prompt_logprobs:
        chunk, windows = request.prefill_chunk_tokens, request.windows
        return sequence.append(ids, request.prefill, windows, chunk, cancellation), None
    start = len(sequence)
    try:
        logits, scores = sequence.append(ids[:1], "full", cancellation=cancellation), list[float | None]([None])
        for token in ids[1:]:  # one at a time: the decode graph gives the last position's logits only
            scores.append(float(log_probabilities(logits)[token]))
            logits = sequence.append([token], "full", cancellation=cancellation)
    except BaseException:
        sequence.rewind(start)
        raise
    return logits, scores
