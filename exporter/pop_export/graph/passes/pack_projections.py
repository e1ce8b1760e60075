"""Multiply by the weights of Q, K and V at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pop_export.graph.passes.flatten_heads import projections_of
from pop_export.graph.passes.multiply_dynamically import OP_TYPE as DYNAMIC

SUFFIX = ".qkv"  # a packed weight is called after that of Q


def pack_projections(decode: ir.Model, prefill: ir.Model) -> int:
    """Replace the three products that feed attention by one and a `Split`, in both graphs.

    Only where `GroupQueryAttention` can read the packed product (`rotate_in_attention.py` then takes the `Split` away),
    where all three weights are alike, and where prefill reads all of them or none: a weight is never stored twice.

    Returns:
        How many layers of the decode graph were packed.
    """
    count = 0
    packed: dict[str, ir.Value] = {}
    for attention in [node for node in decode.graph if node.op_type == "GroupQueryAttention"]:
        linears = projections_of(attention)
        if linears is None or not _alike(linears):
            continue
        names = [str(linear.inputs[1].name) for linear in linears if linear.inputs[1] is not None]
        others = _readers(prefill, names)
        if others is None or (others and not _alike(others)):
            continue
        for model, products in ((decode, linears), (prefill, others)):
            if products:
                _pack(model.graph, products, packed)
        count += 1
    return count


def _readers(model: ir.Model, weights: Sequence[str]) -> list[ir.Node] | None:
    """Return the nodes that multiply by the weights; none at all, or None where there is another number of them."""
    found = [list(model.graph.initializers[name].uses()) for name in weights if name in model.graph.initializers]
    if not any(found):
        return []
    nodes = [uses[0][0] for uses in found if len(uses) == 1]
    return nodes if len(nodes) == len(weights) else None


def _alike(linears: Sequence[ir.Node]) -> bool:
    """Return whether products differ in nothing but their constants and the number of their columns."""
    first = linears[0]
    ways = {tuple(sorted((key, str(node.attributes[key].value)) for key in node.attributes if key != "N"))
            for node in linears}  # fmt: skip
    biases = [_bias(node) is not None for node in linears]
    constants = [value for node in linears for value in node.inputs[1:] if value is not None]
    stored = [_stored(value) for value in constants]
    cast = {tuple(value is not None and value.producer() is not None for value in node.inputs[1:]) for node in linears}
    return (
        len({(node.domain, node.op_type, node.inputs[0], len(node.inputs)) for node in linears}) == 1
        and first.op_type in ("MatMul", "MatMulNBits", DYNAMIC)
        and len(ways) == len(cast) == 1
        and len(set(biases)) == 1
        and None not in stored
    )


def _stored(constant: ir.Value) -> ir.Value | None:
    """Return the initializer that a constant is, or is cast from (16-bit scales); None if others read it too."""
    cast = constant.producer()
    if len(constant.uses()) != 1 or (cast is not None and cast.op_type != "Cast"):
        return None
    value = constant if cast is None else cast.inputs[0]
    return value if value is not None and value.is_initializer() and len(value.uses()) == 1 else None


def _bias(linear: ir.Node) -> ir.Node | None:
    """Return the `Add` of a constant that alone reads a product."""
    uses = list(linear.outputs[0].uses())
    if len(uses) != 1 or uses[0][0].op_type != "Add":
        return None
    node, index = uses[0]
    other = node.inputs[1 - index]
    return node if other is not None and other.is_initializer() else None


def _pack(graph: ir.Graph, linears: Sequence[ir.Node], packed: dict[str, ir.Value]) -> None:
    """Put one product, its bias and a `Split` in the place of three."""
    first = linears[0]
    axis = 0 if first.op_type == "MatMulNBits" else -1  # blocks are [N, blocks, ...]; else weights are [K, N] or [N]
    constants: list[ir.Value | None] = []
    casts: list[ir.Node] = []
    for index in range(1, len(first.inputs)):
        values = [node.inputs[index] for node in linears]
        if values[0] is None:
            constants.append(None)
            continue
        stored = [_stored(value) for value in values if value is not None]
        constant, cast = _constant(graph, str(stored[0].name), stored, axis, packed), values[0].producer()  # type: ignore[union-attr]
        if cast is not None:
            casts.append(ir.node("Cast", [constant], dict(cast.attributes)))
            constant = casts[-1].outputs[0]
            constant.type = values[0].type
        constants.append(constant)
    results = [_bias(node) or node for node in linears]
    sizes = [int(node.outputs[0].shape[-1]) for node in results]  # type: ignore[index, arg-type]
    attributes = dict(first.attributes)
    if "N" in attributes:
        attributes["N"] = ir.AttrInt64("N", sum(sizes))
    new = [ir.node(first.op_type, [first.inputs[0], *constants], attributes, domain=first.domain)]
    if results[0] is not first:
        biases = [next(value for value in node.inputs if value is not None and value.is_initializer())
                  for node in results]  # fmt: skip
        # Layers may share one bias, where all of theirs are equal: the weight of Q is this layer's own.
        own = f"{first.inputs[1].name}.bias"  # type: ignore[union-attr]
        new.append(ir.node("Add", [new[0].outputs[0], _constant(graph, own, biases, 0, packed)]))
    shape = results[0].outputs[0].shape
    for node in new:
        node.outputs[0].type = results[0].outputs[0].type
        node.outputs[0].shape = ir.Shape([*shape[:-1], sum(sizes)])  # type: ignore[index]
    lengths = ir.val(f"pop.split.{'_'.join(map(str, sizes))}", const_value=ir.tensor(np.array(sizes, np.int64)))
    lengths = graph.initializers.setdefault(str(lengths.name), lengths)
    split = ir.node("Split", [new[-1].outputs[0], lengths], {"axis": -1}, num_outputs=len(sizes))
    graph.insert_before(linears[0], [*casts, *new, split])
    for result, part in zip(results, split.outputs, strict=True):
        old, name = result.outputs[0], result.outputs[0].name
        part.type, part.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, part)
        old.name, part.name = None, name
    removed = [node for pair in zip(results, linears, strict=True) for node in dict.fromkeys(pair)]
    removed += [cast for node in linears for value in node.inputs[1:]
                if value is not None and (cast := value.producer()) is not None]  # fmt: skip
    inputs = [value for node in removed for value in node.inputs if value is not None and value.is_initializer()]
    for node in removed:
        graph.remove(node, safe=True)
    for value in inputs:
        if not value.uses():
            graph.initializers.pop(str(value.name), None)


def _constant(
    graph: ir.Graph, first: str, values: Sequence[ir.Value | None], axis: int, packed: dict[str, ir.Value]
) -> ir.Value:
    """Return constants joined along an axis, called after the first; both graphs get the same tensor.

    It is made only when it is written.
    """
    tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
    name = f"{first}{SUFFIX}"
    if name not in packed:
        shape = tensors[0].shape.numpy()
        axis %= len(shape)
        joined = (*shape[:axis], sum(tensor.shape.numpy()[axis] for tensor in tensors), *shape[axis + 1 :])

        def join() -> ir.Tensor:
            return ir.Tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis), name=name)

        lazy = ir.LazyTensor(join, dtype=tensors[0].dtype, shape=ir.Shape(joined), name=name)
        packed[name] = ir.val(name, const_value=lazy)
    value = ir.val(name, const_value=packed[name].const_value)
    graph.register_initializer(value)
    return value
