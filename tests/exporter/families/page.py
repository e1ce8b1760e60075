"""The page docs/families.md, from the sweep's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_page(file: Path, results: list[dict[str, Any]]) -> None:
    """Write the page."""
    file.parent.mkdir(exist_ok=True)
