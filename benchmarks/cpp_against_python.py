"""Print memory and time of the C++ runtime beside the Python one, on one bundle.

    make test-cpp
    python benchmarks/cpp_against_python.py BUNDLE [--build build/cpp] [--rounds 3] [--threads 1]

Both take the same measures of the same cases (session_memory.py and session_memory.cpp), in turn, each time in a new
process; the figures are minima over the rounds. Times are CPU times of the process: on a busy machine they repeat where
wall times do not. A turn has the bundle's windows; a step is one token, its logits included, after 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

BESIDE = Path(__file__).parent / "session_memory.py"
ALONE = "decode graph alone"
CASES = ("segments", "two graphs", ALONE)
COLUMNS = {
    "mb": "MB",
    "prefill": "prefill 512 ms",
    "full": "full prefill 512 ms",
    "turn_128": "turn of 128 ms",
    "turn_1024": "turn of 1024 ms",
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
    program = str(arguments.build / "tests" / "session_memory")
    commands = {}
    for case in CASES:
        commands["C++", case] = [program, bundle, case, threads]
        commands["Python", case] = [sys.executable, str(BESIDE), bundle, "--threads", threads, "--case", case]
    least: dict[tuple[str, str], dict[str, float]] = {name: {} for name in commands}
    for _ in range(arguments.rounds):
        for name, command in commands.items():
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            least[name] = {key: min(value, least[name].get(key, value)) for key, value in found.items()}
    print("| | MB / one | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for case in CASES:
        mine, theirs = least["C++", case], least["Python", case]
        for language, row in (("C++", mine), ("Python", theirs)):
            over_one = row["mb"] / least[language, ALONE]["mb"]
            print(f"| {language}, {case} | {over_one:.3f} | " + " | ".join(f"{row[key]:.4g}" for key in COLUMNS) + " |")
        print("| C++ / Python | | " + " | ".join(f"{mine[key] / theirs[key]:.3f}" for key in COLUMNS) + " |")


if __name__ == "__main__":
    main()
