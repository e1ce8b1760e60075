"""Which graph each new token of a turn goes through: pure arithmetic, no arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pop_runtime.manifest import Windows

Stage = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Stretch:
    """New tokens `start..stop` of a turn (half-open, counted within the turn) that are fed at once to one graph."""

    start: int
    stop: int
    stage: Stage


def plan_turn(num_past: int, num_new: int, windows: Windows | None, chunk_tokens: int) -> list[Stretch]:
    """Return the stretches that feed a turn's new tokens, in order; together they cover `0..num_new`.

    The sink (the first positions of the sequence) and the boundary (the last tokens of the turn) go through the full
    graph, everything between through the pruned one. With nothing between, the whole turn runs full. A chunk tail of
    one token keeps its stage.

    Args:
        num_past: tokens of the sequence before this turn; the sink is used up once it exceeds `sink_tokens`.
        num_new: tokens of this turn, at least 1.
        windows: sink and boundary; None runs the whole turn full.
        chunk_tokens: longest stretch, at least 1.
    """
    if windows is None:
        return _chunks(0, num_new, "decode", chunk_tokens)
    sink_stop = min(max(windows.sink_tokens - num_past, 0), num_new)
    boundary_start = num_new - windows.boundary_tokens
    if boundary_start <= sink_stop:
        return _chunks(0, num_new, "decode", chunk_tokens)
    return (
        _chunks(0, sink_stop, "decode", chunk_tokens)
        + _chunks(sink_stop, boundary_start, "prefill", chunk_tokens)
        + _chunks(boundary_start, num_new, "decode", chunk_tokens)
    )


def plan_joined_turn(num_past: int, num_new: int, windows: Windows | None, chunk_tokens: int) -> list[list[Stretch]]:
    """Return chunks of a turn for a runtime that feeds both graphs at once, each cut where its stage changes.

    Every token goes through the graph that `plan_turn` says. A chunk begins at a multiple of `chunk_tokens`.
    """
    whole = plan_turn(num_past, num_new, windows, num_new)
    chunks = [(at, min(at + chunk_tokens, num_new)) for at in range(0, num_new, chunk_tokens)]
    return [
        [
            Stretch(max(stretch.start, start), min(stretch.stop, stop), stretch.stage)
            for stretch in whole
            if stretch.start < stop and stretch.stop > start
        ]
        for start, stop in chunks
    ]


def _chunks(start: int, stop: int, stage: Stage, chunk_tokens: int) -> list[Stretch]:
    """Return `start..stop` cut into stretches of at most `chunk_tokens`."""
    return [Stretch(at, min(at + chunk_tokens, stop), stage) for at in range(start, stop, chunk_tokens)]
