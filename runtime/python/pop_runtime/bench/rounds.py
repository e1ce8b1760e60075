"""Rounds in which all engines take turns, and what is made of their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pop_runtime.bench.engines import Run

FIRST_ID = 3  # lower ids are mostly special tokens


@dataclass(frozen=True)
class Line:
    """One line of the plot: an engine, and how it reads prompts."""

    label: str
    worker: str
    prefill: str = "full"


@dataclass(frozen=True)
class Sample:
    """One answer of one engine."""

    line: Line
    num_prompt: int
    round: int
    run: Run

    @property
    def label(self) -> str:
        """Of the line."""
        return self.line.label


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds, in milliseconds."""

    median: float
    least: float
    greatest: float


@dataclass(frozen=True)
class Figures:
    """What one engine needs for prompts of one length."""

    label: str
    num_prompt: int
    first_ms: Spread
    step_ms: Spread | None  # of the rounds' medians per token; None where one token was asked for
    tokens_per_second: float | None  # 1000 / median step


@dataclass(frozen=True)
class Ratio:
    """Our times over a peer's for prompts of one length: medians of the rounds' own ratios."""

    label: str  # of ours
    peer: str
    num_prompt: int
    first_token: float
    per_token: float | None  # None where one token was asked for


def prompt_of(num_tokens: int, vocab_size: int) -> list[int]:
    """Return random token ids, the same for every engine: their times do not depend on what they read."""
    return np.random.default_rng(num_tokens).integers(min(FIRST_ID, vocab_size - 1), vocab_size, num_tokens).tolist()


def run_rounds(
    ask: Callable[[Line, list[int]], Run], lines: Sequence[Line], prompts: Sequence[list[int]], num_rounds: int
) -> list[Sample]:
    """Return one sample per engine, prompt and round; the first round is a warm-up and not among them.

    Engines take turns for each prompt, so that a machine that drifts touches all alike.
    """
    samples = []
    for index in range(num_rounds + 1):
        for prompt in prompts:
            for line in lines:
                run = ask(line, prompt)
                if index:
                    samples.append(Sample(line, len(prompt), index, run))
    return samples


def figures_of(samples: Sequence[Sample]) -> list[Figures]:
    """Return the figures of each engine and prompt length, in the order of the samples."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for sample in samples:
        groups.setdefault((sample.label, sample.num_prompt), []).append(sample.run)
    return [_figures(label, num_prompt, runs) for (label, num_prompt), runs in groups.items()]


def _figures(label: str, num_prompt: int, runs: Sequence[Run]) -> Figures:
    steps = [median(run.step_ms) for run in runs if run.step_ms]
    step = _spread(steps) if steps else None
    return Figures(
        label, num_prompt, _spread([run.first_ms for run in runs]), step, 1e3 / step.median if step else None
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def pairs_of(samples: Sequence[Sample], one: Line, other: Line, num_prompt: int) -> list[tuple[Run, Run]]:
    """Return what two lines answered to prompts of one length, the runs of one round together."""
    ones, others = (
        {sample.round: sample.run for sample in samples if (sample.line, sample.num_prompt) == (line, num_prompt)}
        for line in (one, other)
    )
    return [(run, others[index]) for index, run in sorted(ones.items())]


def ratios_to_peers(samples: Sequence[Sample], ours: str) -> list[Ratio]:
    """Return the ratios of each of our lines to each peer; both times of a ratio are from the same round.

    Args:
        samples: of all rounds.
        ours: worker whose lines are ours; theirs are all others.
    """
    lines = list(dict.fromkeys(sample.line for sample in samples))
    lengths = list(dict.fromkeys(sample.num_prompt for sample in samples))
    found = []
    for line in (line for line in lines if line.worker == ours):
        for peer in (peer for peer in lines if peer.worker != ours):
            for length in lengths:
                pairs = pairs_of(samples, line, peer, length)
                first = median(our.first_ms / their.first_ms for our, their in pairs)
                steps = [median(our.step_ms) / median(their.step_ms) for our, their in pairs if our.step_ms]
                found.append(Ratio(line.label, peer.label, length, first, median(steps) if steps else None))
    return found
