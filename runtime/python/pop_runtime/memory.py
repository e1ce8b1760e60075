"""Memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

from pop_runtime.errors import BackendError


def proportional_bytes() -> int:
    """Return the proportional set size (Pss): a page that several processes map counts as its share.

    Raises:
        BackendError: the system does not say.
    """
    return _field("smaps_rollup", "Pss:")


def peak_bytes() -> int:
    """Return the most resident memory that this process has had (VmHWM), shared pages counted whole.

    Raises:
        BackendError: the system does not say.
    """
    return _field("status", "VmHWM:")


def memory_text(sharing: str) -> str:
    """Return a line of `--stats`: memory of this process, and what prefill and decode hold once."""
    try:
        amount = f"{proportional_bytes() / 1e6:.0f} MB"
    except BackendError:
        amount = "not known on this system"
    return f"memory               {amount}; prefill and decode hold once: {sharing}"


def _field(file: str, name: str) -> int:
    path = Path("/proc/self") / file
    try:
        rows = path.read_text(encoding="ascii").splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith(name)) * 1024
    except (OSError, StopIteration) as error:
        raise BackendError(f"{path}: expected the line {name}, found none; memory is measured on Linux only") from error
