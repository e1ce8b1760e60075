"""Print memory and time of the C++ runtime beside the Python one, on one bundle.

    make test-cpp
    python benchmarks/cpp_against_python.py BUNDLE [--build build/cpp] [--rounds 3] [--threads 1]

Both take the same measures (session_memory.py and session_memory.cpp), in turn, each time in a new process; the figures
are minima over the rounds. Times are CPU times of the process: on a busy machine they repeat where wall times do not.
A step is one token through the decode graph, its logits included, after 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

BESIDE = Path(__file__).parent / "session_memory.py"
COLUMNS = {
    "mb": "both graphs MB",
    "prefill": "prefill 512 ms",
    "full": "full prefill 512 ms",
    "step": "decode ms/token",
}


def main() -> None:
    """Measure in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--build", type=Path, default=Path("build/cpp"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    bundle, threads = str(arguments.bundle), str(arguments.threads)
    python = [sys.executable, str(BESIDE), bundle, "--threads", threads, "--case"]
    commands = {
        "C++": [str(arguments.build / "tests" / "session_memory"), bundle, threads],
        "Python, two graphs": [*python, "two graphs"],
    }
    least: dict[str, dict[str, float]] = {name: {} for name in commands}
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            least[name] = {key: min(value, least[name].get(key, value)) for key, value in found.items()}
    mine, theirs = least.values()
    print("| | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name, row in least.items():
        print(f"| {name} | " + " | ".join(f"{row[key]:.4g}" for key in COLUMNS) + " |")
    print("| C++ / Python | " + " | ".join(f"{mine[key] / theirs[key]:.3f}" for key in COLUMNS) + " |")
    print(f"\nC++, both graphs / decode graph alone: {mine['mb']:.0f} / {mine['one_mb']:.0f} MB", end=" ")
    print(f"= {mine['mb'] / mine['one_mb']:.3f}")


if __name__ == "__main__":
    main()
