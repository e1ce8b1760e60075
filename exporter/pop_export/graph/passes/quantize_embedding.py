"""Let `GatherBlockQuantized` look rows up in an embedding stored in blocks of small integers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import numpy as np
import onnx_ir as ir

from pop_export.graph.passes.quantize_matmuls import (
    DOMAIN,
    constant,
    replace_node,
    stored_matrix,
)
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix

SAME_BYTES = "pop.same_bytes_as"  # metadata of a weight: the other weight whose bytes in the file it reads


def quantize_embedding(
    model: ir.Model, scheme_of: Callable[[str], Scheme | None], matrices: MutableMapping[str, QuantizedMatrix]
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
    num_replaced = 0
    for node in list(model.graph):
        table = embedding_table(node)
        scheme = scheme_of(table.name or "") if table is not None else None
        if table is None or scheme is None:
            continue
        name = table.name
        assert name is not None and table.const_value is not None
        if name not in matrices:
            matrices[name] = quantize_matrix(table.const_value.numpy(), scheme)
        _replace(model.graph, node, name, matrices[name])
        num_replaced += 1
        if not table.uses():
            del model.graph.initializers[name]
    if num_replaced:
        model.opset_imports.setdefault(DOMAIN, 1)
    return num_replaced


def embedding_table(node: ir.Node) -> ir.Value | None:
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
    rows = constant(graph, f"{name}.rows", matrix.packed.reshape(len(matrix.packed), -1))
    rows.metadata_props[SAME_BYTES] = f"{name}.q"
    codes, *scales = stored_matrix(graph, name, matrix)
    attributes = {"bits": scheme.bits, "block_size": scheme.block_size, "gather_axis": 0, "quantize_axis": 1}
    new = [ir.node("GatherBlockQuantized", [rows, node.inputs[1], *scales], attributes, domain=DOMAIN)]
    if matrix.num_columns % scheme.block_size:
        ends = (("start", 0), ("stop", matrix.num_columns), ("axis", -1))
        bounds = [constant(graph, f"{name}.{end}", np.array([at], np.int64)) for end, at in ends]
        new.append(ir.node("Slice", [new[0].outputs[0], *bounds]))
    if not codes.uses():
        del graph.initializers[f"{name}.q"]
    replace_node(graph, node, new)
