"""Give the prefill graph weights of its own where refit changed them; the decode graph keeps the original ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from torch import Tensor

from pop_export.graph.passes.store_weights_as_read import TRANSPOSED
from pop_runtime.errors import ModelError

SUFFIX = ".refit"  # a weight that only prefill has is called after the one it stands in for


def use_prefill_weights(model: ir.Model, weights: Mapping[str, Tensor]) -> int:
    """Replace initializers by new ones of the name `<name>.refit`, in the orientation in which the graph reads them.

    A bias that the graph shares with another layer, because both were equal, is replaced for this layer alone.

    Args:
        model: a prefill graph.
        weights: by parameter name, in the parameter's own orientation; a module's bias only beside its weight.

    Returns:
        How many initializers were added.

    Raises:
        ModelError: a weight is not read by exactly one linear node, or its bias is not where it should be.
    """
    names = [name for name in weights if name.endswith(".weight")]
    for name in names:
        node = linear_node(model, name)
        stored = node.inputs[1]
        assert stored is not None
        value = weights[name].numpy()
        if TRANSPOSED in stored.metadata_props:
            value = np.ascontiguousarray(value.T)
        _replace(model, node, 1, name, value)
        bias = name.removesuffix("weight") + "bias"
        if bias in weights:
            reader, index = _bias_input(node, name)
            _replace(model, reader, index, bias, weights[bias].numpy())
    for name, initializer in list(model.graph.initializers.items()):
        if not initializer.uses():
            del model.graph.initializers[name]
    return len(weights)


def linear_node(model: ir.Model, weight: str) -> ir.Node:
    """Return the `MatMul` or `Gemm` that multiplies by the initializer `weight`.

    Raises:
        ModelError: there is no such node, or more than one.
    """
    value = model.graph.initializers.get(weight)
    readers = [] if value is None else [node for node, index in value.uses() if index == 1]
    if len(readers) != 1 or readers[0].op_type not in ("MatMul", "Gemm"):
        raise ModelError(
            f"prefill graph, {weight}: expected one MatMul or Gemm reading it, found "
            f"{', '.join(node.op_type for node in readers) or 'none'}; export with --no-refit --surrogate off"
        )
    return readers[0]


def _bias_input(node: ir.Node, weight: str) -> tuple[ir.Node, int]:
    """Return the node that adds the bias of a linear node, and at which input."""
    if node.op_type == "Gemm" and len(node.inputs) > 2:
        return node, 2
    for reader, index in node.outputs[0].uses():
        other = reader.inputs[1 - index] if reader.op_type == "Add" else None
        if other is not None and other.is_initializer():
            return reader, 1 - index
    raise ModelError(f"prefill graph, {weight}: expected a bias added to its product, found none; use --no-refit")


def _replace(model: ir.Model, node: ir.Node, index: int, name: str, value: np.ndarray) -> None:
    name += SUFFIX
    stored = node.inputs[index]
    assert stored is not None and stored.const_value is not None
    value = value.astype(stored.const_value.dtype.numpy())  # a graph in 16 bits keeps its weights in 16 bits
    new = ir.val(name, const_value=ir.tensor(value, dtype=stored.const_value.dtype, name=name))
    model.graph.register_initializer(new)
    node.replace_input_with(index, new)
