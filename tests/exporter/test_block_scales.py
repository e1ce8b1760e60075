"""The search for scales: never worse than filling the range, and led by what each weight counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

from pop_export.block_scales import find_scales, nearest_codes
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix


def _weight(seed: int = 0) -> np.ndarray:
    """Return weights [64, 96] with a long tail, as trained ones have."""
    return np.random.default_rng(seed).standard_t(5, (64, 96)).astype(np.float32) * 0.05


def _block_errors(weight: np.ndarray, matrix: QuantizedMatrix) -> np.ndarray:
    squares = np.square(weight - matrix.dequantized())
    return squares.reshape(len(weight), -1, matrix.scheme.block_size).sum(-1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_block_is_further_off_than_with_onnx_runtimes_plain_rounding(bits, symmetric):
    scheme, weight = Scheme(bits, 32, symmetric=symmetric), _weight()
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=symmetric, bits=bits)
    packed, scales, zeros = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.T))
    plain = QuantizedMatrix(
        scheme, 96, packed.reshape(64, 3, -1), scales.reshape(64, 3), zeros if scheme.has_zero_points else None
    )
    searched, nearest = (_block_errors(weight, matrix) for matrix in (quantize_matrix(weight, scheme), plain))
    assert searched.sum() < 0.95 * nearest.sum()
    # scales are stored in 16 bits, ONNX Runtime's here in 32
    assert np.all(searched <= 1.01 * nearest)


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_that_count_more_come_closer(symmetric):
    blocks = torch.from_numpy(_weight()).reshape(64, 3, 32)
    counts = torch.ones(32)
    counts[:8] = 100
    errors = []
    for importance in (None, counts):
        scales, zeros = find_scales(blocks, 4, symmetric, importance)
        codes = nearest_codes(blocks, scales, zeros, 4)
        stored = (codes - zeros[..., None]) * scales[..., None]
        errors.append(float(((stored - blocks).square() * counts).sum()))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_on_a_grid_already_stays_there(symmetric):
    codes = torch.from_numpy(np.random.default_rng(0).integers(-8, 8, (50, 32)))
    codes[:, :2] = torch.tensor([-8, 7])
    weight = (codes * 0.03125).float().numpy()
    found = quantize_matrix(weight, Scheme(4, 32, symmetric=symmetric)).dequantized()
    np.testing.assert_allclose(found, weight, atol=1e-6)
