"""Print the memory and the time of one session and of the pair, for the ways in which sessions can hold weights.

    python benchmarks/session_memory.py BUNDLE [--threads 1]

Each case runs in a process of its own. Memory is Pss after a prefill of 128 tokens and a step, so that pages of the
weights file which several sessions map count once. A turn has the bundle's windows. Times are CPU times of the process,
minima over rounds: on a busy machine they repeat where wall times do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pop_runtime import sessions
from pop_runtime.kv_cache import KvCache, allocate_cache
from pop_runtime.manifest import Manifest, read_manifest
from pop_runtime.memory import proportional_bytes
from pop_runtime.sequence import Sequence

ROUNDS = 3
PREFILL_TOKENS = 512
TURN_TOKENS = (128, 1024)


def decode_alone(folder: Path, manifest: Manifest, threads: int) -> sessions.SessionPair:
    """Return the decode graph as both graphs of a pair."""
    alone = sessions.open_session(folder / manifest.decode_graph, threads, sessions.DECODE_ENTRIES)
    return sessions.SessionPair(alone, alone, threads)


def low_memory(folder: Path, manifest: Manifest, threads: int) -> sessions.SessionPair:
    """Return two whole graphs that leave weights in the file where they can."""
    return sessions.open_graphs(folder, manifest, threads, low_memory=True)


CASES: dict[str, Callable[[Path, Manifest, int], sessions.SessionPair]] = {
    "decode graph alone": decode_alone,
    "two graphs": sessions.open_graphs,
    "two graphs, low memory": low_memory,
    "segments": sessions.open_segments,
}


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
    names = ["load", "prefill", "full", "step", *(f"turn_{count}" for count in TURN_TOKENS)]
    titles = ["load", "prefill", "full prefill", "step", *(f"turn of {count}" for count in TURN_TOKENS)]
    print("| sessions | MB | over one | " + " | ".join(f"{title} ms" for title in titles) + " |")
    print("|---" * (3 + len(titles)) + "|")
    one = None
    for case in CASES:
        command = [sys.executable, __file__, str(arguments.bundle), "--threads", str(arguments.threads), "--case", case]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        one = one or found["mb"]
        numbers = (found["mb"], found["mb"] / one, *(found[name] for name in names))
        print(f"| {case} | " + " | ".join(f"{number:.4g}" for number in numbers) + " |", flush=True)


def measure(folder: Path, case: str, threads: int) -> dict[str, float]:
    """Return memory in MB and CPU times in ms of one case."""
    manifest, before, started = read_manifest(folder), proportional_bytes(), time.process_time()
    pair = CASES[case](folder, manifest, threads)
    load_ms = (time.process_time() - started) * 1e3
    cache = allocate_cache(manifest, 1, PREFILL_TOKENS + 32)
    for stage in ("decode", "prefill"):
        sequence = Sequence(pair, cache)
        sequence.feed([5] * 128, stage)
        sequence.feed([5], "decode")
    found = {"mb": (proportional_bytes() - before) / 1e6, "load": load_ms}
    ids = [5] * PREFILL_TOKENS
    found["prefill"] = min(_cpu_ms(lambda: Sequence(pair, cache).feed(ids, "prefill")) for _ in range(ROUNDS))
    found["full"] = min(_cpu_ms(lambda: Sequence(pair, cache).feed(ids, "decode")) for _ in range(ROUNDS))
    sequence = Sequence(pair, cache)
    sequence.feed(ids, "prefill")
    found["step"] = min(_cpu_ms(lambda: sequence.feed([5], "decode")) for _ in range(16))
    longer = allocate_cache(manifest, 1, max(TURN_TOKENS))
    for count in TURN_TOKENS:
        turn = partial(_read_turn, pair, longer, count)
        found[f"turn_{count}"] = min(_cpu_ms(turn) for _ in range(ROUNDS))
    return found


def _read_turn(pair: sessions.SessionPair, cache: KvCache, num_tokens: int) -> None:
    Sequence(pair, cache).append([5] * num_tokens)


def _cpu_ms(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return (time.process_time() - started) * 1e3


if __name__ == "__main__":
    main()
