"""Turns that keep their cache: what was read or written once is never read again."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Unpack

from pop_runtime.chat import check_messages, is_messages
from pop_runtime.errors import UsageError
from pop_runtime.generate import Generation
from pop_runtime.kv_cache import PRUNED
from pop_runtime.request import Options, check_options, check_room, make_request
from pop_runtime.sequence import check_position
from pop_runtime.transcript import Transcript, Turn

if TYPE_CHECKING:
    from pop_runtime.chat import Message
    from pop_runtime.model import Model, Prompt


@dataclass(frozen=True)
class _Mark:
    """How much there was before a turn: what `undo` goes back to."""

    num_tokens: int
    num_messages: int


class Conversation:
    """A growing sequence of turns and answers over one cache.

        conversation = model.conversation()
        conversation.append("Name a river in Africa.")
        for token in conversation.generate():
            print(token.text, end="")
        conversation.append("And how long is it?")
        ...

    It holds either messages (text for the chat template, or mappings with `role` and `content`) or plain tokens (ids
    and raw text); the first `append` decides. What is appended is read by the next `generate`, as one turn: its last
    tokens at full depth, and of the cache only what the template's rendering of the longer conversation contradicts is
    given up (docs/runtime.md has the rule). An answer becomes the conversation's `assistant` message however it ends.

    One thread at a time may use a conversation; `cancel` may come from any.
    """

    def __init__(self, model: Model, capacity: int | None = None) -> None:
        self._model, self._capacity = model, capacity
        self._sequence = model.sequence(1 if capacity is None else capacity)
        self._messages: list[Message] = []
        self._stops: list[int] = []  # tokens after which each message is in the cache whole; the others are to be read
        self._plain: list[int] | None = None  # plain tokens to be read; None: holds messages, or nothing yet
        self._transcript = Transcript()
        self._turn: Turn | None = None  # planned for the messages there are
        self._marks: list[_Mark] = []
        self._generation: Generation | None = None

    def __len__(self) -> int:
        return len(self._sequence)

    @property
    def token_ids(self) -> list[int]:
        """The tokens read and written so far."""
        return list(self._sequence.token_ids)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, those still to be read included."""
        return tuple(self._messages)

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self._model.manifest.max_positions if self._capacity is None else self._capacity

    @property
    def provenance(self) -> tuple[Literal["pruned", "full"], ...]:
        """For each position in the cache, which graph wrote it; the last token of an answer is not in it yet."""
        return tuple("pruned" if depth == PRUNED else "full" for depth in self._sequence.depth)

    def append(self, prompt: Prompt, raw: bool = False) -> None:
        """Add to what the next `generate` reads.

        Args:
            prompt: text, one message, several messages, or token ids.
            raw: takes text as it is, without the chat template.

        Raises:
            UsageError: nothing to read, messages and plain tokens in one conversation, messages that the template
                refuses, or more tokens than fit; the conversation is what it was before.
        """
        self._leave_generation()
        content: str | Items[Message] | Items[int] = [prompt] if isinstance(prompt, Mapping) else prompt
        if isinstance(content, str) and not raw and self._model.chat_template is not None:
            content = [{"role": "user", "content": content}]
        if is_messages(content) and not raw:
            self._append_messages(content)  # type: ignore[arg-type]
        else:
            self._append_plain(content, raw)

    def generate(self, **options: Unpack[Options]) -> Generation:
        """Return an iterator over the next answer's tokens; refusals come now, work starts with the first `next`.

        With nothing appended plain tokens go on from the last one, while among messages the template opens another
        answer (after `rewind` into one, that one goes on). An earlier iterator that was left is closed.

        Args:
            options: see `pop_runtime.Options`, except `raw`.

        Raises:
            UsageError: an option out of range, nothing to go on from, or no room left.
        """
        check_options(options)
        if "raw" in options:
            raise TypeError("generate() of a conversation takes no 'raw'; give it to append()")
        self._leave_generation()
        turn, sequence = self._planned(), self._sequence
        if not turn.ids and not len(sequence):
            raise UsageError("conversation: expected something to answer, found nothing; append a message or ids")
        request = make_request(self._model.defaults, options, turn.ids, turn.keep, self._capacity)
        num_rewound = len(sequence) - turn.keep
        self._forget(turn.keep)
        if self._capacity is None:
            sequence.reserve(turn.keep + len(turn.ids) + request.limit_tokens)
        self._turn = turn
        self._generation = Generation(sequence, request, self._model.tokenizer, num_rewound, self._take_in)
        return self._generation

    def cancel(self) -> None:
        """End the answer in progress, from any thread; without one nothing happens."""
        generation = self._generation
        if generation is not None:
            generation.cancel()

    def rewind(self, position: int) -> int:
        """Forget everything from `position` on and what was appended but not read; return the new length.

        A message stays if it ends, with what the template writes after it, at or before `position`. `generate` goes
        on from there, also within an answer. Among messages the length may be smaller, by the tokens of a character
        that `position` would split.

        Raises:
            UsageError: `position` is not within 0 and the length.
        """
        self._leave_generation()
        check_position(position, len(self))
        length = position if self._plain is not None else self._transcript.border(position)
        self._forget(length)
        self._stops = [stop for stop in self._stops if stop <= length]
        self._drop_pending()
        self._marks = [mark for mark in self._marks if mark.num_tokens < length]
        return length

    def undo(self) -> None:
        """Forget what was appended but not read or, if there is no such thing, the last turn and its answer.

        The system messages that open a conversation are no turn: they stay.

        Raises:
            UsageError: there is no turn.
        """
        self._leave_generation()
        num_opening = self._num_opening()
        if not self._plain and len(self._messages) <= max(len(self._stops), num_opening):  # nothing is pending
            if not self._marks:
                raise UsageError("undo: expected at least one turn, found none")
            mark = self._marks[-1]
            length = min(mark.num_tokens, len(self))  # a template that rewinds takes tokens of earlier turns too
            self._forget(length)
            self._stops = [min(stop, length) for stop in self._stops[: mark.num_messages]]
            self._marks.pop()
        self._drop_pending(num_opening)

    def _append_messages(self, messages: Items[Message]) -> None:
        """Add messages, if the template takes them and they fit."""
        if self._plain is not None:
            raise UsageError("conversation: expected ids or raw text as before, found messages; start another one")
        if self._model.tokenizer is None:
            raise UsageError("conversation: expected a tokenizer for messages, found none; append ids")
        check_messages(messages)
        longer = [*self._messages, *(dict(message) for message in messages)]
        turn = None
        if any(message["role"] != "system" for message in longer):  # some templates refuse a system message alone
            turn = self._transcript.plan(self._model.render_prompt(longer), self._model.tokenizer)
            check_room(turn.keep + len(turn.ids), self.capacity)
        self._messages, self._turn = longer, turn

    def _append_plain(self, prompt: Prompt, raw: bool) -> None:
        """Add ids or raw text, if they fit."""
        if self._messages:
            raise UsageError("conversation: expected messages as before, found ids or raw text; start another one")
        pending = self._plain or []
        ids = self._model.encode_prompt(prompt, raw, is_first_turn=len(self) + len(pending) == 0)
        check_room(len(self) + len(pending) + len(ids), self.capacity)
        self._plain = [*pending, *ids]

    def _planned(self) -> Turn:
        """Return what the next answer has to read."""
        if self._messages:
            tokenizer = self._model.tokenizer
            assert tokenizer is not None
            return self._turn or self._transcript.plan(self._model.render_prompt(self._messages), tokenizer)
        return Turn("", len(self), self._plain or [], [])

    def _take_in(self) -> None:
        """Take in the answer that has ended, if its prompt was read."""
        generation, turn = self._generation, self._turn
        self._generation = self._turn = None
        assert generation is not None and turn is not None
        if not generation.has_read_prompt:
            return  # what was appended is still to be read
        if turn.ids:
            self._marks.append(_Mark(turn.keep, len(self._stops)))
        if self._plain is not None:
            self._plain = []
            return
        transcript, num_read = self._transcript, turn.keep + len(turn.ids)
        transcript.read(turn)
        self._stops = [stop if stop <= turn.keep else num_read for stop in self._stops]
        self._stops += [num_read] * (len(self._messages) - len(self._stops))
        content = transcript.text[len(turn.rendering) :] + generation.text
        transcript.extend(generation.tokens[: len(self) - num_read])
        if generation.tokens or generation.stop_reason != "cancelled":
            self._messages.append({"role": "assistant", "content": content})
            self._stops.append(len(self))

    def _leave_generation(self) -> None:
        """Close the answer in progress, if its iterator was left."""
        if self._generation is not None:
            self._generation.close()

    def _forget(self, length: int) -> None:
        """Forget the tokens from `length` on, nothing else."""
        self._sequence.rewind(length)
        if self._plain is None:
            self._transcript.truncate(length)

    def _num_opening(self) -> int:
        """Return how many system messages open the conversation."""
        return next(
            (at for at, message in enumerate(self._messages) if message["role"] != "system"), len(self._messages)
        )

    def _drop_pending(self, num_spared: int = 0) -> None:
        """Forget the tokens that are not in the cache, and the messages but for the first `num_spared`."""
        del self._messages[max(len(self._stops), num_spared) :]
        self._turn = None
        if self._plain is not None:
            self._plain = [] if len(self) else None
