"""The errors a user can meet, each with the exit code its command ends with.

A message is one line that names the place, what was expected, what was found and the next step.
"""


class PopError(Exception):
    """Base of every error that a user can cause or cure; commands print its one line and exit with `exit_code`."""

    exit_code = 1


class UsageError(PopError):
    """A flag, an argument or a combination of them is wrong (exit 2)."""

    exit_code = 2


class ModelError(PopError):
    """A checkpoint or a bundle is missing, damaged or of a kind that is not supported (exit 3)."""

    exit_code = 3


class BackendError(PopError):
    """An execution provider or device is missing or failed (exit 4)."""

    exit_code = 4


class GateError(PopError):
    """A parity or quality gate was not met (exit 5)."""

    exit_code = 5
