"""Print the time of each turn of a conversation beside reading the whole conversation again, as its history grows.

    python benchmarks/conversation_turns.py BUNDLE [--turns 20] [--words 40] [--new 16] [--threads 1]

Every turn brings as many new words and asks for as many tokens. CPU times of the process until the first token: of the
conversation, which reads what is new, and of one prompt with everything said so far. `read` counts the tokens fed
before the first answer token.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import pop_runtime

WORDS = ("river", "stone", "lamp", "garden", "letter", "window", "music", "table", "winter", "road", "bread", "cloud")


def main() -> None:
    """Measure and print one row a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prefill", choices=("pop", "full"), default="pop")
    arguments = parser.parse_args()
    model = pop_runtime.load(arguments.bundle, arguments.threads)
    conversation, draw = model.conversation(), np.random.default_rng(0)
    options: pop_runtime.Options = {"prefill": arguments.prefill, "temperature": 0, "ignore_eos": True}
    print("| turn | history | read | conversation CPU s | whole again CPU s | same tokens |\n" + "|---" * 6 + "|")
    for turn in range(1, arguments.turns + 1):
        history = len(conversation)
        conversation.append(" ".join(draw.choice(WORDS, arguments.words)))
        generation = conversation.generate(max_new_tokens=arguments.new, **options)
        seconds = _first_token_s(generation)
        list(generation)
        answer = generation.token_ids
        whole = conversation.token_ids[: len(conversation) - len(answer)]
        again = model.generate(whole, max_new_tokens=arguments.new, **options)
        again_seconds = _first_token_s(again)
        list(again)
        read = len(whole) - history + (history > 0)
        print(
            f"| {turn} | {history} | {read} | {seconds:.2f} | {again_seconds:.2f} | {again.token_ids == answer} |",
            flush=True,
        )


def _first_token_s(generation: pop_runtime.Generation) -> float:
    started = time.process_time()
    next(generation)
    return time.process_time() - started


if __name__ == "__main__":
    main()
