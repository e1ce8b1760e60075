"""How every command ends: an exit code, and one line on stderr for whatever a user can cause or cure."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from pop_runtime.errors import PopError


def run_command(name: str, work: Callable[[], None], interrupted: str | None = None) -> int:
    """Do the work of a command and return its exit code.

    Args:
        name: of the command, for messages.
        work: raises what goes wrong.
        interrupted: what to say of an interrupt; None says nothing.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    try:
        work()
        print(end="", flush=True)  # nothing happens where stdout is closed
    except PopError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if interrupted is not None:
            print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _leave_stdout()
        return 141  # as a process that SIGPIPE ended
    except OSError as error:
        if not _is_stdout_broken():
            raise
        _leave_stdout()
        print(f"{name}: error: stdout: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _is_stdout_broken() -> bool:
    """Return whether stdout takes no text: the error itself does not say which file it is about."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _leave_stdout() -> None:
    """Point stdout elsewhere, or the interpreter fails once more when it flushes it at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
