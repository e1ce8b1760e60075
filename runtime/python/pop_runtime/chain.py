"""Several sessions that run one after another as if they were one: the segments of a graph.

A `ChainedSession` has the calls of `onnxruntime.InferenceSession` that the runtime makes, so that whatever binds and
runs a session can do so with a chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pop_runtime.device_buffer import Buffer, where, zeros
from pop_runtime.providers import HOST, Place

if TYPE_CHECKING:
    import onnxruntime

NUMPY_TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": np.uint16,
}
ONNX_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}  # TensorProto.DataType


@dataclass(frozen=True)
class Link:
    """One session of a chain."""

    session: onnxruntime.InferenceSession
    hidden_in: str | None  # input for the hidden states of the link before; None reads none
    hidden_out: str | None  # output of its own hidden states; None hands on what it was given
    graph: str = ""  # file name, for messages


class ChainedSession:
    """Sessions in the order in which they run.

    Args:
        links: at least one.
        ids: name of the input [B, S] that every hidden state [B, S, E] belongs to.
        place: where hidden states lie.
    """

    def __init__(self, links: tuple[Link, ...], ids: str, place: Place = HOST) -> None:
        self.links, self.ids, self.place = links, ids, place
        self._inputs: dict[str, onnxruntime.NodeArg] = {}
        self._outputs: dict[str, onnxruntime.NodeArg] = {}
        for link in links:
            self._inputs |= {arg.name: arg for arg in link.session.get_inputs() if arg.name != link.hidden_in}
            self._outputs |= {arg.name: arg for arg in link.session.get_outputs() if arg.name != link.hidden_out}

    def get_inputs(self) -> list[onnxruntime.NodeArg]:
        """Return what a caller has to give."""
        return list(self._inputs.values())

    def get_outputs(self) -> list[onnxruntime.NodeArg]:
        """Return what a caller gets."""
        return list(self._outputs.values())

    def io_binding(self) -> ChainedBinding:
        """Return a binding for all links."""
        return ChainedBinding(self)

    def run_with_iobinding(self, binding: ChainedBinding, run_options: Any = None) -> None:
        """Run every link, each on the hidden states of the one before."""
        binding.bind_hidden()
        for bound in binding.links:
            bound.run(run_options)


class BoundLink:
    """One session of a chain and what its inputs and outputs are bound to."""

    def __init__(self, link: Link, place: Place) -> None:
        self.link, self.place, self.binding = link, place, link.session.io_binding()
        self.inputs = {arg.name: arg for arg in link.session.get_inputs()}
        self.outputs = {arg.name: arg for arg in link.session.get_outputs()}

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Bind an array to an input, if there is one of that name."""
        if name in self.inputs:
            self.binding.bind_cpu_input(name, array)

    def hidden_made(self) -> onnxruntime.NodeArg | None:
        """Return the output for hidden states; None if the link hands on what it was given."""
        return None if self.link.hidden_out is None else self.outputs[self.link.hidden_out]

    def new_hidden(self, batch: int, num_tokens: int) -> Buffer:
        """Return room for the hidden states [B, S, E] that this link makes of so many tokens."""
        output = self.hidden_made()
        assert output is not None
        return zeros((batch, num_tokens, output.shape[2]), NUMPY_TYPES[output.type], self.place)

    def bind_hidden(self, given: Buffer | None, made: Buffer | None) -> None:
        """Bind hidden states, each [B, S, E] without gaps; the caller keeps them alive.

        Args:
            given: read, if the link reads any.
            made: written, if the link makes any.
        """
        if self.link.hidden_in is not None:
            assert given is not None
            self.binding.bind_input(self.link.hidden_in, *self._where(given, self.inputs[self.link.hidden_in]))
        if self.link.hidden_out is not None:
            assert made is not None
            self.binding.bind_output(self.link.hidden_out, *self._where(made, self.outputs[self.link.hidden_out]))

    def run(self, run_options: Any = None) -> None:
        """Run the session on what is bound."""
        self.link.session.run_with_iobinding(self.binding, run_options)

    def _where(self, hidden: Buffer, value: onnxruntime.NodeArg) -> tuple[str, int, int, list[int], int]:
        """Return where hidden states lie, as a binding is told."""
        return where(hidden, ONNX_TYPES[value.type], self.place)


class ChainedBinding:
    """Inputs and outputs of a chain; the hidden states between links are its own."""

    def __init__(self, chain: ChainedSession) -> None:
        self._ids = chain.ids
        self.links = [BoundLink(link, chain.place) for link in chain.links]
        self._hidden: list[Buffer] = []  # a binding does not keep memory alive
        self._size, self._bound_size = (0, 0), (0, 0)  # B and S of the ids, and of the hidden states bound last

    def bind_input(self, name: str, *where: Any) -> None:
        """Let every link that reads `name` read this memory."""
        for bound in self.links:
            if name in bound.inputs:
                bound.binding.bind_input(name, *where)

    def bind_output(self, name: str, *where: Any) -> None:
        """Let the link that makes `name` write to this memory."""
        for bound in self.links:
            if name in bound.outputs:
                bound.binding.bind_output(name, *where)

    def bind_ortvalue_output(self, name: str, value: onnxruntime.OrtValue) -> None:
        """Let the link that makes `name` write it here."""
        for bound in self.links:
            if name in bound.outputs:
                bound.binding.bind_ortvalue_output(name, value)

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Let every link that reads `name` read this array."""
        if name == self._ids:
            self._size = (array.shape[0], array.shape[1])
        for bound in self.links:
            bound.bind_cpu_input(name, array)

    def bind_hidden(self) -> None:
        """Bind hidden states of the size of the ids; nothing to do while that stays the same."""
        if self._size == self._bound_size:
            return
        current: Buffer | None = None
        hidden: list[Buffer] = []
        for bound in self.links:
            made = None if bound.link.hidden_out is None else bound.new_hidden(*self._size)
            bound.bind_hidden(current, made)
            if made is not None:
                current = made
                hidden.append(made)
        self._hidden, self._bound_size = hidden, self._size

    def forget_hidden(self) -> None:
        """Bind hidden states anew before the next run: somebody else has bound the links to others."""
        self._hidden, self._bound_size = [], (0, 0)
