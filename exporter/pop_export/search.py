"""Order layers by what skipping them really costs: greedy, on measured damage with refit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

BREADTH = 2  # layers tried per step: the deepest one that is left, and the one that gates find least important


def search_order(
    kl_of: Callable[[Collection[int]], float],
    importance: Sequence[float],
    num_wanted: int,
    breadth: int = BREADTH,
    advance: Callable[[int], None] = lambda _count: None,
) -> tuple[int, ...]:
    """Return all layers in the order in which to skip them; the first `num_wanted` by measured damage.

    Each step tries a few layers beside those already chosen and takes the least damaging. The deepest layer that is
    left is always tried, because what it leaves undone only decode's cache could miss, and refit restores that; the
    others are those of the lowest importance by gates. Layers beyond `num_wanted` follow deepest first, unmeasured.

    Args:
        kl_of: damage of a set of skipped layers, >= 0.
        importance: [L], prefill importance by gates.
        num_wanted: how many layers to order by damage, below L.
        breadth: layers tried per step, at least 1.
        advance: called with 1 after each layer chosen.
    """
    deepest_first = range(len(importance) - 1, -1, -1)
    by_gates = sorted(deepest_first, key=lambda layer: importance[layer])
    chosen: list[int] = []
    for _ in range(num_wanted):
        deepest = next(layer for layer in deepest_first if layer not in chosen)
        others = [layer for layer in by_gates if layer not in (*chosen, deepest)]
        candidates = [deepest, *others[: breadth - 1]]
        if len(candidates) == 1:
            chosen.append(deepest)
        else:
            chosen.append(min(candidates, key=lambda layer: kl_of([*chosen, layer])))
        advance(1)
    return (*chosen, *(layer for layer in deepest_first if layer not in chosen))
