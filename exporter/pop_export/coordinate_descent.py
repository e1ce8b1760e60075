"""Improve a rounded matrix one code at a time, each to the integer that is best beside all others of its row."""

from __future__ import annotations

import torch
from torch import Tensor

from pop_export.quantized_matrix import as_stored

NUM_SWEEPS = 2  # SmolLM2, after GPTQ: 1 takes 9 % off the squared error, 2 12 %, 4 14 %, 8 15 %
MAX_SCALE_CHANGE = 0.2  # of a scale, per sweep


def refine(
    weight: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, num_codes: int
) -> tuple[Tensor, Tensor]:
    """Return codes and scales with which `(W - Q) H (W - Q)^T` is no larger than with the given ones.

    Each sweep fits all scales to the codes (least squares, block after block), then moves each code, column after
    column, to where the error of its row is smallest while the row's others stay.

    Args:
        weight: [N, K] float32; K is a whole number of blocks.
        hessian: [K, K] float32, positive definite.
        codes: [N, K] float32, whole numbers 0 .. num_codes - 1.
        scales: [N, blocks] float32, none of them 0.
        zeros: [N, blocks] float32, zero points.
        num_codes: how many codes there are.

    Source: Behdin et al., "QuantEase", arXiv:2309.01885, whose scales are fixed.
    """
    blocks = scales.shape[1]
    size = weight.shape[1] // blocks
    offsets = zeros.repeat_interleave(size, 1)
    steps = codes - offsets  # Q = scale * step
    for _ in range(NUM_SWEEPS):
        scales = as_stored(_fit_scales(weight, hessian, steps, scales, size))
        _move_codes(weight, hessian, steps, scales, zeros, num_codes, size)
    return steps + offsets, scales


def _fit_scales(weight: Tensor, hessian: Tensor, steps: Tensor, scales: Tensor, size: int) -> Tensor:
    """Return scales, each moved to where the error of its row is smallest while all else stays."""
    scales = scales.clone()
    pull = (weight - _times(steps, scales, size)) @ hessian  # [N, K]: half the gradient, downhill
    for block in range(scales.shape[1]):
        columns = slice(block * size, (block + 1) * size)
        step = steps[:, columns]
        effect = step @ hessian[columns]  # [N, K]
        change = (pull[:, columns] * step).sum(1) / (effect[:, columns] * step).sum(1).clamp(min=1e-30)
        most = MAX_SCALE_CHANGE * scales[:, block].abs()  # a scale of few codes could come near 0
        change = change.clamp(-most, most)
        scales[:, block] += change
        pull -= change[:, None] * effect
    return scales


def _move_codes(
    weight: Tensor, hessian: Tensor, steps: Tensor, scales: Tensor, zeros: Tensor, num_codes: int, size: int
) -> None:
    """Move each code to where the error of its row is smallest while all else stays; in place."""
    pull = (weight - _times(steps, scales, size)) @ hessian  # [N, K]: half the gradient, downhill
    for block in range(scales.shape[1]):
        columns = slice(block * size, (block + 1) * size)
        own = hessian[columns, columns]
        rows = pull[:, columns].T.contiguous()  # [size, N]: a column at a time
        scale, lowest = scales[:, block], -zeros[:, block]
        changes = torch.empty_like(rows)
        for column in range(size):
            before = steps[:, block * size + column]
            after = before + rows[column] / (own[column, column] * scale)
            after = after.round_().clamp_(lowest, lowest + (num_codes - 1))
            changes[column] = (after - before) * scale
            rows.addr_(own[column], changes[column], alpha=-1)
            steps[:, block * size + column] = after
        pull -= changes.T @ hessian[columns]


def _times(steps: Tensor, scales: Tensor, size: int) -> Tensor:
    return steps * scales.repeat_interleave(size, 1)
