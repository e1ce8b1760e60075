"""One weight matrix in blocks of small integers, as ONNX Runtime's kernels take it, and back again."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pop_export.block_scales import find_scales, nearest_codes

Method = Literal["rtn", "k_quant", "hqq", "gptq"]
Bits = Literal[4, 7, 8]  # 7: see channel_matrix.py; blocks have 4 or 8
SEARCHED_AT_ONCE = 1 << 18  # numbers whose scales are searched together: what fits a core's cache
MAX_SCALE_CHANGE = 1e-3  # by rounding to 16 bits; 5e-4 is what normal numbers can change by


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised."""

    bits: Bits
    block_size: int  # neighbours along K that share a scale: a power of two, 16 or more
    method: Method = "rtn"  # k_quant and hqq search scale and zero point, and are asymmetric by nature
    symmetric: bool = True

    @property
    def has_zero_points(self) -> bool:
        """Whether each block has a zero point of its own; else it is the middle of the range."""
        return self.method in ("k_quant", "hqq") or not self.symmetric


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [N, K] as ONNX Runtime's MatMulNBits reads it. Weight = scale * (code - zero point)."""

    scheme: Scheme
    num_columns: int  # K; the last block is padded
    packed: NDArray[np.uint8]  # [N, blocks, block_size * bits / 8]; of two codes in a byte the low half comes first
    scales: NDArray[np.float16] | NDArray[np.float32]  # [N, blocks], as `stored_scales` gives them
    zero_points: NDArray[np.uint8] | NDArray[np.float32] | None  # [N, ceil(blocks * bits / 8)], or [N, blocks] (hqq)
    input_scales: NDArray[np.float32] | None = None  # [K]: of the numbers' input, which the graph divides by them

    def dequantized(self) -> NDArray[np.float32]:
        """Return the matrix that these numbers stand for, [N, K] float32, for an input that nothing divides."""
        N, blocks, _ = self.packed.shape
        codes = _unpacked(self.packed, self.scheme.bits).astype(np.float32)  # [N, blocks, block_size]
        if self.zero_points is None:
            codes -= 1 << (self.scheme.bits - 1)
        elif self.zero_points.dtype == np.uint8:
            codes -= _unpacked(self.zero_points, self.scheme.bits)[:, :blocks, None]
        else:
            codes -= self.zero_points[..., None]
        codes *= self.scales.astype(np.float32)[..., None]
        rows = codes.reshape(N, -1)[:, : self.num_columns]
        return rows if self.input_scales is None else rows / self.input_scales

    def rows(self, which: slice) -> QuantizedMatrix:
        """Return some of the rows, stored as they are here."""
        zero_points = None if self.zero_points is None else self.zero_points[which]
        return dataclasses.replace(self, packed=self.packed[which], scales=self.scales[which], zero_points=zero_points)


def quantize_matrix(weight: NDArray[np.float32], scheme: Scheme) -> QuantizedMatrix:
    """Return a weight [N, K] float32 in blocks along K, from nothing but its numbers.

    Source: rtn, which gptq is too where there are no inputs to look at, by `find_scales`. k_quant after llama.cpp's
    quantiser of that name and HQQ, Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models",
    2023, are onnxruntime's code.
    """
    N, K = weight.shape
    blocks = -(-K // scheme.block_size)
    if scheme.method in ("rtn", "gptq"):
        return _round_to_nearest(weight, scheme)
    packed, scales, zero_points = (_hqq if scheme.method == "hqq" else _k_quant)(weight, scheme, blocks)
    return QuantizedMatrix(
        scheme, K, packed.reshape(N, blocks, -1), stored_scales(scales.reshape(N, blocks)), zero_points
    )


def stored_scales(scales: NDArray[np.float32]) -> NDArray[np.float16] | NDArray[np.float32]:
    """Return scales in 16 bits, half a bit per weight less in blocks of 32, or as they are where they do not fit.

    They fit where none changes by more than a thousandth, which is less than the rounding of the largest 8-bit code.
    """
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
    close = np.abs(half.astype(np.float32) - scales) <= MAX_SCALE_CHANGE * np.abs(scales)
    return half if close.all() else scales


def as_stored(scales: Tensor) -> Tensor:
    """Return float32 scales with the values that they will be stored with."""
    return torch.from_numpy(stored_scales(scales.numpy()).astype(np.float32))


def _round_to_nearest(weight: NDArray[np.float32], scheme: Scheme) -> QuantizedMatrix:
    K = weight.shape[1]
    blocks = -(-K // scheme.block_size)
    padded = np.pad(weight, ((0, 0), (0, blocks * scheme.block_size - K))) if K % scheme.block_size else weight
    parts = []
    for rows in torch.from_numpy(np.ascontiguousarray(padded)).split(max(1, SEARCHED_AT_ONCE // padded.shape[1])):
        block = rows.reshape(len(rows), blocks, -1)
        scales, zeros = find_scales(block, scheme.bits, scheme.symmetric)
        scales = as_stored(scales)
        codes = nearest_codes(block, scales, zeros, scheme.bits).to(torch.uint8)
        parts.append((codes.flatten(1), scales, zeros.to(torch.uint8)))
    return from_codes(scheme, K, *(torch.cat(part).numpy() for part in zip(*parts, strict=True)))


def from_codes(
    scheme: Scheme, num_columns: int, codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8]
) -> QuantizedMatrix:
    """Return codes [N, blocks * block_size] with scales and zero points [N, blocks] as a matrix.

    Zero points are stored where the scheme has them; else each is the middle of the codes.
    """
    packed = pack(codes, scheme.bits).reshape(*scales.shape, -1)
    zero_points = pack(zeros, scheme.bits) if scheme.has_zero_points else None
    return QuantizedMatrix(scheme, num_columns, packed, stored_scales(scales), zero_points)


def _k_quant(weight: np.ndarray, scheme: Scheme, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    N, K = weight.shape
    padded = np.pad(weight, ((0, 0), (0, blocks * scheme.block_size - K)))
    with np.errstate(divide="ignore", invalid="ignore"):  # a block of equal numbers: its first guess is kept
        ort = _quantizers("neural_compressor.weight_only")
        codes, scales, zero_points = ort.quant_tensor_k_quant_cpu(padded, scheme.bits, scheme.block_size)
    packed = pack(codes.astype(np.uint8).reshape(N, -1), scheme.bits)
    return packed, scales.astype(np.float32), pack(zero_points.reshape(N, blocks), scheme.bits)


def _hqq(weight: np.ndarray, scheme: Scheme, _blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ort = _quantizers("matmul_nbits_quantizer")
    config = ort.HQQWeightOnlyQuantConfig(block_size=scheme.block_size, bits=scheme.bits)
    codes, scales, zero_points = ort.HQQWeightOnlyQuantizer(config).quantize_internal(
        torch.from_numpy(weight), bits=scheme.bits, group_size=scheme.block_size
    )
    return pack(codes.numpy().astype(np.uint8), scheme.bits), scales.numpy(), zero_points.numpy()


def _quantizers(module: str) -> Any:
    """Return a module of onnxruntime.quantization; importing it would turn on all the process's INFO messages."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        return importlib.import_module(f"onnxruntime.quantization.{module}")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def pack(codes: np.ndarray, bits: Bits) -> NDArray[np.uint8]:
    """Return codes [N, C] uint8 packed along C: [N, ceil(C * bits / 8)]."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _unpacked(packed: np.ndarray, bits: Bits) -> NDArray[np.uint8]:
    """Return the codes of packed bytes [..., C], [..., C * 8 / bits] uint8."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
