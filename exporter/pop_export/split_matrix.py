"""A matrix whose first rows keep more bits: an embedding, whose frequent tokens come first in most vocabularies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pop_export.channel_matrix import ChannelMatrix, ChannelScheme, quantize_channels
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix

# Byte-pair merges are numbered as they were learned, the most frequent first: of SmolLM2's vocabulary the first quarter
# makes up seven eighths of English text and code.
FREQUENT_SHARE = 1 / 4


@dataclass(frozen=True)
class SplitScheme:
    """How the two parts are quantised."""

    frequent: Scheme  # the first FREQUENT_SHARE of the rows
    rare: Scheme


@dataclass(frozen=True)
class SplitMatrix:
    """Two matrices [N1, K] and [N2, K] that lie below each other."""

    parts: tuple[QuantizedMatrix, QuantizedMatrix]

    def dequantized(self) -> NDArray[np.float32]:
        """Return the matrix that these numbers stand for, [N1 + N2, K] float32."""
        return np.concatenate([part.dequantized() for part in self.parts])


AnyScheme = Scheme | SplitScheme | ChannelScheme
StoredMatrix = QuantizedMatrix | SplitMatrix | ChannelMatrix


def store_matrix(weight: NDArray[np.float32], scheme: AnyScheme) -> StoredMatrix:
    """Return a weight [N, K] float32 as the scheme stores it, from nothing but its numbers."""
    if isinstance(scheme, Scheme):
        return quantize_matrix(weight, scheme)
    if isinstance(scheme, ChannelScheme):
        return quantize_channels(weight)
    num_frequent = max(1, round(len(weight) * FREQUENT_SHARE))
    parts = weight[:num_frequent], weight[num_frequent:]
    return SplitMatrix((quantize_matrix(parts[0], scheme.frequent), quantize_matrix(parts[1], scheme.rare)))


def parts_of(name: str, matrix: StoredMatrix) -> list[tuple[str, QuantizedMatrix]]:
    """Return the matrices of one size of code, top to bottom, with names of their own."""
    if isinstance(matrix, QuantizedMatrix):
        return [(name, matrix)]
    assert isinstance(matrix, SplitMatrix)  # a ChannelMatrix is no matrix of blocks
    return list(zip((f"{name}.frequent", f"{name}.rare"), matrix.parts, strict=True))
