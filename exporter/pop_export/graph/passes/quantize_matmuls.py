"""Let `MatMulNBits` multiply by weights in blocks of small integers, in place of `MatMul` and `Gemm`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix

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
    if len(weight.const_value.shape) != 2 or not plain or node.attributes.get_int("transA", 0):
        return None
    return weight


def quantize_matmuls(
    model: ir.Model, scheme_of: Callable[[str], Scheme | None], accuracy_level: int = INT8_ACTIVATIONS
) -> dict[str, QuantizedMatrix]:
    """Quantise the weight of every product whose name `scheme_of` gives a scheme.

    A weight that nothing reads any more is removed; one that something else reads (an embedding) stays.

    Returns:
        By name of the weight, the matrix [N, K] that was stored for it.
    """
    done: dict[str, QuantizedMatrix] = {}
    for node in list(model.graph):
        weight = matrix_weight(node)
        scheme = scheme_of(weight.name or "") if weight is not None else None
        if weight is None or scheme is None:
            continue
        name = weight.name
        assert name is not None and weight.const_value is not None
        if name not in done:
            stored = weight.const_value.numpy()
            is_rows = node.op_type == "Gemm" and node.attributes.get_int("transB", 0)  # [N, K], else [K, N]
            done[name] = quantize_matrix(stored if is_rows else stored.T, scheme)
            store_matrix(model.graph, name, done[name])
        _replace(model.graph, node, name, done[name], accuracy_level)
        if not weight.uses():
            del model.graph.initializers[name]
    if done:
        model.opset_imports.setdefault(DOMAIN, 1)
    return done


def store_matrix(graph: ir.Graph, name: str, matrix: QuantizedMatrix) -> None:
    """Add the numbers of a quantised weight to the graph."""
    for part, values in (("q", matrix.packed), ("scales", matrix.scales), ("zero_points", matrix.zero_points)):
        if values is not None:
            add_initializer(graph, f"{name}.{part}", values)


def add_initializer(graph: ir.Graph, name: str, values: np.ndarray) -> ir.Value:
    """Add a constant to the graph and return it."""
    value = ir.val(name, const_value=ir.tensor(values, name=name))
    graph.register_initializer(value)
    return value


def stored_inputs(graph: ir.Graph, name: str) -> list[ir.Value]:
    """Return scales and, where there are any, zero points of a quantised weight."""
    wanted = (f"{name}.scales", f"{name}.zero_points")
    return [graph.initializers[part] for part in wanted if part in graph.initializers]


def _replace(graph: ir.Graph, node: ir.Node, name: str, matrix: QuantizedMatrix, accuracy_level: int) -> None:
    """Put `MatMulNBits`, and an `Add` where a `Gemm` had a bias, in the place of `node`."""
    scheme = matrix.scheme
    attributes = {
        "K": matrix.num_columns,
        "N": len(matrix.packed),
        "bits": scheme.bits,
        "block_size": scheme.block_size,
        "accuracy_level": accuracy_level,
    }
    weights = [graph.initializers[f"{name}.q"], *stored_inputs(graph, name)]
    new = [ir.node("MatMulNBits", [node.inputs[0], *weights], attributes, domain=DOMAIN)]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        new.append(ir.node("Add", [new[0].outputs[0], node.inputs[2]]))
    replace_node(graph, node, new)


def replace_node(graph: ir.Graph, node: ir.Node, new: list[ir.Node]) -> None:
    """Put nodes, the last of which gives the result, in the place of one of a single output."""
    old, result, name = node.outputs[0], new[-1].outputs[0], node.outputs[0].name
    result.type, result.shape = old.type, old.shape
    graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = name
