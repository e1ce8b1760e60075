"""How many threads there may be: the cores this process may run on, and the most that a caller may ask for."""

from __future__ import annotations

import os

from pop_runtime.checks import check_least
from pop_runtime.errors import UsageError

THREADS_PER_CORE = 16  # beyond any gain; two cores then start 32 a session, where 100000 end the process


def visible_cores() -> int:
    """Return how many cores this process may run on: a container or `taskset` can leave it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: object, place: str = "threads") -> None:
    """Raise UsageError unless this is a number of threads that the machine can start; None, its cores, always is.

    PyTorch and ONNX Runtime take any number and start them: a process without room for them is ended by the system.
    """
    if threads is None:
        return
    check_least(place, threads, 1)
    cores = visible_cores()
    if int(threads) > THREADS_PER_CORE * cores:  # type: ignore[call-overload]
        raise UsageError(
            f"{place}: expected at most {THREADS_PER_CORE * cores}, {THREADS_PER_CORE} for each visible core, found "
            f"{threads}; lower it or leave it out"
        )
