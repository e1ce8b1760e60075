"""Let dynamic integer products round the activations of each token by that token's own range."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pop_export.graph.passes.multiply_dynamically import OP_TYPE
from pop_export.graph.passes.quantize_matmuls import DOMAIN, constant, replace_node

LARGEST_CODE = 127  # a token's largest number becomes that, above or below the code of zero
ZERO_CODE = 128
SMALLEST_RANGE = 1e-30  # of a token of zeros


def round_by_row(model: ir.Model) -> int:
    """Replace every `DynamicQuantizeMatMul`, which has one range for all tokens, by a product with a range per token.

    The first token of a sequence has activations a thousand times as large as the others': in one range with it they
    are rounded to nothing. With ranges of their own, what a token gets does not depend on which others it is read with.

    Before: `DynamicQuantizeMatMul(x, W, s)`. After: `MatMulIntegerToFloat(QuantizeLinear(x / r, 1 / 127), W, s) * r`
    with `r` the largest magnitude in each row of x; products that read the same x share its codes.

    Args:
        model: changed in place.

    Returns:
        How many products were replaced.
    """
    graph = model.graph
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    nodes = [node for node in graph if node.op_type == OP_TYPE]
    for node in nodes:
        x, codes, scales = node.inputs
        assert x is not None
        if x not in rounded:
            rounded[x] = _rounded(graph, node, x)
        entered, largest = rounded[x]
        inputs = [entered, codes, _step(graph), scales, _zero(graph)]
        product = ir.node("MatMulIntegerToFloat", inputs, domain=DOMAIN)
        product.outputs[0].type, product.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        replace_node(graph, node, [product, ir.node("Mul", [product.outputs[0], largest])])
    return len(nodes)


def _rounded(graph: ir.Graph, reader: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return x [..., K] as uint8 codes, and the largest magnitude of each row [..., 1], made before `reader`."""
    axes = constant(graph, "pop.rows.axes", np.array([-1], np.int64))
    smallest = constant(graph, "pop.rows.smallest", np.array(SMALLEST_RANGE, np.float32))
    magnitudes = ir.node("Abs", [x])
    ranges = ir.node("ReduceMax", [magnitudes.outputs[0], axes], {"keepdims": 1})
    largest = ir.node("Max", [ranges.outputs[0], smallest])
    scaled = ir.node("Div", [x, largest.outputs[0]])
    codes = ir.node("QuantizeLinear", [scaled.outputs[0], _step(graph), _zero(graph)])
    graph.insert_before(reader, [magnitudes, ranges, largest, scaled, codes])
    for node in (magnitudes, scaled, codes):
        node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    codes.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    for node in (ranges, largest):
        node.outputs[0].type = x.type
        node.outputs[0].shape = None if x.shape is None else ir.Shape([*x.shape[:-1], 1])
    return codes.outputs[0], largest.outputs[0]


def _step(graph: ir.Graph) -> ir.Value:
    return constant(graph, "pop.rows.step", np.array(1 / LARGEST_CODE, np.float32))


def _zero(graph: ir.Graph) -> ir.Value:
    return constant(graph, "pop.rows.zero", np.array(ZERO_CODE, np.uint8))
