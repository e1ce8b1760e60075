"""Scales of a norm's channels move into the weights that read it: the same function, easier to round."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from pop_export.channel_matrix import ChannelScheme
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.passes.balance_inputs import balance_inputs, readers_of_norms
from pop_export.graph.passes.multiply_dynamically import multiply_dynamically
from pop_export.graph.passes.round_by_row import round_by_row
from pop_export.input_scales import EXPONENT, input_magnitudes, input_scales
from pop_export.quantize import Schemes, quantize_pair
from pop_export.quantized_matrix import Scheme
from pop_export.reference import PrefillPlan
from pop_export.stored_weights import stored_weights
from tests.tiny_models import tiny_model

E, N = 8, 6
RANDOM = np.random.default_rng(0)
TEXT = [np.random.default_rng(index).integers(0, 250, 40) for index in range(4)]
INT8 = Schemes(Scheme(8, 32), Scheme(8, 32), Scheme(8, 32))


def _constant(name: str, *shape: int) -> ir.Value:
    numbers = RANDOM.standard_normal(shape).astype(np.float32)
    return ir.val(name, const_value=ir.tensor(numbers, name=name))


def _graph(norm: str = "RMSNormalization", other: str | None = None, bias: bool = False) -> ir.Model:
    """Return a norm that two products read, one with its weight the other way round, and perhaps another node."""
    x = ir.val("x", ir.DataType.FLOAT, ["T", E])
    constants = [_constant("g", E), _constant("w", E, N), _constant("v", N, E)]
    inputs = [x, constants[0]]
    if bias:
        constants.append(_constant("b", E))
        inputs.append(constants[-1])
    normed = ir.node(norm, inputs, {"axis": -1, "epsilon": 1e-5})
    nodes = [normed, ir.node("MatMul", [normed.outputs[0], constants[1]]),
             ir.node("Gemm", [normed.outputs[0], constants[2]], {"transB": 1})]  # fmt: skip
    if other is not None:
        nodes.append(ir.node(other, [normed.outputs[0]]))
    outputs = [node.outputs[0] for node in nodes[1:]]
    for index, value in enumerate(outputs):
        value.name, value.type = f"y{index}", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=constants, opset_imports={"": 24})
    return ir.Model(graph, ir_version=11)


def _run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


@pytest.mark.parametrize(("norm", "bias"), [("RMSNormalization", False), ("LayerNormalization", True)])
def test_both_sides_of_each_product_change_and_the_product_does_not(norm, bias):
    model = _graph(norm, bias=bias)
    x = RANDOM.standard_normal((5, E)).astype(np.float32)
    before = _run(model, x)
    weights = {name: model.graph.initializers[name].const_value.numpy().copy() for name in "gwv"}
    assert readers_of_norms([model]) == {"g": ("w", "v")}
    scales = np.geomspace(0.25, 4, E, dtype=np.float32)
    multiplied = balance_inputs(model, {"g": scales})
    assert list(multiplied) == ["w", "v"]
    now = {name: model.graph.initializers[name].const_value.numpy() for name in "gwv"}
    np.testing.assert_allclose(now["g"], weights["g"] / scales, rtol=1e-6)
    np.testing.assert_allclose(now["w"], weights["w"] * scales[:, None], rtol=1e-6)
    np.testing.assert_allclose(now["v"], weights["v"] * scales, rtol=1e-6)
    for after, then in zip(_run(model, x), before, strict=True):
        np.testing.assert_allclose(after, then, rtol=1e-4, atol=1e-5)


def test_products_in_integers_lose_less_behind_a_balanced_norm():
    x = RANDOM.standard_normal((64, E)).astype(np.float32)
    loud = np.array([1, 1, 30, 1, 1, 1, 1, 1], np.float32)
    losses = []
    for exponent in (0, EXPONENT):
        model = _graph()
        model.graph.initializers["g"].const_value = ir.tensor(loud, name="g")
        exact = _run(model, x)[0]
        balance_inputs(model, {"g": loud**exponent})
        multiply_dynamically(model, lambda name: ChannelScheme() if name == "w" else None, {})
        round_by_row(model)
        losses.append(float(np.square(_run(model, x)[0] - exact).mean()))
    assert losses[1] < 0.3 * losses[0]


def test_a_norm_that_anything_else_reads_is_left_alone():
    assert readers_of_norms([_graph(other="Abs")]) == {}
    assert readers_of_norms([_graph(), _graph(other="Abs")]) == {}  # what one graph may, the other may not


def test_a_norm_that_is_a_result_is_left_alone():
    model = _graph()
    model.graph.outputs.append(model.graph[0].outputs[0])
    assert readers_of_norms([model]) == {}


def test_a_weight_of_two_readers_is_left_alone():
    model = _graph()
    model.graph[2].replace_input_with(0, model.graph[0].outputs[0])
    model.graph[2].replace_input_with(1, model.graph.initializers["w"])
    assert readers_of_norms([model]) == {}


# Layers of equal norms share their constants. Prefill, which had lost one of two, balanced the other alone: its weights
# were no longer those of decode.
@pytest.mark.parametrize(("norm", "shared"), [("RMSNormalization", "g"), ("LayerNormalization", "b")])
def test_a_norm_that_one_graph_shares_between_layers_is_left_alone_in_all(norm, shared):
    bias = norm == "LayerNormalization"
    both, one = _graph(norm, bias=bias), _graph(norm, bias=bias)
    constants = [*both.graph[0].inputs]
    for name, index in (("g", 1), ("b", 2)):
        if bias and name != shared:
            constants[index] = _constant("other", E)
            both.graph.register_initializer(constants[index])
    second, weight = ir.node(norm, constants, {"axis": -1}), _constant("u", E, N)
    both.graph.register_initializer(weight)
    both.graph.extend([second, ir.node("MatMul", [second.outputs[0], weight])])
    assert readers_of_norms([one]) == {"g": ("w", "v")}
    assert readers_of_norms([both, one]) == readers_of_norms([one, both]) == {}


@pytest.fixture(scope="module")
def uneven():
    """Return a Llama whose norms let a few channels through that are far larger than the others."""
    model = tiny_model()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):  # no two alike: the graph would hold them as one
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
                parameter[::16] *= 30
    return model


def test_scales_follow_the_root_of_what_the_model_sends(uneven):
    seen = []
    handle = uneven.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for ids in TEXT:
        uneven(input_ids=torch.from_numpy(ids)[None])
    handle.remove()
    magnitude = torch.cat(seen, 1).detach().abs().mean((0, 1)).numpy()
    found = input_magnitudes(uneven, TEXT)
    query = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(found[query], magnitude, rtol=1e-4)
    assert {"lm_head.weight", "model.layers.4.mlp.down_proj.weight"} < set(found)
    wanted = magnitude**EXPONENT
    scales = input_scales(found, ("nothing.weight", query))
    np.testing.assert_allclose(scales, wanted / np.exp(np.log(wanted).mean()), rtol=1e-3)


def test_dead_channels_and_inputs_that_no_text_reaches_have_no_infinite_scales():
    magnitude = np.array([0, 1, 2, 4], np.float32)
    scales = input_scales({"w": magnitude}, ("w",))
    assert scales is not None and np.isfinite(scales).all() and (scales > 0).all()
    assert input_scales({"w": magnitude}, ("v",)) is None
    assert input_scales({"w": 0 * magnitude}, ("w",)) is None


def _loss(
    model: torch.nn.Module, decode: ir.Model, samples: list[np.ndarray], schemes: Schemes = INT8
) -> tuple[float, int]:
    """Return how far stored weights take the hidden states of some text, and how many weights were multiplied."""
    graph = decode.clone()
    prefill = cut_prefill_graph(graph, PrefillPlan(frozenset({1})))
    found = quantize_pair(graph, prefill, model, schemes, samples)
    ids = torch.from_numpy(TEXT[0])[None]
    plain = model(input_ids=ids).logits.detach()
    with stored_weights(model, found.matrices):
        stored = model(input_ids=ids).logits.detach()
    return float((stored - plain).square().mean()), sum(m.input_scales is not None for m in found.matrices.values())


def test_weights_lose_less_of_what_uneven_inputs_make_of_them(uneven):
    decode = build_decode_graph(uneven, kv_layout(uneven))
    before = {name: weight.clone() for name, weight in uneven.state_dict().items()}
    plain, none = _loss(uneven, decode, [])
    balanced, many = _loss(uneven, decode, TEXT)
    assert none == 0 and many == 5 * 5  # Q, K, V, gate and up
    assert balanced < 0.8 * plain
    assert all(weight.equal(before[name]) for name, weight in uneven.state_dict().items())


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_by_channel_say_what_their_inputs_were_divided_by(uneven, method):
    decode = build_decode_graph(uneven, kv_layout(uneven))
    channels = ChannelScheme(method)
    loss, many = _loss(uneven, decode, TEXT, Schemes(channels, channels, Scheme(8, 32)))
    with torch.no_grad():
        size = float(uneven(input_ids=torch.from_numpy(TEXT[0])[None]).logits.square().mean())
    assert many == 5 * 5 and loss < 0.2 * size  # weights that take no scales out again would lose all
