"""The head sees its input twice: as the fast kernels round it, and what they round away."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from pop_export.graph.passes.exact_head import exact_head
from pop_export.graph.passes.quantize_matmuls import quantize_matmuls
from pop_export.quantized_matrix import QuantizedMatrix, Scheme

N = 40


def _head(num_columns: int, block_size: int, shape: list[int | str], bits: int = 8) -> tuple[ir.Model, np.ndarray]:
    """Return a graph of one quantised product, scaled as some families scale their logits, and its matrix [N, K]."""
    weight = np.random.default_rng(0).standard_normal((N, num_columns)).astype(np.float32)
    x = ir.val("x", ir.DataType.FLOAT, [*shape, num_columns])
    w = ir.val("w", const_value=ir.tensor(weight.T.copy(), name="w"))
    two = ir.val("two", const_value=ir.tensor(np.float32(2), name="two"))
    product = ir.node("MatMul", [x, w])
    product.outputs[0].type, product.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([*shape, N])
    scaled = ir.node("Mul", [two, product.outputs[0]])
    scaled.outputs[0].name, scaled.outputs[0].type = "logits", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], scaled.outputs, nodes=[product, scaled], initializers=[w, two], opset_imports={"": 24})
    model, matrices = ir.Model(graph, ir_version=11), dict[str, QuantizedMatrix]()
    quantize_matmuls(model, lambda _: Scheme(bits, block_size), matrices)  # type: ignore[arg-type]
    return model, matrices["w"].dequantized()


def _run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [["B"], ["B", 1]])
def test_nearly_all_that_fast_kernels_lose_is_won_back(bits, shape):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, 64)) * np.exp(2 * rng.standard_normal(64))).astype(np.float32)
    x = x.reshape(3, *[1] * (len(shape) - 1), 64)
    model, matrix = _head(64, 32, shape, bits)
    wanted = 2 * x @ matrix.T
    fast = _run(model, x)
    assert exact_head(model) == 1
    exact = _run(model, x)
    assert exact.shape == fast.shape == wanted.shape
    assert np.abs(exact - wanted).max() < 0.05 * np.abs(fast - wanted).max()


def test_an_input_of_zeros_gives_zeros():
    model, _ = _head(64, 32, ["B"])
    exact_head(model)
    assert not _run(model, np.zeros((1, 64), np.float32)).any()


def test_a_padded_last_block_is_left_alone():
    model, _ = _head(80, 32, ["B"])
    assert exact_head(model) == 0
    assert [node.op_type for node in model.graph if node.op_type == "Round"] == []


def test_a_head_that_is_not_quantised_or_has_exact_kernels_is_left_alone():
    model, _ = _head(64, 32, ["B"])
    assert exact_head(model, logits="elsewhere") == 0
    for node in model.graph:
        node.attributes.pop("accuracy_level", None)
    assert exact_head(model) == 0
