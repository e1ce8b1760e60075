"""Both graphs over the same new tokens at once: kept layers read all of them, skipped layers each stretch by itself.

A turn begins and ends at full depth (its windows) and is pruned between. Fed one after another the three stretches go
through the kept layers three times, and few tokens cost nearly as much as many: the weights are read for each stretch.
Where both graphs lie in segments, the kept ones are the same sessions in both, and can read a whole chunk of the turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pop_runtime.cancel import Cancellation
from pop_runtime.chain import BoundLink, ChainedBinding
from pop_runtime.device_buffer import DeviceBuffer
from pop_runtime.kv_cache import BoundGraph
from pop_runtime.providers import HOST
from pop_runtime.schedule import Stage, Stretch


class JoinedGraphs:
    """The prefill and the decode graph of one cache of batch 1, both of them chains with segments at the same places.

    Args:
        prefill: bound to the cache.
        decode: bound to the same cache; its logits are those of the last stretch that went through it.
    """

    def __init__(self, prefill: BoundGraph, decode: BoundGraph) -> None:
        self._graphs: dict[Stage, BoundGraph] = {"prefill": prefill, "decode": decode}
        self._places = list(zip(_links(prefill), _links(decode), strict=True))

    def run(
        self, ids: np.ndarray, num_past: int, stretches: Sequence[Stretch], cancellation: Cancellation | None
    ) -> None:
        """Feed new tokens and write their K and V in place; as one stretch after another would, but for rounding.

        Args:
            ids: [1, S] int64, the tokens after the first `num_past` of the sequence.
            num_past: tokens in the cache.
            stretches: which of the new tokens go through which graph; they cover `0..S` in order.
            cancellation: ends the run when it is set; what the run has written until then counts for nothing.

        Raises:
            BackendError: ONNX Runtime fails.
            Cancelled: the run was cancelled.
        """
        whole = Stretch(0, ids.shape[1], "decode")
        hidden: np.ndarray | None = None  # [1, S, E]
        try:
            for prefill, decode in self._places:
                is_kept = prefill.link.session is decode.link.session
                made = None if decode.link.hidden_out is None else decode.new_hidden(*ids.shape)
                assert not isinstance(made, DeviceBuffer)
                for stretch in (whole,) if is_kept else stretches:
                    rows = slice(stretch.start, stretch.stop)
                    given, written = (None if states is None else states[:, rows] for states in (hidden, made))
                    link = decode if stretch.stage == "decode" else prefill
                    link.bind_hidden(given, written)
                    self._graphs[stretch.stage].run_link(link, ids[:, rows], num_past + stretch.stop, cancellation)
                    if written is not None and link.link.hidden_out is None:
                        written[:] = given  # hidden states pass a skipped layer unchanged
                hidden = made
        finally:
            for graph in self._graphs.values():
                graph.forget_bound()


def joined_graphs(prefill: BoundGraph, decode: BoundGraph) -> JoinedGraphs | None:
    """Return both graphs joined; None where they are not chains with the same places for hidden states."""
    if not (isinstance(prefill.binding, ChainedBinding) and isinstance(decode.binding, ChainedBinding)):
        return None
    if prefill.place.memory != HOST.memory:  # rows of hidden states are copied within the computer's own memory
        return None
    links = prefill.binding.links, decode.binding.links
    if len(links[0]) != len(links[1]):
        return None
    for index, bound in enumerate(zip(*links, strict=True)):
        pruned, full = (each.link for each in bound)
        is_last = index == len(links[0]) - 1
        reads_alike = (pruned.hidden_in is None) == (full.hidden_in is None) == (index == 0)
        makes_alike = (full.hidden_out is None) == is_last and (pruned.hidden_out is None or not is_last)
        if not reads_alike or not makes_alike or (index == 0 and not is_last and pruned.hidden_out is None):
            return None
        made = {(value.type, value.shape[-1]) for value in map(BoundLink.hidden_made, bound) if value is not None}
        if len(made) > 1:
            return None
    return JoinedGraphs(prefill, decode)


def _links(graph: BoundGraph) -> list[BoundLink]:
    assert isinstance(graph.binding, ChainedBinding)
    return graph.binding.links
