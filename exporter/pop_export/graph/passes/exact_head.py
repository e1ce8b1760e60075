"""Let the fast kernels of a quantised head see what they round away of its input, in a row of its own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pop_export.graph.passes.quantize_matmuls import constant, replace_node

LARGEST_CODE = 127.0  # of the fast kernels' activations: a block's largest number becomes that
AFTER_HEAD = ("Reshape", "Cast", "Mul", "Div", "Tanh", "Add", "Concat")  # parts, a scale, a cap, a bias
SMALLEST_STEP = 1e-30  # of a block of zeros


def exact_head(model: ir.Model, logits: str = "logits") -> int:
    """Feed the product that gives the logits its input twice: rounded as its kernels round it, and what is left.

    Both rows then lose next to nothing: 15 bits of the input count in place of 8. The head reads one position, and
    reading its weights takes most of the time: the second row makes SmolLM2's step 3 to 8 % longer (docs/results.md).

    Before: `MatMulNBits(x, W)`; after: `Add(Split(MatMulNBits(Concat(r, x - r), W)))`, with
    `r = round(x / s) * s` in blocks of the weight's size and `s` their largest number over 127. A product whose last
    block is padded is left as it is.

    Returns:
        How many products were changed: a head has one for each of its parts.
    """
    count = 0
    pending = [value.producer() for value in model.graph.outputs if value.name == logits]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if node.op_type in AFTER_HEAD:
            pending += [value.producer() for value in node.inputs if value is not None]
        elif node.op_type == "MatMulNBits" and node.attributes.get_int("accuracy_level", 0) > 0:
            K, size = node.attributes.get_int("K", 0), node.attributes.get_int("block_size", 0)
            if K % size == 0:
                replace_node(model.graph, node, _twice(model.graph, node, K, size))
                count += 1
    return count


def _twice(graph: ir.Graph, node: ir.Node, K: int, size: int) -> list[ir.Node]:
    """Return the nodes that take the place of a product [B, K] or [B, 1, K] with a weight [N, K]."""
    N = node.attributes.get_int("N", 0)
    nodes: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes))
        return nodes[-1].outputs[0]

    x = add("Reshape", node.inputs[0], _integers(graph, f"blocks.{size}", [-1, K // size, size]))  # [B, blocks, size]
    largest = add("ReduceMax", add("Abs", x), _integers(graph, "last", [-1]), keepdims=1)  # [B, blocks, 1]
    step = add("Div", largest, constant(graph, "pop.head.largest_code", np.array(LARGEST_CODE, np.float32)))
    step = add("Max", step, constant(graph, "pop.head.smallest_step", np.array(SMALLEST_STEP, np.float32)))
    rounded = add("Mul", add("Round", add("Div", x, step)), step)
    both = add("Concat", rounded, add("Sub", x, rounded), axis=0)  # [2 B, blocks, size]
    entered = add("Reshape", both, _integers(graph, "inputs", [-1, K]))
    nodes.append(ir.node(node.op_type, [entered, *node.inputs[1:]], dict(node.attributes), domain=node.domain))
    # not ReduceSum: over a leading axis of two it takes ten times as long
    nodes.append(ir.node("Split", [nodes[-1].outputs[0]], {"axis": 0, "num_outputs": 2}, num_outputs=2))
    total = add("Add", *nodes[-1].outputs)  # [B, N]
    if node.outputs[0].shape is None or len(node.outputs[0].shape) == 3:
        add("Reshape", total, _integers(graph, f"outputs.{N}", [-1, 1, N]))
    return nodes


def _integers(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    return constant(graph, f"pop.head.{name}", np.array(values, np.int64))
