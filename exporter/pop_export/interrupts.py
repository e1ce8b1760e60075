"""Hold an interrupt back where an exception at any moment would do harm."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts(what: str) -> Iterator[None]:
    """Deliver SIGINT and SIGTERM when the block has ended; a second one ends the process at once.

    For calls in which C++ calls Python back and does not expect it to raise: torch aborts the process then. Outside the
    main thread, which no signal reaches, the block simply runs.

    Args:
        what: what the block does, for the line that says why nothing ends yet.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        held.append(number)
        print(f"interrupted; ends after {what}; interrupt again to end at once", file=sys.stderr, flush=True)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}  # not one that is ignored
    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
