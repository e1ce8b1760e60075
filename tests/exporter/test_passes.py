"""Graph passes on graphs built by hand."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from pop_export.graph.passes.name_sizes import name_sizes
from pop_export.graph.passes.norms_of_one_type import norms_of_one_type
from pop_export.graph.passes.resolve_markers import marked_value, resolve_markers
from pop_export.graph.passes.sort_topk import sort_topk
from pop_export.graph.passes.store_weights_as_read import store_weights_as_read
from pop_runtime.errors import ModelError

E, V = 6, 5
WEIGHT = np.arange(V * E, dtype=np.float32).reshape(V, E)


def _weight(name: str) -> ir.Value:
    return ir.val(name, const_value=ir.tensor(WEIGHT.copy(), name=name))


def _model(inputs: list[ir.Value], outputs: list[ir.Value], nodes: list[ir.Node], weights: list[ir.Value]) -> ir.Model:
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, opset_imports={"": 24, "pop": 1}, name="hand")
    return ir.Model(graph, ir_version=10)


def _named(node: ir.Node, name: str, shape: list[int | str]) -> ir.Value:
    value = node.outputs[0]
    value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    return value


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    proto = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, feeds)


def _linear(weight: ir.Value) -> tuple[ir.Value, list[ir.Node], ir.Value]:
    x = ir.val("x", ir.DataType.FLOAT, ["B", 1, E])
    transpose = ir.node("Transpose", [weight], {"perm": [1, 0]})
    matmul = ir.node("MatMul", [x, transpose.outputs[0]])
    return x, [transpose, matmul], _named(matmul, "y", ["B", 1, V])


def test_a_weight_that_only_a_transpose_reads_is_stored_transposed():
    weight = _weight("w")
    x, nodes, y = _linear(weight)
    model = _model([x], [y], nodes, [weight])
    given = np.ones((2, 1, E), np.float32)
    before = _run(model, {"x": given})
    assert store_weights_as_read(model) == 1
    assert [node.op_type for node in model.graph] == ["MatMul"]
    assert model.graph.initializers["w"].const_value.numpy().shape == (E, V)
    np.testing.assert_array_equal(_run(model, {"x": given}), before)


def test_a_weight_that_is_read_both_ways_is_stored_once_as_it_is():
    weight = _weight("embedding")
    x, nodes, y = _linear(weight)
    ids = ir.val("ids", ir.DataType.INT64, ["B", "S"])
    gather = ir.node("Gather", [weight, ids])
    model = _model([x, ids], [y, _named(gather, "rows", ["B", "S", E])], [*nodes, gather], [weight])
    feeds = {"x": np.ones((2, 1, E), np.float32), "ids": np.array([[0, 4]])}
    before = _run(model, feeds)
    assert store_weights_as_read(model) == 1
    assert "Gemm" in [node.op_type for node in model.graph]
    assert sum(value.const_value.size == V * E for value in model.graph.initializers.values()) == 1
    for now, then in zip(_run(model, feeds), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_graph_without_transposed_weights_is_left_alone():
    x = ir.val("x", ir.DataType.FLOAT, ["B", E])
    transpose = ir.node("Transpose", [x], {"perm": [1, 0]})  # of an activation
    model = _model([x], [_named(transpose, "y", [E, "B"])], [transpose], [])
    assert store_weights_as_read(model) == 0
    assert [node.op_type for node in model.graph] == ["Transpose"]


def _marked(value: ir.Value, name: str) -> ir.Node:
    return ir.node("Marker", [value], {"name": name}, domain="pop")


def test_markers_name_their_value_and_vanish():
    x = ir.val("x", ir.DataType.FLOAT, [E])
    relu = ir.node("Relu", [x])
    first = _marked(relu.outputs[0], "layers.0.output")
    second = _marked(first.outputs[0], "layers.1.input")
    neg = ir.node("Neg", [second.outputs[0]])
    model = _model([x], [_named(neg, "y", [E])], [relu, first, second, neg], [])
    assert resolve_markers(model) == 2
    assert [node.op_type for node in model.graph] == ["Relu", "Neg"]
    assert marked_value(model, "layers.0.output") is marked_value(model, "layers.1.input") is relu.outputs[0]
    assert relu.outputs[0].name == "layers.0.output"


def test_a_marker_on_a_graph_input_does_not_rename_it():
    x = ir.val("x", ir.DataType.FLOAT, [E])
    marker = _marked(x, "layers.0.input")
    neg = ir.node("Neg", [marker.outputs[0]])
    model = _model([x], [_named(neg, "y", [E])], [marker, neg], [])
    resolve_markers(model)
    assert x.name == "x"
    assert marked_value(model, "layers.0.input") is x


def test_a_graph_without_markers_is_left_alone_and_an_unknown_value_is_one_line():
    x = ir.val("x", ir.DataType.FLOAT, [E])
    neg = ir.node("Neg", [x])
    model = _model([x], [_named(neg, "y", [E])], [neg], [])
    assert resolve_markers(model) == 0
    with pytest.raises(ModelError, match=r"expected the value layers\.7\.key, found none"):
        marked_value(model, "layers.7.key")


def test_every_topk_gives_its_results_sorted():
    x = ir.val("x", ir.DataType.FLOAT, ["B", E])
    k = ir.val("k", const_value=ir.tensor(np.array([2], np.int64), name="k"))
    nodes = [ir.node("TopK", [x, k], {"sorted": order}, num_outputs=2) for order in (0, 1)]
    model = _model([x], [_named(nodes[0], "y", ["B", 2]), _named(nodes[1], "z", ["B", 2])], nodes, [k])
    given = {"x": np.array([[3, 1, 2, 9, 4, 5]], np.float32)}
    assert sort_topk(model) == 1 and sort_topk(model) == 0
    assert [found.tolist() for found in _run(model, given)] == [[[9, 5]], [[9, 5]]]


def test_numbered_sizes_get_the_names_of_the_documentation():
    ids = ir.val("input_ids", ir.DataType.INT64, ["s7", "s3"])
    past = ir.val("past_key_values.0.key", ir.DataType.FLOAT, ["s7", 2, "s9", 4])
    shape = ir.node("Shape", [past])
    y = _named(ir.node("Identity", [past]), "present.0.key", ["s7", 2, "s9", 4])
    z = _named(ir.node("Identity", [past]), "z", ["s9 + s33", 2, None, 4])
    model = _model([ids, past], [y], [shape, y.producer(), z.producer()], [])
    assert name_sizes(model) == 4
    assert [str(size) for size in model.graph.inputs[0].shape] == ["batch", "seq"]
    assert y.shape == ["batch", 2, "capacity", 4] and z.shape[0] == "capacity + s33" and z.shape[2].value is None


@pytest.mark.parametrize("half", [True, False])
def test_a_norm_reads_what_its_scale_is_of(half):
    """Gemma's norms in fp16: onnxruntime does not load one with two types."""
    dtype = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
    x = ir.val("x", dtype, ["B", E])
    scale = ir.val("scale", const_value=ir.tensor(np.linspace(1, 2, E, dtype=np.float32), name="scale"))
    scale.type = ir.TensorType(ir.DataType.FLOAT)
    norm = ir.node("RMSNormalization", [x, scale], {"axis": -1, "epsilon": 1e-6})
    model = _model([x], [_named(norm, "y", ["B", E])], [norm], [scale])
    assert norms_of_one_type(model) == half
    values = np.random.default_rng(0).standard_normal((3, E)).astype(dtype.numpy())
    wide = values.astype(np.float32)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.linspace(1, 2, E)
    np.testing.assert_allclose(_run(model, {"x": values})[0], wanted, rtol=1e-5)
