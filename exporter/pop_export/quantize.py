"""Quantise the decode graph's weights, and those that cutting the prefill graph adds, to 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pop_export.graph.passes.quantize_embedding import quantize_embedding
from pop_export.graph.passes.quantize_matmuls import matrix_weight, quantize_matmuls
from pop_export.graph.passes.resolve_markers import marked_value
from pop_export.quantized_matrix import QuantizedMatrix, Scheme
from pop_runtime.errors import ModelError

ADDED_SUFFIX = ".refit"  # ends the name of a weight that only the prefill graph has


@dataclass(frozen=True)
class Schemes:
    """How each kind of weight is quantised."""

    dense: Scheme
    key_value: Scheme  # K and V projections: a skipped layer is nothing but these, and small
    embedding: Scheme  # the embedding and, where they are one matrix, the head


@dataclass(frozen=True)
class Quantization:
    """What was quantised."""

    matrices: Mapping[str, QuantizedMatrix]  # by name of the weight, which is that of the model's parameter
    kept: tuple[str, ...]  # matrices of the graph that stay as they were


def quantize_decode_graph(decode: ir.Model, model: PreTrainedModel, schemes: Schemes) -> Quantization:
    """Quantise every matrix of the decode graph that is a parameter of the model; the graph is changed in place.

    Raises:
        ModelError: the graph holds no such matrix.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    key_value = key_value_weights(decode, model.config.get_text_config(decoder=True).num_hidden_layers)
    rows = {node.inputs[0].name for node in decode.graph if node.op_type == "Gather" and node.inputs[0] is not None}

    def scheme_of(name: str) -> Scheme | None:
        if name not in parameters:
            return None
        if name in key_value:
            return schemes.key_value
        return schemes.embedding if name in rows else schemes.dense

    matmuls = quantize_matmuls(decode, scheme_of)
    matrices = {**matmuls, **quantize_embedding(decode, scheme_of, matmuls)}
    if not matrices:
        raise ModelError(
            f"{type(model).__name__}: expected weight matrices to quantise in the decode graph, found none; "
            "export it with --precision fp32"
        )
    kept = {weight.name for node in decode.graph if (weight := matrix_weight(node)) is not None and weight.name}
    return Quantization(matrices, tuple(sorted(kept)))


def quantize_added_weights(prefill: ir.Model, schemes: Schemes) -> dict[str, QuantizedMatrix]:
    """Quantise the weights that only the prefill graph has, in place, and return them by parameter name."""
    found = quantize_matmuls(prefill, lambda name: schemes.key_value if name.endswith(ADDED_SUFFIX) else None)
    return {name.removesuffix(ADDED_SUFFIX): matrix for name, matrix in found.items()}


def key_value_weights(decode: ir.Model, num_layers: int) -> set[str]:
    """Return the names of the weights that project to K and V: the nearest ones above what each layer caches."""
    names: set[str] = set()
    for layer in range(num_layers):
        seen: set[ir.Node] = set()
        pending = [marked_value(decode, f"layers.{layer}.{part}").producer() for part in ("key", "value")]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            weight = matrix_weight(node)
            if weight is not None and weight.name:
                names.add(weight.name)
            else:
                pending += [value.producer() for value in node.inputs if value is not None]
    return names


def dequantized_parameter(matrix: QuantizedMatrix, parameter: Tensor) -> Tensor:
    """Return what a stored matrix [N, K] stands for, in the orientation of the parameter it was made from."""
    rows = torch.from_numpy(matrix.dequantized())
    fits = [view for view in (rows, rows.T) if view.shape == parameter.shape]
    if not fits:
        raise ModelError(f"quantised weight: expected the shape {tuple(parameter.shape)}, found {tuple(rows.shape)}")
    return min(fits, key=lambda view: float((view - parameter).abs().sum())).contiguous()


@contextmanager
def dequantized_weights(model: PreTrainedModel, matrices: Mapping[str, QuantizedMatrix]) -> Iterator[None]:
    """Let the model compute with what the quantised weights stand for while the context is open."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    originals = {name: parameters[name].data for name in matrices}
    try:
        for name, matrix in matrices.items():
            parameters[name].data = dequantized_parameter(matrix, originals[name])
        yield
    finally:
        for name, original in originals.items():
            parameters[name].data = original
