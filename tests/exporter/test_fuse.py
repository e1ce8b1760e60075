"""Fusing finished graphs: attention and norms built by hand, before and after in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from pop_export.channel_matrix import ChannelScheme
from pop_export.graph import rope_tables
from pop_export.graph.fuse import WHY_ATTENTION_IS_NOT_FUSED, Fusion, prepare_attention, write_graph
from pop_export.graph.passes.flatten_heads import flatten_heads
from pop_export.graph.passes.fuse_residual_norms import fuse_residual_norms
from pop_export.graph.passes.multiply_dynamically import multiply_dynamically, multiply_exactly
from pop_export.graph.passes.pack_projections import pack_projections
from pop_export.graph.passes.quantize_matmuls import quantize_matmuls
from pop_export.graph.rope_tables import attach_rope_tables
from pop_export.quantized_matrix import Scheme
from pop_export.split_matrix import StoredMatrix

H, H_KV, D, E, S_MAX = 4, 2, 16, 64, 8
RANDOM = np.random.default_rng(0)


class _Hand:
    """A graph in the making: every value has a name, a type and a shape, as in a traced one."""

    def __init__(self) -> None:
        self.inputs: dict[str, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    def take(self, name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        self.inputs[name] = ir.val(name, dtype, shape)
        return self.inputs[name]

    def constant(self, name: str, values: np.ndarray) -> ir.Value:
        value = ir.val(name, const_value=ir.tensor(values, name=name))
        value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(values.shape)
        self.constants.append(value)
        return value

    def add(self, kind: str, inputs: list[ir.Value | None], shape: list[int | str], **attributes: object) -> ir.Value:
        domain = "com.microsoft" if kind == "GroupQueryAttention" else ""
        node = ir.node(kind, inputs, attributes, domain=domain, num_outputs=3 if domain else 1)
        self.nodes.append(node)
        for index, value in enumerate(node.outputs):
            value.name, value.type = f"v{len(self.nodes)}.{index}", ir.TensorType(ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape(shape)
        return node.outputs[0]

    def model(self, outputs: list[ir.Value]) -> ir.Model:
        graph = ir.Graph(
            list(self.inputs.values()), outputs, nodes=self.nodes, initializers=self.constants,
            opset_imports={"": 24, "com.microsoft": 1}, name="hand",
        )  # fmt: skip
        return ir.Model(graph, ir_version=10)


def _attention(norm_of_heads: bool = False, rotated: bool = True) -> ir.Model:
    """Return attention as families write it: heads are reshaped, transposed, rotated and brought back."""
    hand = _Hand()
    by_head = hand.constant("by_head", np.array([0, 0, -1, D], np.int64))
    flat = hand.constant("flat", np.array([0, 0, -1], np.int64))
    cos, sin = (hand.take(name, ["B", "S", D // 2]) for name in ("cos", "sin"))
    ready = []
    for name, heads in (("q", H), ("k", H_KV), ("v", H_KV)):
        x = hand.add("Abs", [hand.take(name, ["B", "S", heads * D])], ["B", "S", heads * D])
        x = hand.add("Reshape", [x, by_head], ["B", "S", heads, D])
        if norm_of_heads and name != "v":
            scale = hand.constant(f"{name}_norm", np.linspace(0.5, 2, D, dtype=np.float32))
            x = hand.add("RMSNormalization", [x, scale], ["B", "S", heads, D], axis=-1)
        x = hand.add("Transpose", [x], ["B", heads, "S", D], perm=[0, 2, 1, 3])
        if rotated and name != "v":
            x = hand.add("RotaryEmbedding", [x, cos, sin], ["B", heads, "S", D], interleaved=0)
        x = hand.add("Transpose", [x], ["B", "S", heads, D], perm=[0, 2, 1, 3])
        ready.append(hand.add("Reshape", [x, flat], ["B", "S", heads * D]))
    past = [hand.take(f"past_{part}", ["B", H_KV, S_MAX, D]) for part in ("k", "v")]
    lengths = [hand.take("last", ["B"], ir.DataType.INT32), hand.take("total", [], ir.DataType.INT32)]
    out = hand.add(
        "GroupQueryAttention", [*ready, *past, *lengths], ["B", "S", H * D], num_heads=H, kv_num_heads=H_KV, do_rotary=0
    )  # fmt: skip
    by_head = hand.add("Reshape", [out, by_head], ["B", "S", H, D])
    back = hand.add("Reshape", [by_head, flat], ["B", "S", H * D])
    return hand.model([hand.add("Neg", [back], ["B", "S", H * D])])


def _attention_feeds(model: ir.Model) -> dict[str, np.ndarray]:
    sizes = {"B": 1, "S": 3}
    feeds = {
        value.name: RANDOM.standard_normal([sizes.get(str(dim), dim) for dim in value.shape]).astype(np.float32)
        for value in model.graph.inputs
        if value.dtype == ir.DataType.FLOAT
    }
    return feeds | {"last": np.array([4], np.int32), "total": np.array(5, np.int32)}


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    proto = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"]).run(None, feeds)


def _kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("norm_of_heads", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_attention_reads_flat_heads_and_computes_the_same(tmp_path, norm_of_heads, rotated):
    model = _attention(norm_of_heads, rotated)
    feeds = _attention_feeds(model)
    before = _run(model, feeds)
    found = write_graph(model, tmp_path / "m.onnx")
    assert found.num_flat_heads == 4
    written = ir.load(tmp_path / "m.onnx")
    assert "Transpose" not in _kinds(written)
    # a norm over each head needs its heads apart, and brings them back by a reshape each
    assert _kinds(written).count("Reshape") == (4 if norm_of_heads else 0)
    assert _kinds(written).count("RotaryEmbedding") == (2 if rotated else 0)
    for now, then in zip(_run(written, feeds), before, strict=True):
        np.testing.assert_allclose(now, then, atol=1e-6)


def test_heads_that_something_else_turned_are_left_alone(tmp_path):
    model = _attention()
    query = model.graph[-4].inputs[0].producer()  # the last reshape before attention
    assert model.graph[-4].op_type == "GroupQueryAttention" and query.op_type == "Reshape"
    query.inputs[0].producer().attributes["perm"] = ir.AttrInt64s("perm", [0, 1, 2, 3])
    assert flatten_heads(model) == 3
    found = write_graph(model, tmp_path / "m.onnx")
    assert found.not_fused == ("heads: 1 of 3 inputs of attention are reshaped",)


def _residual(norm: str = "RMSNormalization", shared: bool = True) -> ir.Model:
    """Return `x + y`, its norm, and a product of both if `shared`."""
    hand = _Hand()
    x, y = (hand.take(name, ["B", "S", E]) for name in "xy")
    scale = hand.constant("scale", np.linspace(0.5, 2, E, dtype=np.float32))
    total = hand.add("Add", [x, y], ["B", "S", E])
    total.name = "layers.0.output"
    normed = hand.add(norm, [total, scale], ["B", "S", E], axis=-1, epsilon=1e-3)
    return hand.model([hand.add("Mul", [normed, total], ["B", "S", E]) if shared else normed])


def _residual_feeds() -> dict[str, np.ndarray]:
    return {name: RANDOM.standard_normal((2, 3, E)).astype(np.float32) for name in "xy"}


@pytest.mark.parametrize("shared", [False, True])
def test_an_addition_and_the_norm_that_follows_become_one_node(shared):
    model, feeds = _residual(shared=shared), _residual_feeds()
    before = _run(model, feeds)
    assert fuse_residual_norms(model) == 1
    assert _kinds(model) == ["SkipSimplifiedLayerNormalization", *(["Mul"] if shared else [])]
    np.testing.assert_allclose(_run(model, feeds)[0], before[0], rtol=1e-5, atol=1e-6)


def test_a_norm_of_anything_but_a_sum_keeps_its_standard_name():
    hand = _Hand()
    scale = hand.constant("scale", np.ones(E, np.float32))
    x = hand.add("Abs", [hand.take("x", ["B", "S", E])], ["B", "S", E])
    model = hand.model([hand.add("RMSNormalization", [x, scale], ["B", "S", E], axis=-1)])
    assert fuse_residual_norms(model) == 0
    assert _kinds(model) == ["Abs", "RMSNormalization"]


def test_a_sum_of_different_shapes_is_left_apart_from_its_norm_and_reported(tmp_path):
    model = _residual()
    model.graph.inputs[1].shape = ir.Shape([E])
    found = write_graph(model, tmp_path / "m.onnx")
    assert (found.num_residual_norms, found.not_fused) == (0, ("norms: 1 follow an addition and are apart from it",))


def test_a_graph_of_standard_operators_is_written_as_it_is(tmp_path):
    model = _residual()
    del model.graph.opset_imports["com.microsoft"]
    write_graph(model, tmp_path / "m.onnx")
    assert _kinds(ir.load(tmp_path / "m.onnx")) == _kinds(model) == ["Add", "RMSNormalization", "Mul"]


def test_writing_a_graph_changes_the_copy_alone(tmp_path):
    model = _attention()
    kinds = _kinds(model)
    write_graph(model, tmp_path / "m.onnx")
    assert _kinds(model) == kinds


def test_what_keeps_attention_from_the_fused_operator_is_in_the_report(tmp_path):
    model = _residual()
    model.metadata_props[WHY_ATTENTION_IS_NOT_FUSED] = "it adds a bias"
    assert write_graph(model, tmp_path / "m.onnx") == Fusion(2, 0, 0, 1, ("attention: it adds a bias",))


def _packable(bias: bool = False, layers: tuple[str, ...] = ("",)) -> tuple[ir.Model, ir.Model]:
    """Return two graphs of attention layers with their projections, and cosines of the positions in the mask.

    Layers are told apart by what their names begin with; biases of Q are one constant, as where all are equal.
    """
    hand = _Hand()
    ids, mask = (
        hand.take(name, ["B", n], ir.DataType.INT64) for name, n in (("input_ids", "S"), ("attention_mask", "T"))
    )
    x = hand.take("x", ["B", "S", E])
    one, last = (hand.constant(name, np.array(at, np.int64)) for name, at in (("one", [1]), ("axis", [-1])))
    new, total = hand.add("Shape", [ids], [1], start=1), hand.add("ReduceSum", [mask, one], ["B", 1])
    past = hand.add("Sub", [total, new], ["B", 1])
    zero, step = (hand.constant(name, np.array(at, np.int64)) for name, at in (("zero", 0), ("step", 1)))
    count = hand.add("Squeeze", [new], [])
    places = hand.add("Add", [past, hand.add("Range", [zero, count, step], ["S"])], ["B", "S"])
    for value in (new, total, past, count, places, places.producer().inputs[1]):
        value.type = ir.TensorType(ir.DataType.INT64)
    angle = hand.add("Unsqueeze", [hand.add("Cast", [places], ["B", "S"], to=1), last], ["B", "S", 1])
    frequencies = hand.constant("inv_freq", (0.5 ** np.arange(D // 2)).astype(np.float32))
    angle = hand.add("Mul", [angle, frequencies], ["B", "S", D // 2])
    cos, sin = hand.add("Cos", [angle], ["B", "S", D // 2]), hand.add("Sin", [angle], ["B", "S", D // 2])
    by_head = hand.constant("by_head", np.array([0, 0, -1, D], np.int64))
    flat = hand.constant("flat", np.array([0, 0, -1], np.int64))
    lengths = [hand.take("last", ["B"], ir.DataType.INT32), hand.take("total", [], ir.DataType.INT32)]
    query_bias = hand.constant("q.bias", RANDOM.standard_normal(H * D).astype(np.float32)) if bias else None
    outputs = []
    for layer in layers:
        ready = []
        for name, heads in (("q", H), ("k", H_KV), ("v", H_KV)):
            weight = hand.constant(
                f"{layer}{name}.weight", (RANDOM.standard_normal((E, heads * D)) / 8).astype(np.float32)
            )
            y = hand.add("MatMul", [x, weight], ["B", "S", heads * D])
            if bias:
                numbers = RANDOM.standard_normal(heads * D).astype(np.float32)
                value = query_bias if name == "q" else hand.constant(f"{layer}{name}.bias", numbers)
                y = hand.add("Add", [y, value], ["B", "S", heads * D])
            y = hand.add("Reshape", [y, by_head], ["B", "S", heads, D])
            y = hand.add("Transpose", [y], ["B", heads, "S", D], perm=[0, 2, 1, 3])
            if name != "v":
                y = hand.add("RotaryEmbedding", [y, cos, sin], ["B", heads, "S", D], interleaved=0)
            y = hand.add("Transpose", [y], ["B", "S", heads, D], perm=[0, 2, 1, 3])
            ready.append(hand.add("Reshape", [y, flat], ["B", "S", heads * D]))
        buffers = [hand.take(f"{layer}past_{part}", ["B", H_KV, S_MAX, D]) for part in ("k", "v")]
        outputs.append(hand.add(
            "GroupQueryAttention", [*ready, *buffers, *lengths], ["B", "S", H * D], num_heads=H, kv_num_heads=H_KV,
            do_rotary=0,
        ))  # fmt: skip
    model = hand.model(outputs)
    return model, model.clone()


def _packable_feeds() -> dict[str, np.ndarray]:
    feeds = {"input_ids": np.zeros((1, 3), np.int64), "attention_mask": np.ones((1, 5), np.int64)}
    feeds |= {"last": np.array([4], np.int32), "total": np.array(5, np.int32)}
    feeds["x"] = RANDOM.standard_normal((1, 3, E)).astype(np.float32)
    return feeds | {f"past_{part}": RANDOM.standard_normal((1, H_KV, S_MAX, D)).astype(np.float32) for part in "kv"}


@pytest.mark.parametrize("bias", [False, True])
def test_attention_rotates_by_itself_and_reads_one_packed_product(tmp_path, bias):
    decode, prefill = _packable(bias)
    feeds = _packable_feeds()
    before = _run(decode, feeds)[0]
    prepare_attention(decode, prefill, max_positions=12)
    np.testing.assert_allclose(_run(decode, feeds)[0], before, atol=1e-5)  # packed, and still to be cut
    for model in (decode, prefill):
        found = write_graph(model, tmp_path / "m.onnx")
        assert found.num_rotating == 1
        written = ir.load(tmp_path / "m.onnx")
        assert _kinds(written) == ["MatMul", *(["Add"] if bias else []), "GroupQueryAttention"]
        np.testing.assert_allclose(_run(written, _used(written, feeds))[0], before, atol=1e-5)


def test_layers_that_share_the_bias_of_q_are_packed_each_with_its_own():
    # equal biases are one constant of the graph: the second layer's packed bias had the name of the first's
    decode, prefill = _packable(bias=True, layers=("", "1."))
    feeds = _packable_feeds()
    feeds |= {f"1.{name}": feeds[name] for name in ("past_k", "past_v")}
    before = _run(decode, feeds)
    prepare_attention(decode, prefill, max_positions=12)
    for model in (decode, prefill):
        assert _kinds(model).count("MatMul") == 2
        for found, wanted in zip(_run(model, feeds), before, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_quantised_weights_with_16_bit_scales_are_packed_too(symmetric):
    decode, prefill = _packable()
    matrices: dict[str, StoredMatrix] = {}
    for model in (decode, prefill):
        quantize_matmuls(model, lambda _: Scheme(8, 16, symmetric=symmetric), matrices)
    assert _kinds(decode).count("Cast") == 4  # three of scales, one of positions
    feeds = _packable_feeds()
    before = _run(decode, feeds)[0]
    assert pack_projections(decode, prefill) == 1
    for model in (decode, prefill):
        assert (_kinds(model).count("MatMulNBits"), _kinds(model).count("Cast")) == (1, 2)
        np.testing.assert_allclose(_run(model, feeds)[0], before, atol=1e-5)
    assert {name for name in decode.graph.initializers if ".weight." in name} == {
        f"q.weight.{part}.qkv" for part in ("q", "scales", *([] if symmetric else ["zero_points"]))
    }


def test_quantised_weights_of_which_one_has_scales_of_another_kind_are_not_packed():
    decode, prefill = _packable()
    matrices: dict[str, StoredMatrix] = {}
    for model in (decode, prefill):
        quantize_matmuls(model, lambda name: Scheme(8, 16 if name != "k.weight" else 32), matrices)
    assert pack_projections(decode, prefill) == 0


def test_products_in_integers_are_packed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(rope_tables, "LARGEST_SHARE", 1.0)  # of weights a quarter as large
    decode, prefill = _packable(bias=True)
    feeds, matrices = _packable_feeds(), {}
    for model in (decode, prefill):
        assert multiply_dynamically(model, lambda _: ChannelScheme(), matrices) == 3
    apart = decode.clone()
    multiply_exactly(apart)
    wanted = _run(apart, feeds)[0]
    prepare_attention(decode, prefill, max_positions=12)
    for model in (decode, prefill):
        assert _kinds(model).count("DynamicQuantizeMatMul") == 1
        write_graph(model, tmp_path / "m.onnx")
        written = ir.load(tmp_path / "m.onnx")
        assert _kinds(written)[-4:] == ["MatMulIntegerToFloat", "Mul", "Add", "GroupQueryAttention"]
        assert np.abs(_run(written, _used(written, feeds))[0] - wanted).max() < 0.05
        multiply_exactly(model)
        np.testing.assert_allclose(_run(model, feeds)[0], wanted, atol=1e-5)


def _used(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {value.name: feeds[value.name] for value in model.graph.inputs}


def test_weights_of_which_prefill_reads_some_are_not_packed():
    decode, prefill = _packable()
    query = next(node for node in prefill.graph if node.op_type == "MatMul")
    other = ir.val("other", const_value=ir.tensor(query.inputs[1].const_value.numpy(), name="other"))
    prefill.graph.register_initializer(other)
    query.replace_input_with(1, other)  # as if re-fitted
    assert pack_projections(decode, prefill) == 0
    assert _kinds(decode).count("MatMul") == 3


def test_weights_that_prefill_does_not_read_are_packed_in_decode_alone():
    decode, _ = _packable()
    empty = _residual()
    assert pack_projections(decode, empty) == 1
    assert _kinds(decode).count("MatMul") == 1
    assert sorted(name for name in decode.graph.initializers if "weight" in name) == ["q.weight.qkv"]


def test_a_table_that_outweighs_the_model_is_not_made():
    decode, prefill = _packable()
    assert attach_rope_tables(decode, prefill, max_positions=100_000) == 0
    assert attach_rope_tables(decode, prefill, max_positions=12) == 2


def test_what_turns_by_anything_but_positions_keeps_its_own_cosines():
    decode, prefill = _packable()
    cosine = next(node for node in decode.graph if node.op_type == "Cos")
    scaled = ir.node("Mul", [cosine.inputs[0], next(value for value in decode.graph.inputs if value.name == "total")])
    cast = ir.node("Cast", [scaled.inputs[1]], {"to": 1})
    scaled.replace_input_with(1, cast.outputs[0])
    decode.graph.insert_before(cosine, [cast, scaled])
    cosine.replace_input_with(0, scaled.outputs[0])
    assert attach_rope_tables(decode, prefill, max_positions=12) == 1  # the sines are still those of positions


def test_a_frequency_that_grows_with_the_text_has_no_table():
    decode, prefill = _packable()
    cosine = next(node for node in decode.graph if node.op_type == "Cos")
    mask = next(value for value in decode.graph.inputs if value.name == "attention_mask")
    length = ir.node("Shape", [mask], {"start": 1})
    cast = ir.node("Cast", [length.outputs[0]], {"to": 1})
    scaled = ir.node("Mul", [cosine.inputs[0], cast.outputs[0]])
    decode.graph.insert_before(cosine, [length, cast, scaled])
    cosine.replace_input_with(0, scaled.outputs[0])
    assert attach_rope_tables(decode, prefill, max_positions=12) == 1
