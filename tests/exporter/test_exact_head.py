"""The loud channels of the head's input pass its fast kernels by."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from pop_export.graph.passes.exact_head import NUM_LOUD, exact_head
from pop_export.graph.passes.quantize_matmuls import quantize_matmuls
from pop_export.quantized_matrix import QuantizedMatrix, Scheme
from pop_export.split_matrix import SplitScheme, StoredMatrix

N, K = 40, 128
INT8 = Scheme(8, 32)
MAGNITUDE = np.ones(K, np.float32)
MAGNITUDE[5::32] = 50  # four channels


def _head(shape: list[int | str], scheme: Scheme | SplitScheme = INT8) -> tuple[ir.Model, dict[str, StoredMatrix]]:
    """Return a graph of one quantised product, scaled as some families scale their logits, and what is stored."""
    weight = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    x = ir.val("x", ir.DataType.FLOAT, [*shape, K])
    w = ir.val("w", const_value=ir.tensor(weight.T.copy(), name="w"))
    two = ir.val("two", const_value=ir.tensor(np.float32(2), name="two"))
    product = ir.node("MatMul", [x, w])
    product.outputs[0].type, product.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([*shape, N])
    scaled = ir.node("Mul", [two, product.outputs[0]])
    scaled.outputs[0].name, scaled.outputs[0].type = "logits", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], scaled.outputs, nodes=[product, scaled], initializers=[w, two], opset_imports={"": 24})
    model, matrices = ir.Model(graph, ir_version=11), dict[str, StoredMatrix]()
    quantize_matmuls(model, lambda _: scheme, matrices)
    return model, matrices


def _run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("shape", [["B"], ["B", 1]])
@pytest.mark.parametrize("scheme", [Scheme(8, 32), SplitScheme(Scheme(8, 32), Scheme(8, 32))])
def test_most_of_what_fast_kernels_lose_by_loud_channels_is_won_back(shape, scheme):
    x = (np.random.default_rng(1).standard_normal((3, K)) * MAGNITUDE).astype(np.float32)
    x = x.reshape(3, *[1] * (len(shape) - 1), K)
    model, matrices = _head(shape, scheme)
    wanted = 2 * x @ matrices["w"].dequantized().T
    fast = _run(model, x)
    assert exact_head(model, MAGNITUDE, matrices) == (1 if isinstance(scheme, Scheme) else 2)
    exact = _run(model, x)
    assert exact.shape == fast.shape == wanted.shape
    assert np.abs(exact - wanted).max() < 0.1 * np.abs(fast - wanted).max()


def test_the_loudest_channels_are_taken_and_stand_for_what_is_stored():
    model, matrices = _head(["B"])
    exact_head(model, MAGNITUDE, matrices)
    constants = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    (loud,) = (array for name, array in constants.items() if name.endswith("head.loud"))
    assert loud.tolist() == list(range(5, K, 32)) and len(loud) == NUM_LOUD
    assert isinstance(matrices["w"], QuantizedMatrix)
    np.testing.assert_array_equal(constants["w.q.loud"], matrices["w"].dequantized()[:, loud].T)


def test_an_input_of_zeros_gives_zeros():
    model, matrices = _head(["B"])
    exact_head(model, MAGNITUDE, matrices)
    assert not _run(model, np.zeros((1, K), np.float32)).any()


def test_a_product_with_exact_kernels_is_left_alone():
    model, matrices = _head(["B"])
    for node in model.graph:
        node.attributes.pop("accuracy_level", None)
    assert exact_head(model, MAGNITUDE, matrices) == 0


def test_an_output_of_another_kind_is_left_alone():
    model, matrices = _head(["B"])
    assert exact_head(model, MAGNITUDE, matrices, "hidden") == 0
