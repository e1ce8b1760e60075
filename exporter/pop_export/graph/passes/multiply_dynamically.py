"""Let products round their activations to 8 bits as they come, and multiply in integers."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import onnx_ir as ir

from pop_export.channel_matrix import ChannelMatrix, ChannelScheme
from pop_export.graph.passes.quantize_matmuls import DOMAIN, constant, matrix_weight, replace_node, replace_weights
from pop_export.split_matrix import AnyScheme, StoredMatrix

OP_TYPE = "DynamicQuantizeMatMul"


def multiply_dynamically(
    model: ir.Model, scheme_of: Callable[[str], AnyScheme | None], matrices: MutableMapping[str, StoredMatrix]
) -> int:
    """Put `DynamicQuantizeMatMul` in the place of every `MatMul` and `Gemm` whose weight has a `ChannelScheme`.

    It stands for the product while the graph is worked on; `round_by_row` gives it the form that is written. A weight
    that nothing reads any more is removed.

    Args:
        model: changed in place.
        scheme_of: scheme by name of the weight.
        matrices: as in `quantize_matmuls`.

    Returns:
        How many products were replaced.
    """

    def dynamic_scheme_of(name: str) -> ChannelScheme | None:
        scheme = scheme_of(name)
        return scheme if isinstance(scheme, ChannelScheme) else None

    def replace(node: ir.Node, name: str, matrix: StoredMatrix) -> None:
        assert isinstance(matrix, ChannelMatrix)
        _replace(model.graph, node, name, matrix)

    return replace_weights(model, matrix_weight, dynamic_scheme_of, matrices, replace)


def multiply_exactly(model: ir.Model) -> int:
    """Put products in fp32 by what the integers stand for in the place of dynamic ones, and return how many.

    The result is as close to the stored weights as fp32 is: what a graph is proven with.

    Args:
        model: changed in place; its weights are stored as they were.
    """
    nodes = [node for node in model.graph if node.op_type == OP_TYPE]
    for node in nodes:
        x, codes, scales = node.inputs
        cast = ir.node("Cast", [codes], {"to": ir.DataType.FLOAT})
        weight = ir.node("Mul", [cast.outputs[0], scales])  # [K, N] * [N]
        replace_node(model.graph, node, [cast, weight, ir.node("MatMul", [x, weight.outputs[0]])])
    return len(nodes)


def _replace(graph: ir.Graph, node: ir.Node, name: str, matrix: ChannelMatrix) -> None:
    """Put the dynamic product in the place of `node`, and an `Add` where a `Gemm` had a bias."""
    codes = constant(graph, f"{name}.codes", matrix.codes)
    scales = constant(graph, f"{name}.channel_scales", matrix.scales)
    new = [ir.node(OP_TYPE, [node.inputs[0], codes, scales], domain=DOMAIN)]
    new[0].outputs[0].type, new[0].outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        new.append(ir.node("Add", [new[0].outputs[0], node.inputs[2]]))
    replace_node(graph, node, new)
