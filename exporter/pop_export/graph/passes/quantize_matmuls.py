"""Let `MatMulNBits` multiply by weights in blocks of small integers, in place of `MatMul` and `Gemm`."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import numpy as np
import onnx_ir as ir

from pop_export.quantized_matrix import QuantizedMatrix
from pop_export.split_matrix import AnyScheme, StoredMatrix, parts_of, store_matrix

DOMAIN = "com.microsoft"
INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level of its fast CPU kernels: they round the other side to int8 as well


def matrix_weight(node: ir.Node) -> ir.Value | None:
    """Return the constant matrix that a `MatMul` or a plain `Gemm` multiplies by, or None."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    weight = node.inputs[1]
    if weight is None or not weight.is_initializer() or weight.const_value is None:
        return None
    plain = all(node.attributes.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if len(weight.const_value.shape) != 2 or not plain or _int(node, "transA"):
        return None
    return weight


def quantize_matmuls(
    model: ir.Model,
    scheme_of: Callable[[str], AnyScheme | None],
    matrices: MutableMapping[str, StoredMatrix],
    accuracy_level: int = INT8_ACTIVATIONS,
) -> int:
    """Quantise the weight of every product whose name `scheme_of` gives a scheme.

    A weight that nothing reads any more is removed; one that something else reads (an embedding) stays.

    Args:
        model: changed in place.
        scheme_of: scheme by name of the weight; None leaves it as it is.
        matrices: by name of the weight, what is stored for it, [N, K]; those already there are taken as they are, so
            that several graphs share them, and new ones are added.
        accuracy_level: of the kernels.

    Returns:
        How many products were replaced.
    """

    def replace(node: ir.Node, name: str, matrix: StoredMatrix) -> None:
        _replace(model.graph, node, name, matrix, accuracy_level)

    return replace_weights(model, matrix_weight, scheme_of, matrices, replace)


def replace_weights(
    model: ir.Model,
    weight_of: Callable[[ir.Node], ir.Value | None],
    scheme_of: Callable[[str], AnyScheme | None],
    matrices: MutableMapping[str, StoredMatrix],
    replace: Callable[[ir.Node, str, StoredMatrix], None],
) -> int:
    """Store each weight whose name has a scheme, once, and let its readers read what is stored.

    A weight that nothing reads any more is removed; one that something else reads stays.

    Args:
        model: changed in place.
        weight_of: the weight that a node reads, or None for nodes that are left alone.
        scheme_of: scheme by name of the weight; None leaves it as it is.
        matrices: by name of the weight, what is stored for it; those already there are taken as they are.
        replace: puts others in the place of a node, given the weight's name and what is stored for it.

    Returns:
        How many nodes were replaced.
    """
    num_replaced = 0
    for node in list(model.graph):
        weight = weight_of(node)
        scheme = scheme_of(weight.name or "") if weight is not None else None
        if weight is None or scheme is None:
            continue
        name = weight.name
        assert name is not None and weight.const_value is not None
        if name not in matrices:
            stored = weight.const_value.numpy()
            is_rows = node.op_type == "Gather" or bool(_int(node, "transB"))  # [N, K], else [K, N]
            matrices[name] = store_matrix(stored if is_rows else stored.T, scheme)
        replace(node, name, matrices[name])
        num_replaced += 1
        if not weight.uses():
            del model.graph.initializers[name]
    if num_replaced:
        model.opset_imports.setdefault(DOMAIN, 1)
    return num_replaced


def stored_matrix(graph: ir.Graph, name: str, matrix: QuantizedMatrix) -> list[ir.Value]:
    """Return the numbers of a quantised weight as values of the graph: codes, fp32 scales and any zero points."""
    values = [constant(graph, f"{name}.q", matrix.packed), _scales(graph, f"{name}.scales", matrix.scales)]
    if matrix.zero_points is not None:
        values.append(constant(graph, f"{name}.zero_points", matrix.zero_points))
    return values


def _scales(graph: ir.Graph, name: str, scales: np.ndarray) -> ir.Value:
    """Return scales as the kernels take them: fp32, which ONNX Runtime makes of 16 bits once, when it loads."""
    stored = constant(graph, name, scales)
    if scales.dtype == np.float32:
        return stored
    for reader, _ in stored.uses():
        return reader.outputs[0]  # the same cast for head and embedding
    cast = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT})
    cast.outputs[0].name = f"{name}.fp32"
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(scales.shape)
    graph.insert_before(graph[0], cast)
    return cast.outputs[0]


def constant(graph: ir.Graph, name: str, values: np.ndarray) -> ir.Value:
    """Return the constant of that name, added to the graph if it is not there yet."""
    if name not in graph.initializers:
        graph.register_initializer(ir.val(name, const_value=ir.tensor(values, name=name)))
    return graph.initializers[name]


def _replace(graph: ir.Graph, node: ir.Node, name: str, matrix: StoredMatrix, accuracy_level: int) -> None:
    """Put `MatMulNBits` in the place of `node`: one a part of the matrix, and an `Add` where a `Gemm` had a bias."""
    new = [_product(graph, node, *part, accuracy_level) for part in parts_of(name, matrix)]
    if len(new) > 1:
        new.append(ir.node("Concat", [product.outputs[0] for product in new], {"axis": -1}))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        new.append(ir.node("Add", [new[-1].outputs[0], node.inputs[2]]))
    replace_node(graph, node, new)


def _product(graph: ir.Graph, node: ir.Node, name: str, matrix: QuantizedMatrix, accuracy_level: int) -> ir.Node:
    """Return the product of what `node` multiplies with a matrix."""
    scheme = matrix.scheme
    attributes = {
        "K": matrix.num_columns,
        "N": len(matrix.packed),
        "bits": scheme.bits,
        "block_size": scheme.block_size,
        "accuracy_level": accuracy_level,
    }
    product = ir.node("MatMulNBits", [node.inputs[0], *stored_matrix(graph, name, matrix)], attributes, domain=DOMAIN)
    old = node.outputs[0]
    if old.shape is not None:
        product.outputs[0].type, product.outputs[0].shape = old.type, ir.Shape([*old.shape[:-1], len(matrix.packed)])
    return product


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


def replace_node(graph: ir.Graph, node: ir.Node, new: list[ir.Node]) -> None:
    """Put nodes, the last of which gives the result, in the place of one of a single output."""
    old, result, name = node.outputs[0], new[-1].outputs[0], node.outputs[0].name
    result.type, result.shape = old.type, old.shape
    graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = name
