"""Measure what pruning gains: full against pruned prefill of one bundle, in one run, taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair

PROMPT_TOKENS = 1024
WARM_UP_TOKENS = 128
ROUNDS = 3
DECODE_STEPS = 16


@dataclass(frozen=True)
class Speed:
    """Medians over rounds in which full and pruned take turns, so that a drifting machine touches both alike."""

    num_prompt_tokens: int
    num_rounds: int
    threads: int
    full_prefill_ms: float  # the prompt as a turn in full; the head sees the last position only
    pruned_prefill_ms: float  # all of it through the prefill graph, in one piece
    prefill_speedup: float  # full / pruned
    pruned_turn_ms: float  # the prompt as a turn: sink and boundary through the decode graph, the rest pruned
    turn_speedup: float  # full_prefill_ms / pruned_turn_ms: what is left of the gain
    decode_ms_per_token: float


def measure_speed(sessions: SessionPair, manifest: Manifest, rounds: int = ROUNDS) -> Speed:
    """Return times of both graphs over `PROMPT_TOKENS` (fewer if the model takes less), of a turn, and of decode.

    Prompts are random ids, read into an empty cache. A first round over few tokens warms up.
    """
    num_tokens = max(1, min(PROMPT_TOKENS, manifest.max_positions - DECODE_STEPS))
    cache = allocate_cache(manifest, 1, num_tokens + DECODE_STEPS)
    ids = np.random.default_rng(0).integers(0, manifest.vocab_size, num_tokens).tolist()
    ways: dict[str, Callable[[Sequence, list[int]], object]] = {
        "full": lambda sequence, prompt: sequence.append(prompt, "full"),
        "pruned": lambda sequence, prompt: sequence.feed(prompt, "prefill"),
        "turn": lambda sequence, prompt: sequence.append(prompt),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for length in (min(WARM_UP_TOKENS, num_tokens), *[num_tokens] * rounds):
        for way, read in ways.items():
            sequence = Sequence(sessions, cache)
            times[way].append(_seconds(partial(read, sequence, ids[:length])))
    steps = [_seconds(partial(sequence.feed, [0], "decode")) for _ in range(DECODE_STEPS)]
    full, pruned, turn = (float(np.median(times[way][1:])) for way in ways)
    return Speed(
        num_prompt_tokens=num_tokens,
        num_rounds=rounds,
        threads=sessions.threads,
        full_prefill_ms=full * 1e3,
        pruned_prefill_ms=pruned * 1e3,
        prefill_speedup=full / pruned,
        pruned_turn_ms=turn * 1e3,
        turn_speedup=full / turn,
        decode_ms_per_token=float(np.median(steps[1:])) * 1e3,
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
