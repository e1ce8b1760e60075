"""Every test is run by some target of the Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_combination_of_marks_is_run_by_some_target():
    chosen = re.findall(r'-m "([^"]+)"', (ROOT / "Makefile").read_text())
    chosen += re.findall(r"-m '([^']+)'", (ROOT / "pyproject.toml").read_text())  # of `make test`
    assert len(chosen) > 5
    left = " and ".join(f"not ({expression})" for expression in chosen)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", left, "tests"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 5, done.stdout  # pytest found no test
