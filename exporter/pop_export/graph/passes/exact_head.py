"""Keep the few loud channels of the head's input from the kernels that round it: they make the others lose most."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pop_export.channel_matrix import ChannelMatrix
from pop_export.graph.passes.quantize_matmuls import constant, replace_node
from pop_export.split_matrix import StoredMatrix, parts_of

AFTER_HEAD = ("Reshape", "Cast", "Mul", "Div", "Tanh", "Add", "Concat")  # parts, a scale, a cap, a bias
NUM_LOUD = 4  # channels: they are two thirds of what rounding the head's input costs SmolLM2; docs/experiments.md
PREFIX = "pop.head."


def exact_head(
    model: ir.Model, magnitude: NDArray[np.float32], matrices: Mapping[str, StoredMatrix], logits: str = "logits"
) -> int:
    """Multiply the NUM_LOUD largest channels of the head's input in fp32, and round the others without them.

    The fast kernels round an input to 8 bits in blocks whose step is that of their largest number. A final norm lets a
    few channels through that are many times as large as the rest, always the same ones.

    Before: `MatMulNBits(x, W)`; after: `Add(MatMulNBits(x * m, W), MatMul(Gather(x, loud), W[:, loud].T))`, with 0 in
    `m` for loud channels and 1 for others, and `W` as it is stored.

    Args:
        model: changed in place.
        magnitude: [K] of the channels of the head's input.
        matrices: what is stored for the graph's weights, by name.
        logits: name of the output that the head gives.

    Returns:
        How many products were changed: a head has one for each of its parts.
    """
    blockwise = {name: matrix for name, matrix in matrices.items() if not isinstance(matrix, ChannelMatrix)}
    stored = {f"{part}.q": matrix for name in blockwise for part, matrix in parts_of(name, blockwise[name])}
    loud = np.sort(np.argsort(-magnitude, kind="stable")[:NUM_LOUD])
    count = 0
    pending = [value.producer() for value in model.graph.outputs if value.name == logits]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if node.op_type in AFTER_HEAD:
            pending += [value.producer() for value in node.inputs if value is not None]
        elif node.op_type == "MatMulNBits" and node.attributes.get_int("accuracy_level", 0) > 0:
            weight = node.inputs[1]
            assert weight is not None and weight.name is not None
            if node.attributes.get_int("K", 0) == len(magnitude) and weight.name in stored:
                columns = np.ascontiguousarray(stored[weight.name].dequantized()[:, loud].T)  # [loud, N]
                replace_node(model.graph, node, _apart(model.graph, node, weight.name, loud, columns))
                count += 1
    return count


def _apart(graph: ir.Graph, node: ir.Node, name: str, loud: np.ndarray, columns: np.ndarray) -> list[ir.Node]:
    """Return the nodes that take the place of a product with a weight of which `columns` [loud, N] are given."""
    K = node.attributes.get_int("K", 0)
    mask = np.ones(K, np.float32)
    mask[loud] = 0
    x = node.inputs[0]
    quiet = ir.node("Mul", [x, constant(graph, f"{PREFIX}quiet", mask)])
    rounded = ir.node(node.op_type, [quiet.outputs[0], *node.inputs[1:]], dict(node.attributes), domain=node.domain)
    taken = ir.node("Gather", [x, constant(graph, f"{PREFIX}loud", loud.astype(np.int64))], {"axis": -1})
    exact = ir.node("MatMul", [taken.outputs[0], constant(graph, f"{name}.loud", columns)])
    total = ir.node("Add", [rounded.outputs[0], exact.outputs[0]])
    return [quiet, rounded, taken, exact, total]
