"""Write a folder whole or not at all: into a hidden sibling first, which takes its name only when it is finished.

A run holds a lock on its sibling. The system drops it with the process, however that ends and in whatever container it
ran, so that the next run knows which siblings are left-overs.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pop_runtime.errors import ModelError

try:
    import fcntl
except ImportError:  # Windows: what a killed run left stays
    fcntl = None  # type: ignore[assignment]

_RUN = secrets.token_hex(4)
FULL_BYTES = 1 << 20  # a disk with less room is taken for full


@contextmanager
def staged_folder(target: Path, what: str) -> Iterator[Path]:
    """Yield an empty folder to fill; it takes the name `target` if the block ends well, and else is removed.

    Where `target` is a link, what it points to is replaced.

    Args:
        target: the folder to make or to replace.
        what: it holds, for messages: "bundle".

    Raises:
        ModelError: the disk is full or cannot be written.
    """
    try:
        with scratch_folder(target) as staging:
            yield staging
            _replace(_real(target), staging)
    except OSError as error:
        reason = "the disk is full" if _is_full(error, target) else error.strerror or str(error)
        raise ModelError(
            f"{error.filename or target}: cannot write the {what}: {reason}; nothing was changed"
        ) from error


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Yield an empty sibling of `target`, which is removed at the end unless it was renamed.

    It lies in the file system of `target`, whose links are followed, so that it can take its name. What an earlier run
    left behind when it was killed is removed first, and in the end every parent that was made and stayed empty.

    Raises:
        OSError: it cannot be made.
    """
    target = _real(target)
    made = [folder for folder in target.parents if not folder.exists()]
    staging = _sibling(target, "new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        held = _make_and_lock(staging)
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if held is not None:
                os.close(held)
    finally:
        for folder in made:
            with suppress(OSError):  # not empty, or never made
                folder.rmdir()


def existing_parent(target: Path) -> Path:
    """Return the nearest folder around `target`, links followed, that is there: its disk is the one written to."""
    return next(folder for folder in _real(target).parents if folder.is_dir())


def _real(target: Path) -> Path:
    """Return the path with links followed, a loop of them as far as it goes."""
    return Path(os.path.realpath(target))


def _is_full(error: OSError, target: Path) -> bool:
    """Return whether a full disk is the cause; numpy's writes fail without a code."""
    if error.errno is None:
        return shutil.disk_usage(existing_parent(target)).free < FULL_BYTES
    return error.errno == errno.ENOSPC


def _sibling(target: Path, what: str) -> Path:
    """Return the hidden name of a folder of this run; all are of one length, so that if one fits the others do."""
    return target.parent / f".{target.name}.partial-{what}-{_RUN}"


def _make_and_lock(folder: Path) -> int | None:
    """Make a folder and return the descriptor that holds its lock, under whatever name it then has; None on Windows."""
    while True:
        folder.mkdir()
        if fcntl is None:
            return None
        held = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: nobody takes the folder for a left-over there
            fcntl.flock(held, fcntl.LOCK_EX)
        if folder.exists():
            return held
        os.close(held)  # another run took it for a left-over before the lock was on it


def _remove_leftovers(target: Path) -> None:
    """Remove what earlier runs left when they were killed: the siblings that nobody holds."""
    if fcntl is None:
        return
    for folder in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        with suppress(OSError):  # held, or gone
            held = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _replace(target: Path, staging: Path) -> None:
    """Put `staging` in the place of `target`, whose old content is deleted only then."""
    if not target.exists():
        staging.rename(target)
        return
    old = _sibling(target, "old")
    target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)  # the new one has its name: what stays is removed by the next run
