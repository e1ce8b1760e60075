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


def dequantized_parameter(matrix: StoredMatrix, parameter: Tensor) -> Tensor:
    """Return what a stored matrix [N, K] stands for, in the orientation of the parameter it was made from."""
    rows = torch.from_numpy(matrix.dequantized())
    fits = [view for view in (rows, rows.T) if view.shape == parameter.shape]
    if not fits:
        raise ModelError(f"quantised weight: expected the shape {tuple(parameter.shape)}, found {tuple(rows.shape)}")
    return min(fits, key=lambda view: float((view - parameter).abs().sum())).contiguous()
