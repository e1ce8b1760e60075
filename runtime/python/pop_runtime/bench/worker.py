"""The process of one engine: loads it, then answers one JSON line for each that it is sent.

    python -m pop_runtime.bench.worker '{"engine": "bundle", "path": "out/smollm2", "threads": 2, ...}'

Its first line says what was loaded. Then `{"prompt": [...], "num_new": 8, "prefill": "pop"}` is answered with times,
and an empty object with memory. What a library prints goes to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pop_runtime.bench.engines import BundleEngine, Engine, timed
from pop_runtime.bench.peers import PEERS, version_of
from pop_runtime.errors import BackendError, PopError
from pop_runtime.memory import peak_bytes, proportional_bytes


def main() -> int:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        _serve(json.loads(sys.argv[1]), answers)
    except PopError as error:
        print(json.dumps({"error": str(error), "exit_code": error.exit_code}), file=answers, flush=True)
        return error.exit_code
    return 0


def _serve(spec: dict[str, Any], answers: Any) -> None:
    """Load the engine and answer requests."""
    before, started = _or_none(proportional_bytes), time.perf_counter()
    engine, facts = _load(spec)
    load_ms = (time.perf_counter() - started) * 1e3
    print(json.dumps({**facts, "load_ms": load_ms}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request:
            asked = request["prompt"], request["num_new"], request["prefill"]
            answer = dataclasses.asdict(timed(engine, *asked, spec["clock"]))
        else:
            now = _or_none(proportional_bytes)
            taken = None if before is None or now is None else now - before
            answer = {"proportional_bytes": taken, "peak_bytes": _or_none(peak_bytes)}
        print(json.dumps(answer), file=answers, flush=True)


def _or_none(measured: Callable[[], int]) -> int | None:
    """Return an amount of memory; None where the system does not say: times can be measured there too."""
    try:
        return measured()
    except BackendError:
        return None


def _load(spec: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    """Return the engine and what the report says of it."""
    path, threads = Path(spec["path"]), spec["threads"]
    if spec["engine"] == "bundle":
        import onnxruntime

        from pop_runtime.providers import Target

        names = ("low_memory", "graphs", "compiled", "sink_tokens", "boundary_tokens")
        engine = BundleEngine(path, threads, target=Target(**spec["target"]), **{name: spec[name] for name in names})
        version = f"onnxruntime {onnxruntime.__version__}"
        return engine, {"version": version, "nodes_by_provider": engine.nodes_by_provider}
    peer = PEERS[spec["engine"]]
    version = f"{peer.package} {version_of(peer.package)}"
    return peer.load(path, threads, spec["max_tokens"]), {"version": version}


if __name__ == "__main__":
    sys.exit(main())
