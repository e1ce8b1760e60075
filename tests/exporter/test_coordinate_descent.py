"""Moving codes one at a time: never worse, and as good as trying every combination where that can be tried."""

from itertools import product

import pytest
import torch

from pop_export.block_scales import find_scales, nearest_codes
from pop_export.coordinate_descent import refine

N, K, SIZE = 24, 64, 32


def case(seed, *, symmetric=True, bits=4):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator)
    x = torch.randn(200, K, generator=generator) @ torch.randn(K, K, generator=generator)
    blocks = weight.reshape(N, -1, SIZE)
    scales, zeros = find_scales(blocks, bits, symmetric)
    scales = scales.half().float()
    return weight, x.T @ x, nearest_codes(blocks, scales, zeros, bits).flatten(1), scales, zeros, 1 << bits


def losses(weight, hessian, codes, scales, zeros):
    stored = (codes - zeros.repeat_interleave(SIZE, 1)) * scales.repeat_interleave(SIZE, 1)
    error = weight - stored
    return ((error @ hessian) * error).sum(1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_every_row_falls_and_codes_stay_within_their_bits(symmetric, bits):
    weight, hessian, codes, scales, zeros, num_codes = case(1, symmetric=symmetric, bits=bits)
    found, moved = refine(weight, hessian, codes, scales, zeros, num_codes)
    before, after = losses(weight, hessian, codes, scales, zeros), losses(weight, hessian, found, moved, zeros)
    assert (after <= before * (1 + 1e-3)).all() and after.sum() < 0.6 * before.sum()
    assert torch.equal(found, found.round()) and found.min() >= 0 and found.max() < num_codes
    assert torch.equal(moved, moved.half().float())  # as they are stored


def test_no_single_code_could_be_better():
    weight, hessian, codes, scales, zeros, num_codes = case(2)
    for _ in range(20):  # until nothing moves
        codes, scales = refine(weight, hessian, codes, scales, zeros, num_codes)
    least = losses(weight, hessian, codes, scales, zeros)
    for column, change in product(range(0, K, 7), (-1, 1)):
        other = codes.clone()
        other[:, column] = (other[:, column] + change).clamp(0, num_codes - 1)
        assert (losses(weight, hessian, other, scales, zeros) >= least * (1 - 1e-4)).all()


def test_inputs_that_do_not_depend_on_each_other_leave_nothing_to_do():
    weight, _, codes, scales, zeros, num_codes = case(3)
    found, _ = refine(weight, torch.eye(K), codes, scales, zeros, num_codes)
    assert (found != codes).float().mean() < 0.02  # a scale that moved a little


def test_the_given_codes_and_scales_are_left_alone():
    given = case(4)
    copies = [value.clone() for value in given[:5]]
    refine(*given)
    assert all(torch.equal(value, copy) for value, copy in zip(given[:5], copies, strict=True))
