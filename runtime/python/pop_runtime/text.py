"""Between text and token ids: the bundle's tokenizer, and text that streams without broken characters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pop_runtime.errors import ModelError, PopError, UsageError

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what an unfinished UTF-8 character decodes to


@dataclass(frozen=True)
class Token:
    """One generated token and the text it adds, which is empty for special tokens and ids unknown to the tokenizer."""

    id: int
    text: str
    logprob: float | None = None  # nats, of the model's own distribution; None unless asked for
    alternatives: tuple[tuple[int, float], ...] = ()  # the likeliest ids and their log-probabilities, highest first


def open_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, without the padding and truncation it may carry.

    Raises:
        ModelError: the file is missing or not a tokenizer.
    """
    try:  # by text, not by path: on some systems the library cannot open a path that is not ASCII
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        found = " ".join(str(error).split())
        raise ModelError(f"{path}: expected a tokenizer, found {found}; re-run pop-export") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def check_text(text: str, place: str, error: type[PopError] = UsageError) -> None:
    """Raise `error` if a text holds half a character (a lone surrogate), which no tokenizer takes.

    Bytes that are not UTF-8 give such a text on a command line, and so does an escape in JSON.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as cause:
        found = f"{text[cause.start]!a} at {cause.start}"
        raise error(f"{place}: expected UTF-8 text, found {found}; change it or leave it out") from cause


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text.

    Raises:
        UsageError: as `check_text`.
    """
    check_text(text, "prompt")
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def decode(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """Return the text of ids, special tokens and unknown ids left out; empty without a tokenizer."""
    return "" if tokenizer is None else tokenizer.decode(list(ids), skip_special_tokens=True)


class TextStream:
    """Gives tokens their text, holding them back while a character is unfinished.

    The texts joined are the text of all ids together. (With a byte-fallback tokenizer that holds as long as the
    bytes are valid UTF-8: it re-reads a whole run of bytes as broken when one is, after parts of it were shown.)
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the ids behind the last piece of text: a decoder may strip or join at the start
        self._held: list[int] = []  # ids after them
        self._tokens: list[Token] = []  # the last of `_held`, not handed out yet

    def push(self, token: Token) -> Iterator[Token]:
        """Take the next token, its text empty, and yield what is settled: all held, or none within a character."""
        self._held.append(token.id)
        self._tokens.append(token)
        before = decode(self._tokenizer, self._shown)
        piece = decode(self._tokenizer, self._shown + self._held)[len(before) :]
        if not piece.endswith(_BROKEN):
            yield from self._hand_out(piece)

    def flush(self) -> Iterator[Token]:
        """Yield what is still held, at the end of the text: an unfinished character stays a replacement character."""
        if self._tokens:
            before = decode(self._tokenizer, self._shown)
            yield from self._hand_out(decode(self._tokenizer, self._shown + self._held)[len(before) :])

    def _hand_out(self, piece: str) -> Iterator[Token]:
        """Yield the tokens not handed out yet, the text with the last of them."""
        tokens, self._tokens = self._tokens, []
        if piece:
            self._shown, self._held = self._held, []
        yield from tokens[:-1]
        yield dataclasses.replace(tokens[-1], text=piece)
