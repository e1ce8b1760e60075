"""Order layers by what skipping them costs: greedy, on measured damage with refit, where cheap signs disagree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pop_export.layer_plan import layer_order

BREADTH = 2  # layers tried per step: the deepest one that is left, and the one that gates find least important


def search_order(
    price_of: Callable[[Collection[int]], float],
    importance: Sequence[float],
    num_wanted: int,
    breadth: int = BREADTH,
    advance: Callable[[int], None] = lambda _count: None,
) -> tuple[int, ...]:
    """Return all layers in the order in which to skip them, the first `num_wanted` by search.

    Two signs of a layer that the prompt does not need cost nothing: it lies deep, and its gates say so. Layers that
    both signs put among the `num_wanted` are taken unmeasured, deepest first. Then each step tries a few more beside
    those already chosen, and takes the one of the lowest price: the deepest layer left, because what it leaves undone
    only decode's cache could miss, and refit restores that; and those of the lowest importance by gates. Layers beyond
    `num_wanted` follow deepest first, unmeasured.

    Args:
        price_of: of a set of skipped layers, what it costs for what it saves; lower is better.
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
        candidates = [deepest, *others[: breadth - 1]]
        if len(candidates) > 1:
            candidates.sort(key=lambda layer: price_of([*chosen, layer]))
        chosen.append(candidates[0])
        advance(1)
    return (*chosen, *(layer for layer in deepest_first if layer not in chosen))
