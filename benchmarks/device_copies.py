"""Which values of a graph CUDA would have to copy between the computer's memory and its own in every run."""

from __future__ import annotations

import onnx_ir as ir

# Inputs that CUDA's kernels read in the computer's memory: sizes, axes, bounds.
READ_ON_THE_CPU = {
    "ConstantOfShape": {0}, "Expand": {1}, "GroupQueryAttention": {6}, "Pad": {1, 3}, "Range": {0, 1, 2},
    "ReduceSum": {1}, "Reshape": {1}, "Slice": {1, 2, 3, 4}, "Split": {1}, "Squeeze": {1}, "Tile": {1}, "TopK": {1},
    "Unsqueeze": {1},
}  # fmt: skip


def copied_values(graph: ir.Model) -> list[str]:
    """Return operator and name for each value that a node on CUDA reads though it was computed on the CPU.

    ONNX Runtime leaves a node to the CPU if all that it reads comes from sizes, which `Shape` puts there.
    """
    on_cpu: set[str | None] = set()
    copied = []
    for node in graph.graph:
        computed = [(at, value) for at, value in enumerate(node.inputs) if value is not None and not _is_stored(value)]
        beyond = [(at, value) for at, value in computed if at not in READ_ON_THE_CPU.get(node.op_type, set())]
        if node.op_type in ("Shape", "Size") or (computed and all(value.name in on_cpu for _, value in computed)):
            on_cpu |= {value.name for value in node.outputs}
        else:
            copied += [f"{node.op_type} {value.name}" for _, value in beyond if value.name in on_cpu]
    return copied


def _is_stored(value: ir.Value) -> bool:
    return value.is_initializer() or (value.producer() is not None and value.producer().op_type == "Constant")  # type: ignore[union-attr]
