"""Order layers by what skipping them really costs: greedy, on measured damage with refit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

MAX_CANDIDATE_SHARE = 0.7  # layers of higher importance by their gates are never tried


def search_order(
    kl_of: Callable[[Collection[int]], float],
    importance: Sequence[float],
    num_wanted: int,
    advance: Callable[[int], None] = lambda _count: None,
) -> tuple[int, ...]:
    """Return layers in the order in which to skip them, each the least damaging beside those before it.

    Lazy greedy: a candidate's damage is measured again only while what it did when last measured is still the least.
    Damage mostly grows with the set, so few measurements are needed for a step, but this is no proof of the best set.

    Args:
        kl_of: damage of a set of skipped layers, >= 0.
        importance: [L], prefill importance by gates: which layers are worth trying, and in what order.
        num_wanted: how many layers to order, below L.
        advance: called with 1 after each layer chosen.
    """
    num_layers = len(importance)
    by_gates = sorted(range(num_layers), key=lambda layer: (importance[layer], -layer))
    num_candidates = min(num_layers, max(num_wanted, round(MAX_CANDIDATE_SHARE * num_layers)))
    chosen: list[int] = []
    # (damage of chosen + this layer when last measured, gate rank, layer, how many were chosen then)
    queue = [(kl_of([layer]), rank, layer, 0) for rank, layer in enumerate(by_gates[:num_candidates])]
    heapq.heapify(queue)
    base = 0.0
    while queue and len(chosen) < num_wanted:
        damage, rank, layer, measured_at = heapq.heappop(queue)
        if measured_at == len(chosen):
            chosen.append(layer)
            # What the others add is guessed to be what they added before; it is measured if it is the least.
            queue = [(other - base + damage, r, at, when) for other, r, at, when in queue]
            heapq.heapify(queue)
            base = damage
            advance(1)
        else:
            heapq.heappush(queue, (kl_of([*chosen, layer]), rank, layer, len(chosen)))
    return tuple(chosen)
