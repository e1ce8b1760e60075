"""Matrices in blocks of small integers: what they stand for is what ONNX Runtime multiplies by."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from pop_export.config import BLOCK_SIZES
from pop_export.gptq import gptq
from pop_export.graph.passes.quantize_matmuls import DOMAIN
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix, stored_scales

SCHEMES = [
    Scheme(bits, block_size, method, symmetric)
    for bits in (4, 8)
    for block_size in BLOCK_SIZES
    for method, symmetric in (("rtn", True), ("rtn", False), ("k_quant", False), ("hqq", False))
    if method != "hqq" or bits == 4
]


def _weight(num_columns: int = 80, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((48, num_columns)).astype(np.float32)


def _product(matrix: QuantizedMatrix, x: np.ndarray, accuracy_level: int = 0) -> np.ndarray:
    """Return what ONNX Runtime computes."""
    parts = {"q": matrix.packed, "scales": matrix.scales.astype(np.float32), "zero_points": matrix.zero_points}
    stored = [ir.val(name, const_value=ir.tensor(part, name=name)) for name, part in parts.items() if part is not None]
    entered = ir.val("x", ir.DataType.FLOAT, [*x.shape])
    attributes = {
        "K": matrix.num_columns, "N": len(matrix.packed), "bits": matrix.scheme.bits,
        "block_size": matrix.scheme.block_size, "accuracy_level": accuracy_level,
    }  # fmt: skip
    node = ir.node("MatMulNBits", [entered, *stored], attributes, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([entered], node.outputs, nodes=[node], initializers=stored, opset_imports={"": 24, DOMAIN: 1})
    proto = ir.to_proto(ir.Model(graph, ir_version=11))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("num_columns", [80, 208, 256])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_onnx_runtime_multiplies_by_what_the_matrix_stands_for(scheme, num_columns):
    matrix = quantize_matrix(_weight(num_columns), scheme)
    x = np.random.default_rng(1).standard_normal((3, num_columns)).astype(np.float32)
    wanted = x @ matrix.dequantized().T
    assert np.abs(wanted).max() > 1
    assert np.abs(_product(matrix, x) - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", [4, 8])
def test_fast_kernels_lose_no_more_than_seven_bits_of_the_other_side(bits, block_size):
    matrix = quantize_matrix(_weight(), Scheme(bits, block_size))
    for num_rows in (1, 7):
        x = np.random.default_rng(1).standard_normal((num_rows, 80)).astype(np.float32)
        wanted = x @ matrix.dequantized().T
        assert np.abs(_product(matrix, x, accuracy_level=4) - wanted).max() <= 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_weight_is_within_a_step_of_what_is_stored_for_it(scheme):
    weight = _weight()
    matrix = quantize_matrix(weight, scheme)
    blocks = np.repeat(matrix.scales.astype(np.float32), scheme.block_size, axis=1)[:, :80]
    assert np.all(np.abs(matrix.dequantized() - weight) <= 1.51 * np.abs(blocks))


def test_a_block_of_equal_numbers_is_finite():
    weight = np.zeros((4, 64), np.float32)
    weight[1] = 0.5
    for scheme in SCHEMES:
        assert np.isfinite(quantize_matrix(weight, scheme).dequantized()).all(), scheme


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_changes_the_product_less_than_rounding_to_nearest(symmetric):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(80, 80, generator=generator)
    x = torch.randn(400, 80, generator=generator) @ mixing  # inputs that depend on each other
    weight = torch.from_numpy(_weight())
    found = gptq(weight, x.T @ x, Scheme(4, 32, "gptq", symmetric))
    nearest = quantize_matrix(_weight(), Scheme(4, 32, symmetric=symmetric))

    def loss(matrix: QuantizedMatrix) -> float:
        return float(((weight - torch.from_numpy(matrix.dequantized())) @ x.T).square().mean())

    assert loss(found) < 0.7 * loss(nearest)
    x_new = x[:5].numpy()
    wanted = x_new @ found.dequantized().T
    assert np.abs(_product(found, x_new) - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_gptq_fitted_to_few_inputs_holds_for_others_of_their_kind(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(80, 80, generator=generator)
    few, others = (torch.randn(count, 80, generator=generator) @ mixing for count in (100, 2000))
    weight = torch.from_numpy(_weight())

    def loss() -> float:
        found = gptq(weight, few.T @ few, Scheme(4, 32, "gptq"))
        return float(((weight - torch.from_numpy(found.dequantized())) @ others.T).square().mean())

    shrunk = loss()
    monkeypatch.setattr("pop_export.gptq.SHRINKAGE", 0.0)
    assert shrunk < 0.95 * loss()


def test_gptq_of_an_input_that_is_never_used_is_finite():
    hessian = torch.eye(80)
    hessian[7, 7] = 0
    assert np.isfinite(gptq(torch.from_numpy(_weight()), hessian, Scheme(4, 32, "gptq")).dequantized()).all()


def test_quantising_does_not_turn_on_other_peoples_messages():
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    quantize_matrix(_weight(), Scheme(4, 32))
    assert (root.level, root.handlers) == before


@pytest.mark.parametrize("largest", [1e-4, 1.0])
def test_scales_take_sixteen_bits_where_that_changes_nothing(largest):
    scales = np.random.default_rng(0).uniform(0.5, 1, (4, 3)).astype(np.float32) * largest
    stored = stored_scales(scales)
    assert stored.dtype == np.float16
    assert np.abs(stored.astype(np.float32) / scales - 1).max() <= 1e-3


@pytest.mark.parametrize("wild", [1e-7, 1e5])
def test_scales_beyond_sixteen_bits_stay_as_they_are(wild):
    scales = np.array([[0.01, wild]], np.float32)
    assert stored_scales(scales) is scales
