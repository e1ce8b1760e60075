"""Move the scale of a norm's channels into the weights that read it, before both are rounded in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

NORMS = ("RMSNormalization", "LayerNormalization")


def readers_of_norms(models: Iterable[ir.Model]) -> dict[str, tuple[str, ...]]:
    """Return, by name of each norm's scale, the weights that read it in any of the graphs.

    Only where all that reads the norm are products with constant matrices of their own, and nothing else reads its
    constants, in every graph that has them: then `balance_inputs` changes nothing but how numbers are shared between
    the norm and them. Norms of equal values are one constant; a graph that lost one of its readers must not have it
    balanced alone.
    """
    found: dict[str, tuple[str, ...]] = {}
    refused: set[str] = set()
    for model in models:
        for node in model.graph:
            if node.domain != "" or node.op_type not in NORMS:
                continue
            scale, name = _scale(node), str(node.inputs[1].name)  # type: ignore[union-attr]
            weights = [_weight(reader, index) for reader, index in node.outputs[0].uses()]
            if scale is None or not weights or None in weights or node.outputs[0].is_graph_output():
                refused.add(name)
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *(str(w.name) for w in weights if w is not None))))
    return {name: weights for name, weights in found.items() if name not in refused}


def balance_inputs(model: ir.Model, scales: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Divide norms by scales [K] and multiply the weights that read them by the same, along K.

    Before: `MatMul(Norm(x, g[, b]), W)`; after: `MatMul(Norm(x, g / s[, b / s]), s * W)`, the same product.

    Args:
        model: changed in place; its constants keep their names.
        scales: by name of the norm's scale, of those that `readers_of_norms` gives.

    Returns:
        By name of each weight that was multiplied, by what.
    """
    multiplied: dict[str, NDArray[np.float32]] = {}
    for node in model.graph:
        scale = _scale(node)
        by = scales.get(str(scale.name)) if scale is not None else None
        if by is None:
            continue
        for value in node.inputs[1:]:
            assert value is not None
            _replace(value, _numbers(value) / by)
        for reader, index in node.outputs[0].uses():
            weight = _weight(reader, index)
            assert weight is not None and weight.name is not None
            if weight.name not in multiplied:
                rows_are_outputs = bool(reader.attributes.get_int("transB", 0))
                _replace(weight, _numbers(weight) * (by if rows_are_outputs else by[:, None]))
                multiplied[weight.name] = by
    return multiplied


def _scale(node: ir.Node) -> ir.Value | None:
    """Return the constant scale [K] that a norm over the last axis alone reads, or None; a bias has to be as much."""
    if node.domain != "" or node.op_type not in NORMS or node.attributes.get_int("axis", -1) != -1:
        return None
    constants = node.inputs[1:]
    for value in constants:
        if value is None or not value.is_initializer() or value.const_value is None or len(value.uses()) != 1:
            return None
    return constants[0] if len(constants[0].const_value.shape) == 1 else None  # type: ignore[union-attr]


def _weight(reader: ir.Node, index: int) -> ir.Value | None:
    """Return the constant matrix, read by nothing else, that a product multiplies its first input by, or None."""
    if index != 0 or reader.domain != "" or reader.op_type not in ("MatMul", "Gemm"):
        return None
    if any(reader.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    weight = reader.inputs[1]
    if weight is None or not weight.is_initializer() or weight.const_value is None or len(weight.uses()) != 1:
        return None
    return weight if len(weight.const_value.shape) == 2 and not reader.attributes.get_int("transA", 0) else None


def _numbers(value: ir.Value) -> NDArray[np.float32]:
    assert value.const_value is not None
    numbers: NDArray[np.float32] = value.const_value.numpy()
    return numbers


def _replace(value: ir.Value, numbers: NDArray[np.float32]) -> None:
    value.const_value = ir.tensor(np.ascontiguousarray(numbers, np.float32), name=value.name)
