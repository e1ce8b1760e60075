"""Stop strings: end a text where one of them begins, wherever the borders of its tokens lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pop_runtime.errors import ModelError, PopError
from pop_runtime.text import Token, check_text


def stored_strings(generation_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop strings of generation_config.json, none if it names none.

    Raises:
        ModelError: they are no text, or empty.
    """
    stored = generation_config.get("stop_strings")
    return () if stored is None else checked_strings(stored, "generation_config.json, stop_strings", ModelError)


def checked_strings(value: object, place: str, error: type[PopError]) -> tuple[str, ...]:
    """Return one string or several as a tuple, or raise `error` for what ends no text."""
    strings: list[Any] = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else [value]
    if not all(isinstance(string, str) and string for string in strings):
        raise error(f"{place}: expected text that is not empty, found {value!r}; change it or leave it out")
    for string in strings:
        check_text(string, place, error)
    return tuple(strings)


class StopStrings:
    """Lets tokens through until a stop string is complete, and holds back those whose text may begin one.

    Tokens that a match reaches into are handed out too, their text cut where the stop string begins: every token comes
    exactly once, and the texts joined end there.

    Args:
        strings: none of them empty. The earliest match counts, the first in the list if two begin at one place.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held: list[Token] = []
        self.matched: str | None = None  # the stop string that was found
        self.num_cut_tokens = 0  # the last so many tokens reach into it or follow it

    def push(self, token: Token) -> Iterator[Token]:
        """Take the next token with its text and yield what is settled; after a match nothing more may be pushed."""
        assert self.matched is None
        self._held.append(token)
        text = "".join(held.text for held in self._held)
        found = [(text.find(string), index) for index, string in enumerate(self._strings) if string in text]
        if found:
            start, index = min(found)
            self.matched = self._strings[index]
            yield from self._cut(start)
        else:
            yield from self._release(len(text) - self._open_end(text))

    def flush(self) -> Iterator[Token]:
        """Yield what is still held, at the end of the text."""
        held, self._held = self._held, []
        yield from held

    def _open_end(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        starts = (string[:length] for string in self._strings for length in range(1, len(string)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)

    def _release(self, settled: int) -> Iterator[Token]:
        """Yield the held tokens whose text ends within the first `settled` characters."""
        while self._held and len(self._held[0].text) <= settled:
            token = self._held.pop(0)
            settled -= len(token.text)
            yield token

    def _cut(self, start: int) -> Iterator[Token]:
        """Yield all held tokens, the text from `start` on left out."""
        for token in self.flush():
            self.num_cut_tokens += len(token.text) > start or self.num_cut_tokens > 0
            yield dataclasses.replace(token, text=token.text[:start])
            start = max(start - len(token.text), 0)
