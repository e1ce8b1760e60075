"""Let quantised products round nothing but their weights."""

from __future__ import annotations

import onnx_ir as ir


def exact_kernels(model: ir.Model, bits: tuple[int, ...] = (4, 8)) -> int:
    """Take away the leave that `MatMulNBits` nodes have to round their activations, and return how many had it.

    The result is as close to the stored weights as fp32 is. One token then takes many times as long.

    Args:
        model: changed in place.
        bits: of the weights of the nodes that are meant.
    """
    count = 0
    for node in model.graph:
        if node.op_type == "MatMulNBits" and node.attributes["bits"].as_int() in bits:
            count += node.attributes.pop("accuracy_level", None) is not None
    return count
