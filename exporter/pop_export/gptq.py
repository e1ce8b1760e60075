"""Round a matrix to small integers one column after another, each time moving the rest to make up for it (GPTQ)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from pop_export.block_scales import find_scales
from pop_export.channel_matrix import CODE_BITS, ChannelMatrix, ChannelScheme, from_channel_codes
from pop_export.coordinate_descent import refine
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, as_stored, from_codes

SHRINKAGE = 0.3  # what is taken off all but the diagonal: inputs of other text depend on each other in other ways
DAMPING = 1e-3  # of the mean diagonal
MAX_ROWS = 16384  # rounded at once: an embedding has many, and each needs working memory


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme | ChannelScheme) -> QuantizedMatrix | ChannelMatrix:
    """Return a weight quantised so that `(W - Q) H (W - Q)^T` is small.

    Args:
        weight: [N, K] float32.
        hessian: [K, K] float32, sum of x x^T over inputs x; its inputs that are never used count as rounding freely.
        scheme: bits, block size and symmetry, or a scale per channel.

    Source: Frantar et al., "GPTQ", arXiv:2210.17323, algorithm 1, with a scale searched per block when its turn comes;
    a weight counts there what its input's square sums to. Then by `refine`. The Hessian is shrunk towards its diagonal:
    that of some ten thousand tokens fits those too well (docs/experiments.md).
    """
    hessian = _shrunk(hessian)
    inverse = _inverse_factor(hessian)  # [K, K] upper
    if isinstance(scheme, ChannelScheme):
        codes, scales, _ = _rounded(weight, hessian, inverse, Scheme(CODE_BITS, weight.shape[1]))
        return from_channel_codes(codes, scales[:, 0])
    parts = [_rounded(rows, hessian, inverse, scheme) for rows in weight.split(MAX_ROWS)]
    return from_codes(scheme, weight.shape[1], *(torch.cat(part).numpy() for part in zip(*parts, strict=True)))


def _shrunk(hessian: Tensor) -> Tensor:
    """Return the Hessian nearer to its diagonal, and positive definite."""
    shrunk = (1 - SHRINKAGE) * hessian
    shrunk.diagonal().add_(SHRINKAGE * hessian.diagonal() + DAMPING * hessian.diagonal().mean().clamp(min=1e-12))
    return shrunk


def _rounded(weight: Tensor, hessian: Tensor, inverse: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, blocks * size] uint8, scales and zero points [N, blocks] of a weight [N, K]."""
    (N, K), size, last = weight.shape, scheme.block_size, (1 << scheme.bits) - 1
    importance = hessian.diagonal()
    rest = weight.T.contiguous()  # [K, N]: what is left of each column lies together
    codes = torch.zeros(-(-K // size) * size, N)
    scales, zeros = [], []
    for start in range(0, K, size):
        stop = min(start + size, K)
        block = rest[start:stop]
        scale, zero = _block_scales(block.T.contiguous(), importance[start:stop], scheme)  # [N] each
        errors = torch.empty(stop - start, N)
        for column, row in enumerate(block):
            code = (row / scale + zero).round_().clamp_(0, last)
            codes[start + column] = code
            factors = inverse[start + column, start + column : stop]
            errors[column] = (row - scale * (code - zero)) / factors[0]
            block[column + 1 :].addr_(factors[1:], errors[column], alpha=-1)
        rest[stop:].addmm_(inverse[start:stop, stop:].T, errors, alpha=-1)
        codes[stop : start + size] = zero  # padding stands for 0
        scales.append(scale)
        zeros.append(zero)
    found = codes.T.contiguous(), torch.stack(scales, 1), torch.stack(zeros, 1)
    padding = len(codes) - K
    refined, scale = refine(pad(weight, (0, padding)), _padded(hessian, padding), *found, last + 1)
    return refined.to(torch.uint8), scale, found[2].to(torch.uint8)


def _padded(hessian: Tensor, padding: int) -> Tensor:
    """Return the Hessian with more inputs, which depend on no other."""
    padded = pad(hessian, (0, padding, 0, padding))
    padded.diagonal()[len(hessian) :] = 1
    return padded


def _block_scales(block: Tensor, importance: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return scale, as it will be stored, and zero point [N] of one block [N, size or less]."""
    scale, zero = find_scales(block, scheme.bits, not scheme.has_zero_points, importance)
    return as_stored(scale), zero


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the Hessian's inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()
