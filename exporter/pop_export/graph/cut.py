"""Cut the prefill graph out of the decode graph: the planned layers keep nothing but their K and V projections."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from pop_export.graph.attention import SEQUENCE_AXIS
from pop_export.graph.passes.narrow_projections import narrow_projections
from pop_export.graph.passes.resolve_markers import marked_value
from pop_export.graph.passes.use_prefill_weights import linear_node, use_prefill_weights
from pop_export.reference import PrefillPlan, Surrogate
from pop_runtime.errors import ModelError

PASSED_ON = "layers.{layer}.passed_on"  # hidden states that leave a skipped layer with a surrogate


def cut_prefill_graph(decode: ir.Model, plan: PrefillPlan) -> ir.Model:
    """Return a copy of the decode graph in which the plan's skipped layers only write K and V, and which has no head.

    A skipped layer passes its input on unchanged, or with its surrogate added. A kept layer whose output nothing reads
    any more (the last layers, since prefill needs no logits) is reduced in the same way: that changes no value. Weights
    are shared with `decode`, except those that the plan brings itself.

    Raises:
        ModelError: a layer's attention or hidden states are not found in the graph.
    """
    model = decode.clone()
    graph = model.graph
    buffers = [value for value in graph.outputs if value.name and value.name.startswith("present.")]
    graph.outputs.clear()
    graph.outputs.extend(buffers)
    skipped = sorted(plan.skipped_layers)
    # Deepest first: of two neighbours the deeper one then hands on a value that the other replaces in its turn.
    for layer in reversed(skipped):
        output, entered = marked_value(model, f"layers.{layer}.output"), marked_value(model, f"layers.{layer}.input")
        passed_on = entered
        if layer in plan.surrogates:
            passed_on = _with_surrogate(model, layer, entered, plan.surrogates[layer])
        ir.convenience.replace_all_uses_with(output, passed_on)
        _write_kv_without_attention(model, layer)
    common_passes.RemoveUnusedNodesPass()(model)
    for layer in range(len(buffers) // 2):
        if layer not in skipped and _writer_of(model, layer).outputs[0].uses() == ():
            _write_kv_without_attention(model, layer)
    common_passes.RemoveUnusedNodesPass()(model)
    use_prefill_weights(model, plan.weights)
    narrow_projections(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.TopologicalSortPass()(model)
    return model


def surrogate_name(layer: int) -> str:
    """Return what the graph calls the matrix of a layer's surrogate."""
    return f"layers.{layer}.surrogate"


def _with_surrogate(model: ir.Model, layer: int, entered: ir.Value, surrogate: Surrogate) -> ir.Value:
    """Return `entered + x @ matrix`, where x is what the layer's K projection reads."""
    features = linear_node(model, f"{surrogate.module}.weight").inputs[0]
    assert features is not None
    flattened = features.producer()
    if flattened is not None and flattened.op_type == "Reshape":  # a Gemm reads all positions as one axis
        features = flattened.inputs[0]
    name = surrogate_name(layer)
    assert entered.dtype is not None
    values = surrogate.matrix.numpy().astype(entered.dtype.numpy())
    matrix = ir.val(name, const_value=ir.tensor(values, dtype=entered.dtype, name=name))
    model.graph.register_initializer(matrix)
    product = ir.node("MatMul", [features, matrix])
    total = ir.node("Add", [entered, product.outputs[0]])
    model.graph.extend([product, total])  # sorted into place at the end
    for node in (product, total):
        node.outputs[0].type, node.outputs[0].shape = entered.type, entered.shape
    total.outputs[0].name = PASSED_ON.format(layer=layer)
    return total.outputs[0]


def _writer_of(model: ir.Model, layer: int) -> ir.Node:
    """Return the node that writes the layer's K into its buffer: GroupQueryAttention, or `TensorScatter`."""
    for value in model.graph.outputs:
        if value.name == f"present.{layer}.key":
            node = value.producer()
            if node is not None and node.op_type in ("GroupQueryAttention", "TensorScatter"):
                return node
    raise ModelError(f"decode graph, layer {layer}: expected one node writing present.{layer}.key, found none")


def _write_kv_without_attention(model: ir.Model, layer: int) -> None:
    """Let `TensorScatter` write the layer's new K and V into the buffers, in place of its attention node.

    Attention over the buffer has them there already.
    """
    graph = model.graph
    attention = _writer_of(model, layer)
    if attention.op_type == "TensorScatter":
        return
    write_indices = marked_value(model, "past_lengths")  # [B]
    inputs = {value.name: value for value in graph.inputs}
    for index, part in ((1, "key"), (2, "value")):
        new = marked_value(model, f"layers.{layer}.{part}")  # [B, H_kv, S, D]
        past, present = inputs[f"past_key_values.{layer}.{part}"], attention.outputs[index]
        scatter = ir.node("TensorScatter", [past, new, write_indices], {"axis": SEQUENCE_AXIS, "mode": "linear"})
        scatter.outputs[0].type, scatter.outputs[0].shape = present.type, present.shape
        graph.insert_after(attention, scatter)
        name, present.name = present.name, None
        graph.outputs[list(graph.outputs).index(present)] = scatter.outputs[0]
        scatter.outputs[0].name = name
