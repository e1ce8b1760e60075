"""Show how far a long stage has come, on stderr; stdout belongs to results."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items done since its last call.

    A terminal gets a bar with the time left if `rich` is installed (the base install leaves it out); anything else a
    plain line at most every `SECONDS_BETWEEN_LINES`.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _plain_lines(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def _plain_lines(label: str, total: int) -> Callable[[int], None]:
    """Return an advance function that prints a line now and then."""
    started = printed = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        now = time.monotonic()
        if done and now - printed >= SECONDS_BETWEEN_LINES:
            printed = now
            left_s = (now - started) / done * (total - done)
            print(f"{label}: {done} of {total}, about {left_s:.0f} s left", file=sys.stderr, flush=True)

    return advance
