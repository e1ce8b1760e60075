"""Workers seen from outside: started, asked, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from pop_runtime.errors import BackendError

WORKER = "pop_runtime.bench.worker"


class Worker:
    """One engine in a process of its own, loaded and waiting; use it as a context.

    Raises:
        BackendError: the engine does not load; gives the last line that it printed.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._name = f"{spec['engine']} ({spec['path']})"
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with it
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
        )  # fmt: skip
        self.facts = self._answer()  # version, load_ms and, of a bundle, nodes_by_provider

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to a request; without one, the memory it holds.

        Raises:
            BackendError: the process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer, or the lack of one, says more
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what a dead process was asked is still to be written
                self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" not in answer:
            return answer
        self.close()
        raise BackendError(f"{self._name}: expected an engine that runs, found: {answer['error']}")

    def _last_words(self) -> str:
        """Return the last line that the process printed, and its exit status."""
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"{lines[-1] if lines else 'nothing'} (exit status {status})"
