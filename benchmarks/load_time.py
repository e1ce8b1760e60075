"""Time from loading a bundle to its first token, against opening its decode graph as one session.

    python benchmarks/load_time.py out/smollm2 --rounds 5 --threads 2

Every measurement is a process of its own, imports not counted. The ways take turns; the first round, after which the
files are in the cache, does not count. Wall time and CPU time of all threads, in milliseconds; ratios are those of one
round, their median is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

WAYS = {
    "session": "the decode graph as one session",
    "bundle": "the bundle, to its first token",
    "unverified": "the same without the files' sha256",
}
PROMPT = "Explain in two sentences why the sky is blue."
STEPS = ("load", "request", "first token")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="end with every measurement as one JSON object")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what a process of its own measures
    arguments = parser.parse_args()
    if arguments.way is not None:
        print(json.dumps(measured(arguments.way, arguments.dir, arguments.threads)))
        return
    folder, threads = arguments.dir, arguments.threads
    rounds = [{way: in_own_process(way, folder, threads) for way in WAYS} for _ in range(arguments.rounds + 1)][1:]
    for clock in ("wall", "cpu"):
        for way, title in WAYS.items():
            times = [one[way][clock] for one in rounds]
            ratio = median(one[way][clock]["total"] / one["session"][clock]["total"] for one in rounds)
            steps = (f"{step} {median(time[step] for time in times):.0f}" for step in times[0] if step != "total")
            totals = [time["total"] for time in times]
            spread = f"{median(totals):6.0f} ms ({min(totals):.0f} - {max(totals):.0f}), {ratio:.2f} x"
            print(f"{clock:4} {title:34} {spread}  {', '.join(steps)}")
    if arguments.json:
        print(json.dumps(rounds))


def in_own_process(way: str, folder: Path, threads: int) -> dict[str, dict[str, float]]:
    """Return what a fresh process measured."""
    command = [sys.executable, __file__, str(folder), "--threads", str(threads), "--way", way]
    found: dict[str, dict[str, float]] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def measured(way: str, folder: Path, threads: int) -> dict[str, dict[str, float]]:
    """Return milliseconds by clock and step."""
    import pop_runtime
    from pop_runtime.manifest import read_manifest
    from pop_runtime.sessions import DECODE_ENTRIES, open_session

    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    mark()
    if way == "session":
        session = open_session(folder / read_manifest(folder).decode_graph, threads, DECODE_ENTRIES)
        mark()
        assert session.get_inputs()
    else:
        model: Any = pop_runtime.load(folder, threads, verify=way == "bundle")
        mark()
        prompt = [5, 6, 7, 8] if model.manifest.tokenizer is None else PROMPT
        generation = model.generate(prompt, max_new_tokens=1)
        mark()
        assert len(list(generation)) <= 1
        mark()
    return {
        clock: {
            "total": (marks[-1][index] - marks[0][index]) * 1e3,
            **{
                step: (after[index] - before[index]) * 1e3
                for step, before, after in zip(STEPS, marks, marks[1:], strict=False)
            },
        }
        for index, clock in enumerate(("wall", "cpu"))
    }


if __name__ == "__main__":
    main()
