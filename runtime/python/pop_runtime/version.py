"""The version that is installed, for `--version`."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the command with its version and ends it."""
    try:
        installed = version("pop-export")
    except PackageNotFoundError:  # run from a source tree
        installed = "(not installed)"
    parser.add_argument("--version", action="version", version=f"%(prog)s {installed}", help="print the version")
