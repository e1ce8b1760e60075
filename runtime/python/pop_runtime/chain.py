"""Several sessions that run one after another as if they were one: the segments of a graph.

A `ChainedSession` has the calls of `onnxruntime.InferenceSession` that the runtime makes, so that whatever binds and
runs a session can do so with a chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnxruntime  # `sessions.py` says what to install where it is missing

NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(bfloat16)": np.uint16}
ONNX_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}  # TensorProto.DataType


@dataclass(frozen=True)
class Link:
    """One session of a chain."""

    session: onnxruntime.InferenceSession
    hidden_in: str | None  # input for the hidden states of the link before; None reads none
    hidden_out: str | None  # output of its own hidden states; None hands on what it was given


class ChainedSession:
    """Sessions in the order in which they run.

    Args:
        links: at least one.
        ids: name of the input [B, S] that every hidden state [B, S, E] belongs to.
    """

    def __init__(self, links: tuple[Link, ...], ids: str) -> None:
        self.links, self.ids = links, ids
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
        for link, bound in zip(self.links, binding.bindings, strict=True):
            link.session.run_with_iobinding(bound, run_options)


class ChainedBinding:
    """Inputs and outputs of a chain; the hidden states between links are its own."""

    def __init__(self, chain: ChainedSession) -> None:
        self._chain = chain
        self.bindings = [link.session.io_binding() for link in chain.links]
        self._inputs, self._outputs = (
            [{arg.name: arg for arg in args} for args in ends]
            for ends in (
                [link.session.get_inputs() for link in chain.links],
                [link.session.get_outputs() for link in chain.links],
            )
        )
        self._hidden: list[onnxruntime.OrtValue] = []  # a binding does not keep memory alive
        self._size, self._bound_size = (0, 0), (0, 0)  # B and S of the ids, and of the hidden states bound last

    def bind_input(self, name: str, *where: Any) -> None:
        """Let every link that reads `name` read this memory."""
        for binding, inputs in zip(self.bindings, self._inputs, strict=True):
            if name in inputs:
                binding.bind_input(name, *where)

    def bind_output(self, name: str, *where: Any) -> None:
        """Let the link that makes `name` write to this memory."""
        for binding, outputs in zip(self.bindings, self._outputs, strict=True):
            if name in outputs:
                binding.bind_output(name, *where)

    def bind_ortvalue_output(self, name: str, value: onnxruntime.OrtValue) -> None:
        """Let the link that makes `name` write it here."""
        for binding, outputs in zip(self.bindings, self._outputs, strict=True):
            if name in outputs:
                binding.bind_ortvalue_output(name, value)

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Let every link that reads `name` read this array."""
        if name == self._chain.ids:
            self._size = (array.shape[0], array.shape[1])
        for binding, inputs in zip(self.bindings, self._inputs, strict=True):
            if name in inputs:
                binding.bind_cpu_input(name, array)

    def bind_hidden(self) -> None:
        """Bind hidden states of the size of the ids; nothing to do while that stays the same."""
        if self._size == self._bound_size:
            return
        from onnxruntime import OrtValue

        current: onnxruntime.OrtValue | None = None
        hidden: list[onnxruntime.OrtValue] = []
        for link, binding, outputs in zip(self._chain.links, self.bindings, self._outputs, strict=True):
            if link.hidden_in is not None:
                binding.bind_ortvalue_input(link.hidden_in, current)
            if link.hidden_out is not None:
                output = outputs[link.hidden_out]
                buffer = np.empty((*self._size, output.shape[2]), NUMPY_TYPES[output.type])
                kind = ONNX_TYPES[output.type]
                current = OrtValue.ortvalue_from_numpy_with_onnx_type(buffer, kind)
                binding.bind_ortvalue_output(link.hidden_out, current)
                hidden.append(current)
        self._hidden, self._bound_size = hidden, self._size
