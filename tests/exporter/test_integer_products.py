"""Products in integers: what is stored, what is written, and what each row of activations gets."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import pop_runtime
from pop_export import ExportConfig, precision_damage
from pop_export.channel_matrix import ChannelMatrix, ChannelScheme, quantize_channels
from pop_export.gptq import gptq
from pop_export.graph.passes.multiply_dynamically import multiply_dynamically, multiply_exactly
from pop_export.graph.passes.round_by_row import round_by_row
from pop_export.precision_damage import MAX_DYNAMIC_KL
from pop_export.quantized_matrix import Scheme
from pop_export.split_matrix import StoredMatrix
from pop_runtime.errors import GateError, UsageError

K, N = 96, 40
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((N, K)).astype(np.float32)


def _model(kind: str = "MatMul", weights: tuple[np.ndarray, ...] = (WEIGHT,)) -> ir.Model:
    """Return products y0, y1, .. of one x with weights [N, K], stored as the kind of product reads them."""
    x = ir.val("x", ir.DataType.FLOAT, ["S", weights[0].shape[1]])
    constants, nodes = [], []
    for index, weight in enumerate(weights):
        stored = weight if kind == "Gemm" else weight.T
        constants.append(ir.val(f"w{index}", const_value=ir.tensor(np.ascontiguousarray(stored), name=f"w{index}")))
        inputs = [x, constants[-1]]
        if kind == "Gemm":
            constants.append(ir.val("b", const_value=ir.tensor(np.arange(len(weight), dtype=np.float32), name="b")))
            inputs.append(constants[-1])
        nodes.append(ir.node(kind, inputs, {"transB": 1} if kind == "Gemm" else {}))
        out = nodes[-1].outputs[0]
        out.name, out.type = f"y{index}", ir.TensorType(ir.DataType.FLOAT)
        out.shape = ir.Shape(["S", len(weight)])
    graph = ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, initializers=constants,
                     opset_imports={"": 24}, name="hand")  # fmt: skip
    return ir.Model(graph, ir_version=10)


def _dynamic(model: ir.Model) -> dict[str, StoredMatrix]:
    matrices: dict[str, StoredMatrix] = {}
    assert multiply_dynamically(model, lambda name: ChannelScheme() if name.startswith("w") else None, matrices)
    return matrices


def _run(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})


def _kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_codes_have_seven_bits_and_are_as_close_as_those_can_be():
    matrix = quantize_channels(WEIGHT)
    assert matrix.codes.shape == (K, N) and matrix.codes.dtype == np.int8
    assert matrix.codes.min() >= -64 and matrix.codes.max() <= 63
    assert np.abs(matrix.dequantized() - WEIGHT).max() <= np.abs(WEIGHT).max() / 63
    assert np.linalg.norm(matrix.dequantized() - WEIGHT) < 0.02 * np.linalg.norm(WEIGHT)


def test_a_channel_of_zeros_stays_zero():
    assert not quantize_channels(np.zeros((3, 8), np.float32)).dequantized().any()


def test_fitting_to_inputs_loses_less_of_the_product_than_rounding():
    x = torch.from_numpy(RANDOM.standard_normal((400, 8)).astype(np.float32) @ RANDOM.standard_normal((8, K)))
    x = (x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).float()
    fitted = gptq(torch.from_numpy(WEIGHT), x.T @ x, ChannelScheme("gptq"))
    assert isinstance(fitted, ChannelMatrix)
    assert fitted.codes.min() >= -64 and fitted.codes.max() <= 63
    lost = [
        np.linalg.norm(x.numpy() @ (matrix.dequantized() - WEIGHT).T) for matrix in (fitted, quantize_channels(WEIGHT))
    ]
    assert lost[0] < 0.7 * lost[1]


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
def test_a_product_is_close_to_that_of_the_stored_weights_and_its_exact_form_equal(kind):
    model = _model(kind)
    x = RANDOM.standard_normal((7, K)).astype(np.float32)
    matrix = _dynamic(model)["w0"]
    assert "w0" not in model.graph.initializers
    wanted = x @ matrix.dequantized().T + (np.arange(N, dtype=np.float32) if kind == "Gemm" else 0)
    exact, written = model.clone(), model.clone()
    assert multiply_exactly(exact) == round_by_row(written) == 1
    np.testing.assert_allclose(_run(exact, x)[0], wanted, atol=1e-4)
    error = np.abs(_run(written, x)[0] - wanted).max()
    assert 1e-4 < error < 0.02 * np.abs(wanted).max()


def test_weights_with_another_scheme_or_none_are_left_alone():
    model = _model()
    for scheme in (None, Scheme(8, 32)):
        assert multiply_dynamically(model, lambda _, scheme=scheme: scheme, {}) == 0
    assert round_by_row(model) == multiply_exactly(model) == 0
    assert _kinds(model) == ["MatMul"]


def test_the_largest_sums_do_not_saturate():
    """With codes of 8 bits they do on x86 without VNNI, where two products are added in 16 bits."""
    model = _model(weights=(np.full((N, K), 3.0, np.float32), np.full((N, K), -3.0, np.float32)))
    _dynamic(model)
    round_by_row(model)
    x = np.full((5, K), 2.0, np.float32)
    for found, wanted in zip(_run(model, x), (6.0 * K, -6.0 * K), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_a_token_gets_does_not_depend_on_those_beside_it():
    model = _model()
    _dynamic(model)
    x = RANDOM.standard_normal((6, K)).astype(np.float32)
    x[0] *= 3000  # as the first token of a sequence
    whole_range = _run(model, x)[0]  # one range for all tokens
    round_by_row(model)
    whole = _run(model, x)[0]
    np.testing.assert_array_equal(whole[1:], _run(model, x[1:])[0])
    np.testing.assert_array_equal(whole[3:4], _run(model, x[3:4])[0])
    error, lost = (np.abs(found[1:] - (x @ WEIGHT.T)[1:]).max() for found in (whole, whole_range))
    assert error < 0.05 * lost


def test_a_token_of_zeros_gives_zeros():
    model = _model()
    _dynamic(model)
    round_by_row(model)
    x = np.zeros((2, K), np.float32)
    x[1] = 1
    found = _run(model, x)[0]
    assert not found[0].any() and np.isfinite(found).all()


def test_products_of_the_same_input_share_its_codes():
    model = _model(weights=(WEIGHT, 2 * WEIGHT))
    _dynamic(model)
    assert round_by_row(model) == 2
    kinds = _kinds(model)
    assert kinds.count("QuantizeLinear") == 1 and kinds.count("MatMulIntegerToFloat") == 2


def test_both_graphs_multiply_by_the_same_bytes_and_are_proven_apart_from_rounding(quick_export):
    bundle = quick_export(prune_layers="1,3", precision="int8-dynamic")
    assert bundle.manifest.precision == "int8-dynamic-rtn"
    places = {}
    for name in (bundle.manifest.decode_graph, bundle.manifest.prefill_graph):
        model = onnx.load(bundle.folder / name, load_external_data=False)
        products = [node for node in model.graph.node if node.op_type in ("MatMul", "DynamicQuantizeMatMul")]
        assert all(node.input[1].endswith(".loud") for node in products)  # the head's few channels in fp32
        places[name] = {
            tensor.name: {entry.key: entry.value for entry in tensor.external_data}["offset"]
            for tensor in model.graph.initializer
            if tensor.external_data and tensor.name.endswith(".codes")
        }
    decode, prefill = places.values()
    shared = decode.keys() & prefill.keys()
    assert len(shared) == 2 * 6 + 3 * 2  # kept layers apart from the last, which prefill only takes K and V of
    assert all(decode[name] == prefill[name] for name in shared)
    checks = bundle.report["verification"]["checks"]
    exact = [check for check in checks if check["arithmetic"] == "float32"]
    assert len(exact) == 5 and len(checks) == 9
    assert all(check["largest_difference"] <= 1e-4 * check["largest_logit"] for check in exact)
    rounded = {check["name"]: check["largest_difference"] for check in checks if check not in exact}
    # tokens are rounded one by one, so that it is all the same how a prompt is cut
    assert rounded["pair, prompt whole"] == pytest.approx(rounded["pair, prompt in uneven pieces"], rel=1e-3)
    assert 0 < bundle.report["precision_damage"]["quantisation_kl_nats"] < MAX_DYNAMIC_KL
    assert all(check["passed"] for check in bundle.report["segments"]["checks"])
    answer = pop_runtime.load(bundle.folder, threads=1).generate([7, 200, 13, 90], max_new_tokens=4, ignore_eos=True)
    assert len(list(answer)) == 4


def test_a_model_that_eight_bits_of_activations_ruin_is_refused(quick_export, monkeypatch, tmp_path):
    monkeypatch.setattr(precision_damage, "MAX_DYNAMIC_KL", 1e-9)
    with pytest.raises(
        GateError, match=r"int8-dynamic: expected KL to the checkpoint below 1e-09 nats per token, found"
    ):
        quick_export(prune_layers="1,3", precision="int8-dynamic", quantizer="gptq")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 32}, "--block-size: expected --precision int8 or int4 with it, found int8-dynamic"),
        ({"symmetric": True}, "--symmetric: expected --precision int8 or int4 with it, found int8-dynamic"),
        ({"quantizer": "hqq"}, "--quantizer hqq: expected gptq or rtn with --precision int8-dynamic"),
        ({"dialect": "standard"}, "expected fp32, fp16 or bf16 with --dialect standard, found int8-dynamic"),
    ],
)
def test_settings_that_integers_by_channel_do_not_have_are_refused(tmp_path, settings, message):
    with pytest.raises(UsageError, match=message):
        ExportConfig(model="x", out=tmp_path, precision="int8-dynamic", **settings)
