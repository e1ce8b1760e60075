"""Let every `TopK` give its results sorted, which is all that TensorRT's parser takes."""

from __future__ import annotations

import onnx_ir as ir


def sort_topk(model: ir.Model) -> int:
    """Set `sorted` where a `TopK` leaves the order open, and return how many did.

    A sorted result is one of those that the operator may give, so nothing that read it may depend on another.
    """
    count = 0
    for node in model.graph:
        if node.op_type == "TopK" and node.domain == "" and node.attributes.get_int("sorted", 1) == 0:
            node.attributes["sorted"] = ir.AttrInt64("sorted", 1)
            count += 1
    return count
