"""Find the scale, and the zero point, with which a block of weights is closest to small integers."""

from __future__ import annotations

import torch
from torch import Tensor

# What is tried, the range that is exactly filled among it. Twice as fine or as wide a search gains less than 0.1 % of
# the squared error of long-tailed weights in 4 bits.
RANGE_STEPS = tuple(step / 5 for step in range(-4, 5))  # symmetric: added to the largest code
RANGE_SHRINKS = tuple(1.04 - 0.04 * step for step in range(8))  # asymmetric: times the block's range
SMALLEST = 1e-8  # scale of a block of zeros


def find_scales(blocks: Tensor, bits: int, symmetric: bool, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, [...] each, with which the blocks' squared error is small.

    Each range that is tried gives codes, the codes the scale that fits them best (least squares), and the scale with
    the least error is taken. A symmetric scale may be negative: codes reach one further below zero than above.

    Args:
        blocks: [..., block_size] weights that share a scale.
        bits: of a code.
        symmetric: whether the zero point is the middle of the codes.
        importance: [..., block_size] or broadcast to it, >= 0: what each weight's squared error counts; None: alike.

    Source: the search of llama.cpp's k-quants (make_qx_quants), with ranges of ONNX Runtime's codes.
    """
    counts = torch.ones_like(blocks) if importance is None else importance
    return (_symmetric if symmetric else _asymmetric)(blocks, counts, bits)


def nearest_codes(blocks: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the codes [..., block_size], 0 .. 2^bits - 1, that are closest to blocks with scales and zeros [...]."""
    return (blocks / scales[..., None] + zeros[..., None]).round_().clamp_(0, (1 << bits) - 1)


def _symmetric(blocks: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    half = 1 << (bits - 1)
    top = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # [..., 1]
    top = torch.where(top == 0, SMALLEST, top)
    best = scales = torch.zeros(blocks.shape[:-1])
    for step in RANGE_STEPS:
        codes = (blocks * (-(half + step) / top)).round_().clamp_(-half, half - 1)
        gain, fitted = _least_squares(blocks, codes, counts)
        better = gain > best
        best, scales = torch.where(better, gain, best), torch.where(better, fitted, scales)
    scales = torch.where(scales == 0, SMALLEST, scales)
    return scales, torch.full_like(scales, half)


def _asymmetric(blocks: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    last = (1 << bits) - 1
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    best = torch.zeros_like(low)
    scales = ((high - low) / last).clamp(min=SMALLEST)
    zeros = (-low / scales).round().clamp(0, last)
    for shrink in RANGE_SHRINKS:
        tried = ((high - low) * shrink / last).clamp(min=SMALLEST)
        middle = (-low * shrink / tried).round()
        for shift in (-1, 0, 1):
            zero = (middle + shift).clamp(0, last)
            codes = nearest_codes(blocks, tried, zero, bits) - zero[..., None]
            gain, fitted = _least_squares(blocks, codes, counts)
            better = (gain > best) & (fitted > 0)
            best, scales = torch.where(better, gain, best), torch.where(better, fitted, scales)
            zeros = torch.where(better, zero, zeros)
    return scales, zeros


def _least_squares(blocks: Tensor, codes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much `scale * codes` reduces the squared error of nothing at all, and that scale, [...] each."""
    weighted = counts * codes
    product, norm = (weighted * blocks).sum(-1), (weighted * codes).sum(-1)
    scale = product / norm.clamp(min=1e-30)
    return product * scale, scale
