"""Order layers by what skipping them costs: greedy, on measured damage with refit, where cheap signs disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from pop_export.layer_plan import layer_order


def search_order(
    price_of: Callable[[Collection[int]], np.ndarray],
    importance: Sequence[float],
    num_wanted: int,
    breadth: int,
    advance: Callable[[int], None] = lambda _count: None,
) -> tuple[int, ...]:
    """Return all layers in the order in which to skip them, the first `num_wanted` by search.

    Two signs of a layer that the prompt does not need cost nothing: it lies deep, and its gates say so. Layers that
    both signs put among the `num_wanted` are taken unmeasured, deepest first. Then each step tries a few more beside
    those already chosen: the deepest layer left, because what it leaves undone only decode's cache could miss, and
    refit restores that; and those of the lowest importance by gates. The deepest is taken unless another is clearly
    cheaper, because skipped layers at the end need no surrogates and make the fewest segments. Layers beyond
    `num_wanted` follow deepest first, unmeasured.

    Args:
        price_of: of a set of skipped layers, what it costs for what it saves on each window of text, [W]; lower is
            better.
        importance: [L], prefill importance by gates.
        num_wanted: how many layers to choose, below L.
        breadth: layers tried per step, at least 1; 1 takes the deepest layers.
        advance: called with the number of layers chosen, after each step.
    """
    deepest_first = range(len(importance) - 1, -1, -1)
    by_gates = layer_order(importance)
    chosen = [layer for layer in deepest_first[:num_wanted] if layer in by_gates[:num_wanted]]
    advance(len(chosen))
    while len(chosen) < num_wanted:
        deepest = next(layer for layer in deepest_first if layer not in chosen)
        others = [layer for layer in by_gates if layer not in (*chosen, deepest)]
        taken = deepest
        if tried := others[: breadth - 1]:
            price = price_of([*chosen, deepest])
            prices = {layer: price_of([*chosen, layer]) for layer in tried}
            cheapest = min(tried, key=lambda layer: float(prices[layer].mean()))
            if clearly_lower(prices[cheapest], price):
                taken = cheapest
        chosen.append(taken)
        advance(1)
    return (*chosen, *(layer for layer in deepest_first if layer not in chosen))


def clearly_lower(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether `one` is below `other` by more than a standard error of their mean difference, window by window.

    Both are [W]. One window alone has no standard error; there any difference counts.
    """
    if not np.isfinite(other).all():
        return bool(np.isfinite(one).all())
    gained = other - one
    error = float(gained.std(ddof=1)) / math.sqrt(len(gained)) if len(gained) > 1 else 0.0
    return float(gained.mean()) > error
