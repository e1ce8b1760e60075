"""`pop-run --chat`: one conversation, a line for each message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pop_runtime.errors import UsageError

if TYPE_CHECKING:
    from pop_runtime.conversation import Conversation
    from pop_runtime.generate import Generation
    from pop_runtime.request import Options

HELP = "/undo takes the last turn back, /exit or the end of the input leaves, Ctrl-C breaks an answer off"


def chat(
    conversation: Conversation, options: Options, shows_text: bool, answered: Callable[[Generation], None]
) -> None:
    """Answer the lines of stdin until it ends.

    A line that does not fit is refused on stderr and the conversation goes on; if stdin is no terminal the refusal
    ends it, since nobody is there to read it.

    Args:
        conversation: holds the system message already, if there is one.
        options: of each answer, see `pop_runtime.Options`.
        shows_text: whether answers go to stdout as they come.
        answered: is told of each finished answer.

    Raises:
        UsageError: stdin is closed or not UTF-8, or a piped line was refused.
    """
    if sys.stdin is None:
        raise UsageError("stdin: expected lines of text for --chat, found it closed; give some, or --prompt")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"pop-run: {HELP}", file=sys.stderr)
    for line in _lines(is_terminal, "> " if shows_text and sys.stdout is not None and sys.stdout.isatty() else ""):
        try:
            if line == "/undo":
                conversation.undo()
                continue
            conversation.append(line)
            generation = conversation.generate(**options)
        except UsageError as error:
            if not is_terminal:
                raise
            print(f"pop-run: {error}", file=sys.stderr)
            continue
        if generation.stats.num_rewound_tokens:
            print(
                f"pop-run: note: the chat template changes what was said before: {generation.stats.num_rewound_tokens} "
                "cached tokens are read again",
                file=sys.stderr,
            )
        _answer(generation, shows_text, is_terminal)
        answered(generation)
        if generation.stop_reason == "cancelled" and not generation.tokens:
            conversation.undo()  # many templates refuse the next message behind one that has no answer
            print("pop-run: note: broken off before the answer began: the message is forgotten", file=sys.stderr)


def _answer(generation: Generation, shows_text: bool, is_terminal: bool) -> None:
    """Run an answer to its end; at a terminal an interrupt ends the answer alone."""
    try:
        for token in generation:
            if shows_text:
                print(token.text, end="", flush=True)
    except KeyboardInterrupt:
        generation.close()
        if not is_terminal:
            raise
    if shows_text:
        print(flush=True)


def _lines(is_terminal: bool, prompt: str) -> Iterator[str]:
    """Yield the lines of stdin that are not blank, until it ends or says /exit.

    Args:
        is_terminal: whether somebody types them.
        prompt: is shown on stdout before each of them; empty where stdout takes nothing but answers: then on stderr.
    """
    while True:
        try:
            if is_terminal and not prompt:
                print("> ", end="", file=sys.stderr, flush=True)
            line = input(prompt) if is_terminal else sys.stdin.buffer.readline().decode("utf-8")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: expected UTF-8 text, found {error.reason} at byte {error.start}") from error
        except OSError as error:
            raise UsageError(f"stdin: expected lines of text for --chat, found {error.strerror}") from error
        if not is_terminal and not line:
            return
        line = line.strip()
        if line == "/exit":
            return
        if line:
            yield line
