"""One row's answer: which token comes next, when it ends, and its text as it settles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from pop_runtime.request import Request
from pop_runtime.sampling import Sampler, likeliest, log_probabilities
from pop_runtime.stop_strings import StopStrings
from pop_runtime.text import TextStream, Token

StopReason = Literal["end", "stop", "length", "cancelled"]


class Answer:
    """Takes logits and gives tokens, until an end token, a stop string or the limit; docs/runtime.md has the rules.

    Args:
        request: what decides the answer.
        tokenizer: for the text; None leaves it empty.
        vocab_size: length of the logits.
        seen: ids of earlier turns and of the prompt, for the repetition penalty.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, vocab_size: int, seen: Iterable[int]) -> None:
        self.token_ids: list[int] = []  # chosen so far, the end token left out
        self.stop_reason: StopReason | None = None
        self._request = request
        self._sampler = Sampler(request.sampling, vocab_size, seen)
        self._characters, self._stops = TextStream(tokenizer), StopStrings(request.stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stops.matched

    @property
    def num_cut_tokens(self) -> int:
        """How many of the last tokens reach into the stop string."""
        return self._stops.num_cut_tokens

    def take(self, logits: np.ndarray) -> list[Token]:
        """Choose the next token from logits [V] float32 and return the tokens whose text is settled by it.

        Raises:
            BackendError: a logit is NaN or infinite.
        """
        assert self.stop_reason is None
        chosen = self._sampler.choose(logits)
        if chosen in self._request.end_token_ids:
            return self._finish("end")
        self.token_ids.append(chosen)
        settled = list(self._until_stop(self._characters.push(self._token(chosen, logits))))
        if self._stops.matched is not None:
            self.stop_reason = "stop"
        elif len(self.token_ids) == self._request.limit_tokens:
            settled += self._finish("length")
        return settled

    def _token(self, chosen: int, logits: np.ndarray) -> Token:
        """Return the token, without its text yet, with the log-probabilities that were asked for."""
        if self._request.logprobs is None:
            return Token(chosen, "")
        scores = log_probabilities(logits)
        best = likeliest(scores, self._request.logprobs)
        return Token(chosen, "", float(scores[chosen]), tuple((token, float(scores[token])) for token in best))

    def _finish(self, reason: StopReason) -> list[Token]:
        """End the answer and return what is still held; a stop string in its last text counts first."""
        settled = list(self._until_stop(self._characters.flush()))
        self.stop_reason = reason if self._stops.matched is None else "stop"
        return settled + list(self._stops.flush())

    def _until_stop(self, tokens: Iterator[Token]) -> Iterator[Token]:
        """Pass tokens through the stop strings."""
        for token in tokens:
            yield from self._stops.push(token)
