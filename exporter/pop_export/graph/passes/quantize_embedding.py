"""Let `GatherBlockQuantized` look rows up in an embedding stored in blocks of small integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from pop_export.graph.passes.quantize_matmuls import (
    DOMAIN,
    add_initializer,
    replace_node,
    store_matrix,
    stored_inputs,
)
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix

SAME_BYTES = "pop.same_bytes_as"  # metadata of a weight: the other weight whose bytes in the file it reads


def quantize_embedding(
    model: ir.Model, scheme_of: Callable[[str], Scheme | None], matmuls: Mapping[str, QuantizedMatrix]
) -> dict[str, QuantizedMatrix]:
    """Quantise the table of every `Gather` of rows whose name `scheme_of` gives a scheme.

    A table that is also the head was quantised with it: both then read the same bytes, as [V, blocks, bytes of a block]
    there and as [V, bytes of a row] here.

    Args:
        model: changed in place.
        scheme_of: scheme by name of the weight.
        matmuls: what `quantize_matmuls` stored.

    Returns:
        By name of the weight, what was stored beside `matmuls`.
    """
    done: dict[str, QuantizedMatrix] = {}
    for node in list(model.graph):
        table = _table(node)
        scheme = scheme_of(table.name or "") if table is not None else None
        if table is None or scheme is None:
            continue
        name = table.name
        assert name is not None and table.const_value is not None
        if name not in matmuls and name not in done:
            done[name] = quantize_matrix(table.const_value.numpy(), scheme)
            store_matrix(model.graph, name, done[name])
        _replace(model.graph, node, name, matmuls.get(name) or done[name])
        if not table.uses():
            del model.graph.initializers[name]
    return done


def _table(node: ir.Node) -> ir.Value | None:
    """Return the constant matrix [V, E] whose rows a `Gather` takes, or None."""
    if node.domain != "" or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    table = node.inputs[0]
    if table is None or not table.is_initializer() or table.const_value is None or len(table.const_value.shape) != 2:
        return None
    return table if table.const_value.dtype.is_floating_point() else None


def _replace(graph: ir.Graph, node: ir.Node, name: str, matrix: QuantizedMatrix) -> None:
    """Put `GatherBlockQuantized`, and a `Slice` where the last block is padded, in the place of `node`."""
    scheme = matrix.scheme
    rows = graph.initializers.get(f"{name}.q.rows")
    if rows is None:
        rows = add_initializer(graph, f"{name}.q.rows", matrix.packed.reshape(len(matrix.packed), -1))
        rows.metadata_props[SAME_BYTES] = f"{name}.q"
    attributes = {"bits": scheme.bits, "block_size": scheme.block_size, "gather_axis": 0, "quantize_axis": 1}
    inputs = [rows, node.inputs[1], *stored_inputs(graph, name)]
    new = [ir.node("GatherBlockQuantized", inputs, attributes, domain=DOMAIN)]
    if matrix.num_columns % scheme.block_size:
        ends = (("start", 0), ("stop", matrix.num_columns), ("axis", -1))
        bounds = [add_initializer(graph, f"{name}.{end}", np.array([at], np.int64)) for end, at in ends]
        new.append(ir.node("Slice", [new[0].outputs[0], *bounds]))
    replace_node(graph, node, new)
