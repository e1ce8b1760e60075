"""Print speed and memory of the C++ runtime beside the Python one, on one bundle.

    make test-cpp
    python benchmarks/cpp_against_python.py BUNDLE [--build build/cpp] [--rounds 5] [--threads N]

Speed: both read the same prompt and write the same number of tokens, in turn, each time in a new process; the figures
are medians and minima over the rounds, and both have to give the same tokens. Memory: as in session_memory.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = ",".join(str(5 + token % 200) for token in range(256))
NEW_TOKENS = 64


def main() -> None:
    """Measure in turn and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--build", type=Path, default=Path("build/cpp"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    flags = ["--ids", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "--json", "--no-verify"]
    flags += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    commands = {
        "C++": [str(arguments.build / "pop_run"), str(arguments.bundle), *flags],
        "Python": [sys.executable, "-m", "pop_runtime", str(arguments.bundle), *flags],
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            runs[name].append(_json_of(command))
    if len({str(run["new_token_ids"]) for both in runs.values() for run in both}) != 1:
        sys.exit("cpp_against_python.py: expected the same tokens of both, found others")
    print(f"prompt of 256 tokens, {NEW_TOKENS} new ones, {arguments.rounds} rounds, median (minimum)\n")
    print("| | first token ms | decode ms/token |\n|---|---|---|")
    rows = {name: _times(both) for name, both in runs.items()}
    for name, (first, step) in rows.items():
        print(f"| {name} | {_shown(first)} | {_shown(step)} |")
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(*rows.values(), strict=True)]
    print(f"| C++ / Python | {ratios[0]:.3f} | {ratios[1]:.3f} |\n")
    print("| weights | one graph MB | both MB | both / one |\n|---|---|---|---|")
    for how in ("packed", "unpacked"):
        memory = _json_of([str(arguments.build / "tests" / "session_memory"), str(arguments.bundle), how])
        one, pair = memory["one_mb"], memory["pair_mb"]
        print(f"| {how} | {one:.0f} | {pair:.0f} | {pair / one:.3f} |")


def _json_of(command: list[str]) -> dict[str, Any]:
    """Run a command and return the JSON object it prints."""
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def _times(runs: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Return time to first token and time per token, each in ms."""
    return [run["time_to_first_token_ms"] for run in runs], [1e3 / run["tokens_per_second"] for run in runs]


def _shown(times: list[float]) -> str:
    """Return median and minimum."""
    return f"{statistics.median(times):.1f} ({min(times):.1f})"


if __name__ == "__main__":
    main()
