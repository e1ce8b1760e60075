"""Measure what pruning gains: full against pruned prefill of one bundle, in one run, taking turns."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.schedule import Stage
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
    full_prefill_ms: float  # decode graph over the prompt; its head sees the last position only
    pruned_prefill_ms: float
    prefill_speedup: float  # full / pruned
    pruned_turn_ms: float  # the prompt as a turn: sink and boundary through the decode graph, the rest pruned
    turn_speedup: float  # full_prefill_ms / pruned_turn_ms: what is left of the gain
    decode_ms_per_token: float


def measure_speed(sessions: SessionPair, manifest: Manifest, rounds: int = ROUNDS) -> Speed:
    """Return times of both graphs over `PROMPT_TOKENS` (fewer if the model takes less), of a turn, and of decode.

    Prompts are random ids, each fed in one piece into an empty cache. A first round over few tokens warms up.
    """
    num_tokens = max(1, min(PROMPT_TOKENS, manifest.max_positions - DECODE_STEPS))
    cache = allocate_cache(manifest, 1, num_tokens + DECODE_STEPS)
    ids = np.random.default_rng(0).integers(0, manifest.vocab_size, num_tokens).tolist()
    stages: tuple[Stage, ...] = ("decode", "prefill")
    times: dict[str, list[float]] = {"decode": [], "prefill": [], "turn": []}
    for length in (min(WARM_UP_TOKENS, num_tokens), *[num_tokens] * rounds):
        for stage in stages:
            times[stage].append(_seconds(Sequence(sessions, cache), ids[:length], stage))
        sequence = Sequence(sessions, cache)
        started = time.perf_counter()
        sequence.append(ids[:length])
        times["turn"].append(time.perf_counter() - started)
    steps = [_seconds(sequence, [0], "decode") for _ in range(DECODE_STEPS)]
    full, pruned, turn = (float(np.median(times[way][1:])) for way in ("decode", "prefill", "turn"))
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


def _seconds(sequence: Sequence, ids: list[int], stage: Stage) -> float:
    started = time.perf_counter()
    sequence.feed(ids, stage)
    return time.perf_counter() - started
