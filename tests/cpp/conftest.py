"""The C++ program under test: `build/cpp/pop_run`, or what the variable POP_RUN names; `make cpp` builds it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = Path(os.environ.get("POP_RUN", REPOSITORY / "build" / "cpp" / "pop_run"))


@dataclass(frozen=True)
class Finished:
    """What a run of the program left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return dict(json.loads(self.out))


PopRun = Callable[..., Finished]


@pytest.fixture(scope="session")
def pop_run() -> PopRun:
    """Return a function that runs `pop_run` with the given arguments, on one thread."""
    if not PROGRAM.is_file():
        pytest.fail(f"{PROGRAM}: expected the C++ program, found none; run make cpp")

    def run(*arguments: object) -> Finished:
        command = [str(PROGRAM), *map(str, arguments), "--threads", "1"]
        done = subprocess.run(command, capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
        return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())  # as it is: no line end changed

    return run


def ids_text(ids: Sequence[int]) -> str:
    """Return ids as `--ids` takes them."""
    return ",".join(map(str, ids))
