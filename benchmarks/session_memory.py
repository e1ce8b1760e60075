"""Print the memory and the time of one session and of the pair, for the ways in which sessions can hold weights.

    python benchmarks/session_memory.py BUNDLE [--threads 1]

Each case runs in a process of its own. Memory is Pss after a prefill of 128 tokens and a step, so that pages of the
weights file which both sessions map count once. Times are CPU times of the process, minima over rounds: on a busy
machine they repeat where wall times do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pop_runtime import sessions
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import read_manifest
from pop_runtime.sequence import Sequence

CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "both packed": ({}, {}),
    "prefill unpacked": (sessions.UNPACKED, {}),
    "both unpacked": (sessions.UNPACKED, sessions.UNPACKED),
}
ROUNDS = 3
PREFILL_TOKENS = 512


def main() -> None:
    """Measure each case in a new process, or the one that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", choices=CASES)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.bundle, arguments.case, arguments.threads)))
        return
    print("| sessions | one MB | pair MB | pair / one | prefill ms | full prefill ms | decode ms |")
    print("|---" * 7 + "|")
    for case in CASES:
        command = [sys.executable, __file__, str(arguments.bundle), "--threads", str(arguments.threads), "--case", case]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        numbers = (found[key] for key in ("one", "pair", "ratio", "prefill", "full", "decode"))
        print(f"| {case} | " + " | ".join(f"{number:.4g}" for number in numbers) + " |", flush=True)


def measure(folder: Path, case: str, threads: int) -> dict[str, float]:
    """Return memory in MB and CPU times in ms of one case."""
    manifest = read_manifest(folder)
    prefill, decode = CASES[case]
    before = _pss_mb()
    full = sessions.open_session(folder / manifest.decode_graph, threads, {**sessions.DECODE_ENTRIES, **decode})
    alone = sessions.SessionPair(full, full, threads)
    cache = allocate_cache(manifest, 1, PREFILL_TOKENS + 32)
    _use(Sequence(alone, cache), "decode")
    one = _pss_mb() - before
    pruned = sessions.open_session(folder / manifest.prefill_graph, threads, {**sessions.PREFILL_ENTRIES, **prefill})
    pair = sessions.SessionPair(pruned, full, threads)
    _use(Sequence(pair, cache), "prefill")
    both = _pss_mb() - before
    ids = [5] * PREFILL_TOKENS
    times = {"full": lambda: Sequence(alone, cache).feed(ids, "decode"),
             "prefill": lambda: Sequence(pair, cache).feed(ids, "prefill")}  # fmt: skip
    found = {name: min(_cpu_ms(action) for _ in range(ROUNDS)) for name, action in times.items()}
    sequence = Sequence(pair, cache)
    sequence.feed(ids, "prefill")
    found["decode"] = min(_cpu_ms(lambda: sequence.feed([5], "decode")) for _ in range(16))
    return {"one": one, "pair": both, "ratio": both / one, **found}


def _use(sequence: Sequence, stage: str) -> None:
    sequence.feed([5] * 128, "prefill" if stage == "prefill" else "decode")
    sequence.feed([5], "decode")


def _cpu_ms(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return (time.process_time() - started) * 1e3


def _pss_mb() -> float:
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
