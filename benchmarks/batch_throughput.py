"""Print how much faster a batch of prompts of mixed length is than one after another, and whether the tokens agree.

    python benchmarks/batch_throughput.py BUNDLE [--rows 8] [--new 64] [--threads 2]

Prompts are random ids of lengths from 16 to 16 x rows; every answer has `--new` tokens (end tokens are ignored). Both
ways run in turn, the minimum of the rounds is shown. The bar: at least twice the throughput for 8 rows on SmolLM2.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import pop_runtime


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = pop_runtime.load(arguments.bundle, arguments.threads)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, model.manifest.vocab_size, 16 * (row + 1)).tolist() for row in range(arguments.rows)]
    times: dict[str, list[float]] = {"one by one": [], "batch": []}
    cpu: dict[str, list[float]] = {"one by one": [], "batch": []}
    for _ in range(arguments.rounds):
        tokens = {}
        for name, run in (("one by one", _one_by_one), ("batch", _batch)):
            wall, used = time.perf_counter(), time.process_time()
            tokens[name] = run(model, prompts, arguments.new)
            times[name].append(time.perf_counter() - wall)
            cpu[name].append(time.process_time() - used)
    count = arguments.rows * arguments.new
    print("| way | s | tokens/s | CPU s |\n|---|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {min(seconds):.2f} | {count / min(seconds):.1f} | {min(cpu[name]):.2f} |")
    same = sum(a == b for a, b in zip(tokens["one by one"], tokens["batch"], strict=True))
    print(f"\nthroughput x {min(times['one by one']) / min(times['batch']):.2f}; rows with identical tokens: "
          f"{same} of {arguments.rows}")  # fmt: skip


def _one_by_one(model: pop_runtime.Model, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    answers = [model.generate(prompt, max_new_tokens=num_new, temperature=0, ignore_eos=True) for prompt in prompts]
    return [[token.id for token in answer] for answer in answers]


def _batch(model: pop_runtime.Model, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    answers = model.generate_batch(prompts, max_new_tokens=num_new, temperature=0, ignore_eos=True)
    return [answer.token_ids for answer in answers]


if __name__ == "__main__":
    main()
