"""Give the symbolic sizes of a graph the names that docs/bundle.md uses, where tracing numbered them."""

from __future__ import annotations

import re

import onnx_ir as ir

from pop_runtime.providers import CAPACITY

BATCH, NEW, TOTAL = "batch", "seq", "total"  # B, S and T


def name_sizes(model: ir.Model) -> int:
    """Rename the symbolic sizes of the graph's inputs wherever they occur, and return how many values they are in.

    ONNX Runtime fixes a size by its name: `pop-compile` does so with the capacity of the KV buffers.
    """
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        known = {"input_ids": (BATCH, NEW), "attention_mask": (BATCH, TOTAL)}
        sizes = known.get(value.name or "", (BATCH, None, CAPACITY, None))
        for size, name in zip(value.shape, sizes, strict=True):
            if isinstance(size, ir.SymbolicDim) and size.value is not None and name is not None:
                names[size.value] = name
    count = 0
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([_renamed(size, names) for size in value.shape])
            count += 1
    return count


def _renamed(size: int | ir.SymbolicDim, names: dict[str, str]) -> int | str | None:
    """Return a size, in which the names may be part of a formula."""
    if isinstance(size, int) or size.value is None:
        return size if isinstance(size, int) else None
    return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), size.value)
