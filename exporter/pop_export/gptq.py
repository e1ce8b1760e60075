"""Round weights to 4 bits one column after another, each time moving the rest to make up for it (GPTQ)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pop_export.quantized_matrix import QuantizedMatrix, Scheme, pack

MAX_WINDOWS = 32  # of calibration text; 16 to 48 make no difference on SmolLM2
MAX_HESSIAN_BYTES = 2 << 30  # held at once: more weights take more passes over the text
DAMPING = 0.01  # of the mean diagonal, as in the paper
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a block's range that are tried for its scale


def gptq_matrices(
    model: PreTrainedModel, names: Iterable[str], samples: Sequence[np.ndarray], scheme: Scheme
) -> dict[str, QuantizedMatrix]:
    """Return the named weights quantised so that what they compute on the samples changes least.

    Args:
        model: in fp32.
        names: parameters, weights of linear modules; others are left out.
        samples: windows of token ids.
        scheme: of 4 bits.
    """
    found: dict[str, QuantizedMatrix] = {}
    modules = dict(model.named_modules())
    owners = {name: modules.get(name.removesuffix(".weight")) for name in names}
    linear = {name: module for name, module in owners.items() if module is not None and hasattr(module, "weight")}
    for group in _groups(linear):
        hessians = _hessians(model, group, samples)
        for name, module in group.items():
            weight = module.weight.detach()
            rows = weight if isinstance(module, nn.Linear) else weight.T  # Conv1D keeps [K, N]
            found[name] = gptq(rows, hessians.pop(name), scheme)
    return found


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme) -> QuantizedMatrix:
    """Return a weight quantised so that `(W - Q) H (W - Q)^T` is small.

    Args:
        weight: [N, K] float32.
        hessian: [K, K] float32, sum of x x^T over inputs x; its inputs that are never used count as rounding freely.
        scheme: of 4 bits.

    Source: Frantar et al., "GPTQ", arXiv:2210.17323, algorithm 1, with a scale searched per block.
    """
    (N, K), size = weight.shape, scheme.block_size
    inverse = _inverse_factor(hessian)  # [K, K] upper
    rest = weight.clone()
    codes = torch.zeros(N, -(-K // size) * size, dtype=torch.uint8)
    scales, zeros = [], []
    for start in range(0, K, size):
        stop = min(start + size, K)
        scale, zero = _block_scale(rest[:, start:stop], scheme)  # [N, 1] each
        errors = torch.zeros(N, stop - start)
        for column in range(start, stop):
            code = (rest[:, column : column + 1] / scale + zero).round().clamp(0, 15)  # [N, 1]
            codes[:, column : column + 1] = code.to(torch.uint8)
            error = (rest[:, column : column + 1] - scale * (code - zero)) / inverse[column, column]
            rest[:, column:stop] -= error @ inverse[column : column + 1, column:stop]
            errors[:, column - start] = error[:, 0]
        rest[:, stop:] -= errors @ inverse[start:stop, stop:]
        codes[:, stop : start + size] = zero.to(torch.uint8)  # padding stands for 0
        scales.append(scale)
        zeros.append(zero)
    packed = pack(codes.numpy(), 4).reshape(N, len(scales), -1)
    zero_points = pack(torch.cat(zeros, 1).to(torch.uint8).numpy(), 4) if scheme.has_zero_points else None
    return QuantizedMatrix(scheme, K, packed, torch.cat(scales, 1).numpy(), zero_points)


def _inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse."""
    damped = hessian.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean().clamp(min=1e-12))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _block_scale(block: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return scale and zero point [N, 1] of one block [N, block_size], the best of a few ranges."""
    best = scale = zero = None
    low, high = block.amin(1, keepdim=True).clamp(max=0), block.amax(1, keepdim=True).clamp(min=0)
    for shrink in SHRINKS:
        if scheme.symmetric:
            tried = (torch.maximum(-low, high) * shrink / 7.5).clamp(min=1e-8)
            middle = torch.full_like(tried, 8)
        else:
            tried = ((high - low) * shrink / 15).clamp(min=1e-8)
            middle = (-low * shrink / tried).round().clamp(0, 15)
        rounded = tried * ((block / tried + middle).round().clamp(0, 15) - middle)
        error = (rounded - block).square().sum(1, keepdim=True)
        if best is None or scale is None or zero is None:
            best, scale, zero = error, tried, middle
        else:
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
            zero = torch.where(better, middle, zero)
    assert scale is not None and zero is not None
    return scale, zero


@torch.no_grad()
def _hessians(model: PreTrainedModel, linear: dict[str, Any], samples: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return for each weight the sum of x x^T over its inputs x, [K, K] float32."""
    sums: dict[str, Tensor] = {}

    def add(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            product = x.T @ x
            sums[name] = sums[name] + product if name in sums else product

        return hook

    handles = [module.register_forward_pre_hook(add(name)) for name, module in linear.items()]
    try:
        for ids in samples[:MAX_WINDOWS]:
            model(input_ids=torch.from_numpy(np.asarray(ids, np.int64))[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _groups(linear: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the modules in groups whose Hessians fit in memory together."""
    group: dict[str, Any] = {}
    held = 0
    for name, module in linear.items():
        K = module.weight.shape[1] if isinstance(module, nn.Linear) else module.weight.shape[0]
        if group and held + 4 * K * K > MAX_HESSIAN_BYTES:
            yield group
            group, held = {}, 0
        group[name] = module
        held += 4 * K * K
    if group:
        yield group
