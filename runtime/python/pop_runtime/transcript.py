"""The text behind a conversation's cache, and what a longer rendering of the conversation adds to it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from pop_runtime.text import Token, check_text


@dataclass(frozen=True)
class Turn:
    """What has to be read so that the cache holds a rendering."""

    rendering: str
    keep: int  # so many tokens of the cache stay
    ids: list[int]  # to be read after them; none if the cache holds the rendering and perhaps more
    ends: list[int]  # of each id, as in `Transcript.ends`


class Transcript:
    """The text of the tokens in a cache, token by token.

    `ends[i]` is the number of characters after which token i and those before it are complete. Tokens that share a
    character, and tokens without text before one with text, share an end: there is no border between them.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ends: list[int] = []

    def plan(self, rendering: str, tokenizer: Tokenizer) -> Turn:
        """Return the turn that takes the cache to `rendering`, which keeps as many tokens as it can.

        Where the rendering goes on from the cached text, all stay: the turn's ids are those the tokenizer gives the
        whole rendering from there on, or, if one of its tokens lies across that place, those of the rest alone.
        Where it differs, the tokens up to the last common border stay.

        Raises:
            UsageError: as `check_text`.
        """
        check_text(rendering, "prompt")
        common = _num_common(self.text, rendering)
        if common == len(rendering):  # the cache holds all of it
            return Turn(rendering, len(self.ends), [], [])
        encoding = tokenizer.encode(rendering, add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoding.offsets
        starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]

        def token_after(place: int) -> int | None:
            """Return the index of the rendering's first token after `place`, unless one lies across it."""
            index = bisect_left(starts, place)
            return index if index == 0 or stops[index - 1] <= place else None

        keep = bisect_right(self.ends, common)
        first = token_after(self._end(keep))
        if first is None and common == len(self.text):
            rest = tokenizer.encode(rendering[common:], add_special_tokens=False)
            return Turn(rendering, keep, rest.ids, [common + stop for _, stop in rest.offsets])
        while first is None:  # ends at 0 at the latest
            keep = self.border(keep - 1)
            first = token_after(self._end(keep))
        return Turn(rendering, keep, encoding.ids[first:], stops[first:])

    def read(self, turn: Turn) -> None:
        """Take in a turn that is in the cache now."""
        if turn.ids:
            self.truncate(turn.keep)
            self.ends += turn.ends
            self.text = turn.rendering

    def extend(self, tokens: Iterable[Token]) -> None:
        """Take in an answer's tokens."""
        ends: list[int | None] = []
        for token in tokens:
            self.text += token.text
            ends.append(len(self.text) if token.text else None)
        settled, end = list[int](), len(self.text)
        for own in reversed(ends):  # without text: the end of the next one with text
            end = end if own is None else own
            settled.append(end)
        self.ends += reversed(settled)

    def border(self, length: int) -> int:
        """Return the largest number of tokens, at most `length`, after which no character is unfinished."""
        if length in (0, len(self.ends)) or self.ends[length] > self.ends[length - 1]:
            return length
        return bisect_left(self.ends, self.ends[length])

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.text = self.text[: self._end(length)]
        del self.ends[length:]

    def _end(self, length: int) -> int:
        """Return how many characters the first `length` tokens have."""
        return self.ends[length - 1] if length else 0


def _num_common(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    if second.startswith(first):
        return len(first)
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second))
