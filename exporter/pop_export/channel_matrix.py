"""One weight matrix with a scale per output channel, as ONNX Runtime's dynamic integer products take it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pop_export.block_scales import find_scales, nearest_codes

# Activations have 8 bits without a sign. Where a processor adds pairs of products in 16 bits (x86 before VNNI), only
# weights of 7 bits are safe: 2 * 255 * 64 = 32640 < 2^15. With 8 bits the sums saturate there and nowhere else.
CODE_BITS: Literal[7] = 7
ZERO_CODE = 1 << (CODE_BITS - 1)


@dataclass(frozen=True)
class ChannelScheme:
    """Say that a matrix is multiplied with activations that are rounded as they come."""

    method: Literal["gptq", "rtn"] = "rtn"


@dataclass(frozen=True)
class ChannelMatrix:
    """A matrix [N, K] as `DynamicQuantizeMatMul` reads it, from the other side. Weight = scale * code."""

    codes: NDArray[np.int8]  # [K, N], -64 .. 63
    scales: NDArray[np.float32]  # [N]
    input_scales: NDArray[np.float32] | None = None  # [K]: of the numbers' input, which the graph divides by them

    def dequantized(self) -> NDArray[np.float32]:
        """Return the matrix that these numbers stand for, [N, K] float32."""
        rows = (self.codes * self.scales).T
        return np.ascontiguousarray(rows if self.input_scales is None else rows / self.input_scales)

    def rows(self, which: slice) -> ChannelMatrix:
        """Return some of the rows, stored as they are here."""
        codes = np.ascontiguousarray(self.codes[:, which])
        return dataclasses.replace(self, codes=codes, scales=self.scales[which])


def quantize_channels(weight: NDArray[np.float32]) -> ChannelMatrix:
    """Return a weight [N, K] float32 rounded to the nearest codes, with the scale that suits each channel best."""
    rows = torch.from_numpy(np.array(weight, order="C"))  # mapped files are read-only
    scales, zeros = find_scales(rows, CODE_BITS, symmetric=True)
    return from_channel_codes(nearest_codes(rows, scales, zeros, CODE_BITS), scales)


def from_channel_codes(codes: Tensor, scales: Tensor) -> ChannelMatrix:
    """Return codes [N, K], 0 .. 127 with 64 for 0, and scales [N] as a matrix."""
    signed = (codes.to(torch.int16) - ZERO_CODE).to(torch.int8)
    return ChannelMatrix(np.ascontiguousarray(signed.T.numpy()), scales.numpy().astype(np.float32))
