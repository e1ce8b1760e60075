"""Keep other libraries' progress bars and warnings off stderr, so that our own lines can be read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers print errors only, and no progress bar, while the context is open."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return an exception's text as one line of at most 300 characters: its first line that is not empty."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:300]


def deepest_line(error: BaseException) -> str:
    """Return type and first line of the exception that a chain of exceptions began with."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"
