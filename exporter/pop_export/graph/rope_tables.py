"""Cosines and sines of every position, as the graph itself computes them: `GroupQueryAttention` looks them up."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
import onnxruntime

from pop_export.graph.passes.rotate_in_attention import TABLE_OF

WIDTH_STEP = 8  # GroupQueryAttention takes tables of multiples of it
LARGEST_SHARE = 0.03  # of the weights' bytes: a small model for very long texts keeps computing its own
PROBE = (7, 3)  # positions already cached and new: their rows have to be those of the table


def attach_rope_tables(decode: ir.Model, prefill: ir.Model, max_positions: int) -> int:
    """Add to both graphs a table [max_positions, D / 2] for each value that rotary embeddings turn by.

    Returns:
        How many tables were added.
    """
    values = {value.name: value for node in decode.graph if node.op_type == "RotaryEmbedding" and len(node.inputs) == 3
              for value in node.inputs[1:] if value is not None}  # fmt: skip
    weights = sum(value.const_value.nbytes for value in decode.graph.initializers.values() if value.const_value)
    count = 0
    for name, value in values.items():
        table = _table(decode, value, max_positions, LARGEST_SHARE * weights)
        if table is None:
            continue
        for model in (decode, prefill):
            title = f"pop.rope.{name}"
            model.graph.register_initializer(ir.val(title, const_value=ir.tensor(table, name=title)))
            model.metadata_props[f"{TABLE_OF}{name}"] = title
        count += 1
    return count


def _table(model: ir.Model, value: ir.Value, max_positions: int, most_bytes: float) -> np.ndarray | None:
    """Return the value at every position, or None where a table cannot stand for it."""
    graph = ir.convenience.extract(model.graph, list(model.graph.inputs), [value])
    for taken in list(graph.inputs):
        if not taken.uses():
            graph.inputs.remove(taken)
        elif taken.name not in ("input_ids", "attention_mask") and any(
            user.op_type != "Shape" for user, _ in taken.uses()
        ):
            return None
    graph.outputs[0].type = value.type or ir.TensorType(ir.DataType.FLOAT)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rope.onnx"
        ir.save(ir.Model(graph, ir_version=model.ir_version), path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    width = _rows(session, 0, 1).shape[1]
    past, new = PROBE
    if width % WIDTH_STEP or 2 * width * max_positions * 4 > most_bytes or max_positions < past + new:
        return None
    table = _rows(session, 0, max_positions)
    return table if np.array_equal(_rows(session, past, new), table[past : past + new]) else None


def _rows(session: onnxruntime.InferenceSession, past: int, new: int) -> np.ndarray:
    """Return what the graph computes for `new` tokens after `past` others, [new, D / 2]."""
    known = {"input_ids": np.zeros((1, new), np.int64), "attention_mask": np.ones((1, past + new), np.int64)}
    feeds = {}
    for taken in session.get_inputs():
        if taken.name in known:
            feeds[taken.name] = known[taken.name]
        else:  # a buffer, for the size of its batch
            sizes = [size if isinstance(size, int) else 1 for size in taken.shape]
            feeds[taken.name] = np.zeros(sizes, np.float16 if "float16" in taken.type else np.float32)
    rows: np.ndarray = session.run(None, feeds)[0]
    return rows.reshape(-1, rows.shape[-1])
