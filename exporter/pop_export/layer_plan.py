"""Which layers the prefill graph leaves out: ordered by prefill importance, counted by a ratio, or listed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from pop_runtime.errors import UsageError

EXPECTED = 'expected layers such as "20-29" or "5,12-14,18", or "none"'


def layer_order(importance_prefill: Sequence[float]) -> tuple[int, ...]:
    """Return all layers, those of the lowest prefill importance first; of equals the deeper one."""
    return tuple(sorted(range(len(importance_prefill)), key=lambda layer: (importance_prefill[layer], -layer)))


def num_skipped_at(prune_ratio: float, num_layers: int) -> int:
    """Return how many layers a ratio comes to: the nearest whole number, halves up, and at least one layer is kept.

    1/3 of 30 is 10, 1/4 of 30 is 8.
    """
    return min(math.floor(prune_ratio * num_layers + 0.5), num_layers - 1)


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers that a list such as "5,12-14,18" names, ascending; ranges include both ends; "none" is ().

    A layer named twice is refused, because a typing error is the likely cause; so is skipping every layer, because
    then the prompt would reach decode as bare embeddings.

    Raises:
        UsageError: the text is malformed, reversed, repeats a layer, lies out of range or names every layer.
    """
    if text.strip().lower() == "none":
        return ()
    place = f'--prune-layers "{text}"'
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if match is None:
            raise UsageError(f'{place}: {EXPECTED}, found "{part.strip()}"')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise UsageError(f"{place}: expected the lower layer first, found {first}-{last}; write {last}-{first}")
        if last >= num_layers:
            raise UsageError(f"{place}: expected layers 0 to {num_layers - 1}, found {last}")
        layers += range(first, last + 1)
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if repeated:
        raise UsageError(f"{place}: expected each layer once, found {repeated[0]} more than once")
    if len(layers) == num_layers:
        raise UsageError(f"{place}: expected at least one layer to keep, found all {num_layers}")
    return tuple(sorted(layers))
