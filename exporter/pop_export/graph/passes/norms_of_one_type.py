"""Give each RMS norm inputs of one type."""

from __future__ import annotations

import onnx_ir as ir


def norms_of_one_type(model: ir.Model) -> int:
    """Cast what a norm reads to the type of its scale where they differ, and return how many did.

    Gemma's code normalises in fp32 whatever its weights are. `RMSNormalization` takes an input in 16 bits beside such a
    scale, but ONNX Runtime's CPU kernels (1.32) have one type for both, and it does not load the graph.
    """
    count = 0
    for node in list(model.graph):
        if (node.domain, node.op_type) != ("", "RMSNormalization"):
            continue
        entered, scale = node.inputs
        if entered is None or scale is None or scale.dtype is None or entered.dtype == scale.dtype:
            continue
        cast = ir.node("Cast", [entered], {"to": scale.dtype})
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(scale.dtype), entered.shape
        model.graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])
        count += 1
    return count
