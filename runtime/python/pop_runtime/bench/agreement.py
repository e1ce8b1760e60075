"""Do the engines compute the same model? Greedy answers to short prompts of plain text, beside the bundle's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pop_runtime.bench.engines import Run
from pop_runtime.bench.rounds import Line

NUM_PROBES, NUM_NEW = 16, 4
MOST_TOKENS = 208  # of a probe: more than sink and boundary, so that pruning shows as well
LONGEST_PROBE = MOST_TOKENS + NUM_NEW  # and its answer
LEAST_TOP1 = 0.5  # int4 by rounding agrees on about 0.8; another model, or one that is fed wrongly, on next to nothing

TEXT = """\
The lighthouse keeper wrote down the weather every evening, in a book that his father had begun. On the first page
stood the year 1891, and under it a drawing of the harbour with all of its boats. When the wind came from the north,
the boats stayed close to the shore, and the children of the village counted them from the wall. There were twelve of
them in a good year, and nine in a bad one. In winter the keeper had more time than he needed. He mended nets, he
carved spoons from driftwood, and he learned the names of the stars from a calendar that a ship's doctor had left
behind. Once, in March, the lamp went out for the length of an hour. Nobody was on the water that night, and nobody
ever asked him about it, but he entered it in the book all the same, with the time at which it went out, the time at
which it burned again, and the reason.
"""


@dataclass(frozen=True)
class Agreement:
    """How often an engine's greedy answers are those of the bundle's full prefill."""

    label: str
    num_probes: int
    top1: float  # share of probes with the same first token
    common_tokens: float  # leading tokens in common, of NUM_NEW, mean over the probes


def probes_of(ids: Sequence[int], max_positions: int) -> list[list[int]]:
    """Return prefixes of a text, the shortest about half as long as the longest.

    Args:
        ids: of the text.
        max_positions: of the model.
    """
    most = min(len(ids), MOST_TOKENS, max_positions - NUM_NEW)
    lengths = np.unique(np.linspace(max(1, most // 2), most, NUM_PROBES).astype(int))
    return [list(ids[:length]) for length in lengths]


def agreement_of(
    ask: Callable[[Line, list[int], int], Run], lines: Sequence[Line], truth: Line, probes: Sequence[list[int]]
) -> list[Agreement]:
    """Return one entry per line: its answers against those of `truth`.

    Args:
        ask: runs a line on a prompt for so many new tokens.
        lines: to compare.
        truth: to compare with.
        probes: prompts.
    """
    wanted = [ask(truth, probe, NUM_NEW).tokens for probe in probes]
    found = []
    for line in lines:
        pairs = list(zip((ask(line, probe, NUM_NEW).tokens for probe in probes), wanted, strict=True))
        common = [_num_common(answer, true) for answer, true in pairs]
        num_same = sum(answer[0] == true[0] for answer, true in pairs)
        found.append(Agreement(line.label, len(probes), num_same / len(pairs), sum(common) / len(pairs)))
    return found


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens two answers share."""
    same = [one == other for one, other in zip(first, second, strict=True)]
    return same.index(False) if False in same else len(same)
