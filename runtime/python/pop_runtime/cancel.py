"""Stopping work from another thread."""

from __future__ import annotations

from pop_runtime.fixed_step import NOT_RECORDED, RECORDING
from pop_runtime.sessions import onnxruntime


class Cancelled(Exception):
    """The work was cancelled; never leaves the package."""


class Cancellation:
    """A flag that any thread may set, and that a run in progress heeds between two operators of its graph."""

    def __init__(self) -> None:
        self.run_options = onnxruntime.RunOptions()
        self.run_options.add_run_config_entry(RECORDING, NOT_RECORDED)  # sizes differ from run to run

    def cancel(self) -> None:
        """Set the flag."""
        self.run_options.terminate = True

    @property
    def is_set(self) -> bool:
        """Whether the flag is set."""
        return bool(self.run_options.terminate)

    def check(self) -> None:
        """Raise Cancelled if the flag is set."""
        if self.is_set:
            raise Cancelled
