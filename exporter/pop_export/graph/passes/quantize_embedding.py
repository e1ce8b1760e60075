"""Let `GatherBlockQuantized` look rows up in an embedding stored in blocks of small integers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import numpy as np
import onnx_ir as ir

from pop_export.graph.passes.quantize_matmuls import (
    DOMAIN,
    constant,
    replace_node,
    replace_weights,
    stored_matrix,
)
from pop_export.quantized_matrix import QuantizedMatrix
from pop_export.split_matrix import AnyScheme, StoredMatrix, parts_of

SAME_BYTES = "pop.same_bytes_as"  # metadata of a weight: the other weight whose bytes in the file it reads


def quantize_embedding(
    model: ir.Model, scheme_of: Callable[[str], AnyScheme | None], matrices: MutableMapping[str, StoredMatrix]
) -> int:
    """Quantise the table of every `Gather` of rows whose name `scheme_of` gives a scheme.

    A table that is also the head is quantised once: both read the same bytes, the head as [V, blocks, bytes of a
    block] and the lookup as [V, bytes of a row].

    Args:
        model: changed in place.
        scheme_of: scheme by name of the weight; None leaves it as it is.
        matrices: as in `quantize_matmuls`.

    Returns:
        How many lookups were replaced.
    """

    def replace(node: ir.Node, name: str, matrix: StoredMatrix) -> None:
        _replace(model.graph, node, name, matrix)

    return replace_weights(model, embedding_table, scheme_of, matrices, replace)


def embedding_table(node: ir.Node) -> ir.Value | None:
    """Return the constant matrix [V, E] whose rows a `Gather` takes, or None."""
    if node.domain != "" or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    table = node.inputs[0]
    if table is None or not table.is_initializer() or table.const_value is None or len(table.const_value.shape) != 2:
        return None
    return table if table.const_value.dtype.is_floating_point() else None


def _replace(graph: ir.Graph, node: ir.Node, name: str, matrix: StoredMatrix) -> None:
    """Put the lookup in the matrix, or in the one of its two parts that has the row, in the place of `node`."""
    parts, ids = parts_of(name, matrix), node.inputs[1]
    assert ids is not None
    if len(parts) == 1:
        replace_node(graph, node, _lookup(graph, ids, *parts[0]))
        return
    bound = constant(graph, f"{name}.num_frequent", np.array(len(parts[0][1].packed), np.int64))
    last = constant(graph, f"{name}.last_frequent", np.array(len(parts[0][1].packed) - 1, np.int64))
    first = constant(graph, f"{name}.first", np.array(0, np.int64))
    axes = constant(graph, f"{name}.axis", np.array([-1], np.int64))
    is_frequent = ir.node("Less", [ids, bound])
    frequent_ids = ir.node("Min", [ids, last])
    below = ir.node("Sub", [ids, bound])
    rare_ids = ir.node("Max", [below.outputs[0], first])
    frequent = _lookup(graph, frequent_ids.outputs[0], *parts[0])
    rare = _lookup(graph, rare_ids.outputs[0], *parts[1])
    choice = ir.node("Unsqueeze", [is_frequent.outputs[0], axes])
    row = ir.node("Where", [choice.outputs[0], frequent[-1].outputs[0], rare[-1].outputs[0]])
    replace_node(graph, node, [is_frequent, frequent_ids, below, rare_ids, *frequent, *rare, choice, row])


def _lookup(graph: ir.Graph, ids: ir.Value, name: str, matrix: QuantizedMatrix) -> list[ir.Node]:
    """Return `GatherBlockQuantized`, and a `Slice` where the last block is padded."""
    scheme = matrix.scheme
    rows = constant(graph, f"{name}.rows", matrix.packed.reshape(len(matrix.packed), -1))
    rows.metadata_props[SAME_BYTES] = f"{name}.q"
    codes, *scales = stored_matrix(graph, name, matrix)
    attributes = {"bits": scheme.bits, "block_size": scheme.block_size, "gather_axis": 0, "quantize_axis": 1}
    nodes = [ir.node("GatherBlockQuantized", [rows, ids, *scales], attributes, domain=DOMAIN)]
    if matrix.num_columns % scheme.block_size:
        ends = (("start", 0), ("stop", matrix.num_columns), ("axis", -1))
        bounds = [constant(graph, f"{name}.{end}", np.array([at], np.int64)) for end, at in ends]
        nodes.append(ir.node("Slice", [nodes[0].outputs[0], *bounds]))
    if not codes.uses():
        del graph.initializers[f"{name}.q"]
    return nodes
