"""Let a model in PyTorch compute with what its quantised weights stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pop_export.split_matrix import StoredMatrix
from pop_runtime.errors import ModelError


@contextmanager
def stored_weights(model: PreTrainedModel, matrices: Mapping[str, StoredMatrix]) -> Iterator[None]:
    """Put what the matrices stand for in the place of the parameters of their names while the context is open."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    originals = {name: parameters[name].data for name in matrices if name in parameters}
    try:
        for name, original in originals.items():
            parameters[name].data = dequantized_parameter(matrices[name], original)
        yield
    finally:
        for name, original in originals.items():
            parameters[name].data = original


def dequantized_parameter(matrix: StoredMatrix, parameter: Tensor, which: slice = slice(None)) -> Tensor:
    """Return the parameter [N, K] or [K, N] with what a stored matrix stands for in the place of rows of [N, K].

    Args:
        matrix: made from the rows of the parameter.
        parameter: in whatever orientation; unchanged.
        which: the rows; all of them if nothing is said.
    """
    rows = torch.from_numpy(matrix.dequantized())
    changed = parameter.clone(memory_format=torch.contiguous_format)
    fits = [view for view in (changed, changed.T) if view[which].shape == rows.shape]
    if not fits:
        raise ModelError(f"quantised weight: expected the shape {tuple(parameter.shape)}, found {tuple(rows.shape)}")
    min(fits, key=lambda view: float((view[which] - rows).abs().sum()))[which] = rows
    return changed
