"""Checks of numbers that callers give, and how messages show what was found."""

from __future__ import annotations

from numbers import Integral

from pop_runtime.errors import UsageError


def is_within(value: object, least: int, most: int) -> bool:
    """Return whether a value is a whole number, not a truth value, from `least` to `most`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def check_least(name: str, value: object, least: int, why: str = "") -> None:
    """Raise UsageError unless a value is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(f"{name}: expected a whole number, found {value!r}; change it or leave it out")
    if int(value) < least:
        raise UsageError(f"{name}: expected at least {least}{why}, found {value}; raise it")


def shown(value: object) -> str:
    """Return a value for a message: one line, at most 80 characters."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 80 else text[:77] + "..."
