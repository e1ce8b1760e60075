"""What an engine is to the benchmark, and the first of them: a bundle in our runtime. Used inside a worker process.

All are given token ids, one prompt at a time, choose greedily and compute logits for the last position of the prompt
alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pop_runtime.engine import Engine as EngineFiles
    from pop_runtime.manifest import Manifest
    from pop_runtime.model import Model
    from pop_runtime.providers import Target
    from pop_runtime.sessions import SessionPair


@dataclass(frozen=True)
class Run:
    """One answer: milliseconds from the call to the first token, and of each token after it; and the tokens."""

    first_ms: float
    step_ms: tuple[float, ...]
    tokens: tuple[int, ...]


class Engine(Protocol):
    """A loaded model."""

    def run(self, prompt: Sequence[int], num_new: int, prefill: str, tick: Callable[[], None]) -> Sequence[int]:
        """Return the tokens of an answer, exactly `num_new`, and call `tick` as each of them is known.

        `prefill` counts for a bundle alone.
        """


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # in seconds


def timed(engine: Engine, prompt: Sequence[int], num_new: int, prefill: str, clock: str) -> Run:
    """Return an answer with the times of its tokens by one of `CLOCKS`."""
    now = CLOCKS[clock]
    times = [now()]
    tokens = engine.run(prompt, num_new, prefill, lambda: times.append(now()))
    gaps = [(after - before) * 1e3 for before, after in pairwise(times)]
    assert len(gaps) == len(tokens) == num_new, f"{len(gaps)} times and {len(tokens)} tokens for {num_new}"
    return Run(gaps[0], tuple(gaps[1:]), tuple(int(token) for token in tokens))


class BundleEngine:
    """A bundle through our runtime.

    Args:
        folder: of the bundle.
        threads: on the CPU.
        low_memory: as for `pop_runtime.load`.
        graphs: "both", or "decode" for the decode graph alone, which can read prompts too.
        target: provider and device; None: the CPU.
        compiled: run what pop-compile made.
        sink_tokens: first tokens at full depth; None: the bundle's.
        boundary_tokens: last prompt tokens at full depth; None: the bundle's.
    """

    def __init__(
        self, folder: Path, threads: int, low_memory: bool = False, graphs: str = "both", target: Target | None = None,
        compiled: bool = False, sink_tokens: int | None = None, boundary_tokens: int | None = None,
    ) -> None:  # fmt: skip
        from pop_runtime.model import load
        from pop_runtime.providers import CPU
        from pop_runtime.sequence import windows_in_force

        target = target or CPU
        if graphs == "both":
            where = dataclasses.asdict(target)
            self._model = load(folder, threads, verify=False, low_memory=low_memory, engine=compiled, **where)
        else:
            self._model = _decode_alone(folder, threads, target, compiled)
        self.nodes_by_provider = self._model.sessions.nodes_by_provider
        self._windows = windows_in_force(self._model.manifest, sink_tokens, boundary_tokens)

    def run(self, prompt: Sequence[int], num_new: int, prefill: str, tick: Callable[[], None]) -> Sequence[int]:
        """Answer a prompt; see `Engine`."""
        sequence = self._model.sequence(len(prompt) + num_new)
        tokens = [int(sequence.append(prompt, prefill, self._windows).argmax())]  # type: ignore[arg-type]
        tick()
        for _ in range(num_new - 1):
            sequence.accept(tokens[-1])
            tokens.append(int(sequence.step().argmax()))
            tick()
        return tokens


def _decode_alone(folder: Path, threads: int, target: Target, compiled: bool) -> Model:
    """Return a bundle of which the decode graph alone is loaded; it stands in for the prefill graph."""
    from pop_runtime.errors import ModelError
    from pop_runtime.manifest import read_manifest
    from pop_runtime.model import Model
    from pop_runtime.sessions import engine_for

    manifest = read_manifest(folder)
    built = engine_for(folder, manifest, target, compiled, verify=False)
    model = Model(folder, manifest, _decode_twice(folder, manifest, threads, target, built))
    with suppress(ModelError):  # `load` reads it too: both have it in memory, or neither
        _ = model.tokenizer
    return model


def _decode_twice(
    folder: Path, manifest: Manifest, threads: int, target: Target, built: EngineFiles | None
) -> SessionPair:
    """Return the decode graph in both places: whole, or as a chain where an engine was built of segments."""
    from pop_runtime.providers import Place
    from pop_runtime.sessions import DECODE_ENTRIES, SessionPair, open_segments, open_session

    if built is not None and manifest.decode_graph not in built.files:
        own = tuple(part for part in manifest.segments if "decode" in part.stages)
        pair = open_segments(folder, dataclasses.replace(manifest, segments=own), threads, target, built)
        return dataclasses.replace(pair, prefill=pair.decode)
    alone = open_session(
        folder / manifest.decode_graph, threads, DECODE_ENTRIES, target, manifest, built, records=target.cuda_graphs
    )
    place = Place(target.provider.memory, target.device, None if built is None else built.facts.shapes)
    return SessionPair(alone, alone, threads, target, place)
