"""Let one operator add to the residual stream and normalise it."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization


def fuse_residual_norms(model: ir.Model) -> int:
    """Replace each `Add` that an `RMSNormalization` reads, and the norm, by `SkipSimplifiedLayerNormalization`.

    The rule is onnxscript's. It knows the norm by the name that ONNX Runtime has for it outside the standard, so norms
    carry that one meanwhile; those that follow no addition get their own back. It names means that nothing reads; ONNX
    Runtime would write them at every step, so they lose their names.

    Returns:
        How many pairs were fused.
    """
    norms = [node for node in model.graph if (node.domain, node.op_type) == ("", "RMSNormalization")]
    for node in norms:
        node.op_type = "SimplifiedLayerNormalization"
    count = fuse_skip_rms_normalization(model)
    for node in model.graph:
        if node.op_type == "SimplifiedLayerNormalization":
            node.op_type = "RMSNormalization"
        elif node.op_type == "SkipSimplifiedLayerNormalization":
            for value in node.outputs[1:]:
                if not value.uses() and not value.is_graph_output():
                    value.name = ""
    return count
