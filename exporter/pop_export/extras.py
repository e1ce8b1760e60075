"""The base install has the commands but not all their packages: say in one line which extra brings what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pop_runtime.errors import BackendError


@contextmanager
def imports_for(what: str) -> Iterator[None]:
    """Name the extra to install where an import within the context finds no package.

    Args:
        what: the imports are for, as the user calls it: "--against".

    Raises:
        BackendError: a package of the extra `export`, or ONNX Runtime, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "pop_export", "pop_runtime"):  # our own fault
            raise
        extra = "cpu" if package == "onnxruntime" else "export"
        raise BackendError(
            f"{what}: expected the package {package}, found none; pip install 'pop-export[{extra}]'"
        ) from error
