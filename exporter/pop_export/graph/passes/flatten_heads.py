"""Let rotary embedding and fused attention read heads as projections write them, [B, S, H * D]."""

from __future__ import annotations

import onnx_ir as ir

SWAPPED = (0, 2, 1, 3)  # [B, S, H, D] <-> [B, H, S, D]


def flatten_heads(model: ir.Model) -> int:
    """Take out the reshapes and transposes between projections, rotary embedding and `GroupQueryAttention`.

    Families' code keeps heads on an axis of their own: `[B, S, H * D]` is reshaped, transposed, rotated, transposed
    back and reshaped again. Both operators take it flat: per layer this leaves none of 6 transposes and 8 reshapes.
    What is on its way from anywhere else than a projection (a norm over each head) is flattened before it is rotated.

    Args:
        model: changed in place; its markers for K and V are no longer in the graph afterwards, so it cannot be cut.

    Returns:
        How many inputs and outputs of attention are flat now.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "GroupQueryAttention":
            continue
        for index in range(3):
            flat = _flat_input(model.graph, node, index)
            if flat is not None:
                node.replace_input_with(index, flat)
                count += 1
        count += _flatten_output(node.outputs[0])
    return count


def projections_of(attention: ir.Node) -> list[ir.Node] | None:
    """Return the products that Q, K and V of attention are, Q and K rotated; None where they are anything else."""
    found = []
    for value in attention.inputs[:3]:
        back = _producer(value, "Reshape")
        heads = _transposed(back.inputs[0]) if back is not None else None
        rotary = _producer(heads, "RotaryEmbedding")
        rows = _transposed(heads if rotary is None else rotary.inputs[0])
        split = _producer(rows, "Reshape")
        flat = split.inputs[0] if split is not None else None
        if back is None or flat is None or not _same_shape(flat, back.outputs[0]) or len(flat.uses()) != 1:
            return None
        node = flat.producer()
        if node is not None and node.op_type == "Add":
            node = next((value.producer() for value in node.inputs if value is not None and value.producer()), None)
        if node is None:
            return None
        found.append(node)
    turned = [_transposed(_reshaped(value)) for value in attention.inputs[:2]]
    return found if all(_producer(value, "RotaryEmbedding") is not None for value in turned) else None


def _reshaped(value: ir.Value | None) -> ir.Value | None:
    node = _producer(value, "Reshape")
    return node.inputs[0] if node is not None else None


def _flat_input(graph: ir.Graph, attention: ir.Node, index: int) -> ir.Value | None:
    """Return what the input can be instead of `Reshape(Transpose([Rotary(]Transpose([B, S, H, D])[)]))`."""
    back = _producer(attention.inputs[index], "Reshape")
    heads = _transposed(back.inputs[0]) if back is not None else None
    if back is None or heads is None:
        return None
    rotary = _producer(heads, "RotaryEmbedding")
    rows = _transposed(heads if rotary is None else rotary.inputs[0])
    if rows is None or rows.shape is None or not isinstance(rows.shape[2], int):
        return None
    if rotary is None:
        return _flat(graph, rows, back)
    if len(rotary.inputs) != 3:  # positions would be those of tables that were not made for this form
        return None
    attributes = {**rotary.attributes, "num_heads": ir.AttrInt64("num_heads", rows.shape[2])}
    rotated = ir.node("RotaryEmbedding", [_flat(graph, rows, back), *rotary.inputs[1:]], attributes)
    graph.insert_before(attention, rotated)
    rotated.outputs[0].type, rotated.outputs[0].shape = back.outputs[0].type, back.outputs[0].shape
    return rotated.outputs[0]


def _flat(graph: ir.Graph, rows: ir.Value, back: ir.Node) -> ir.Value:
    """Return `rows` [B, S, H, D] as `back` makes them, [B, S, H * D]: what they were reshaped from, if they were."""
    split = _producer(rows, "Reshape")
    flat = split.inputs[0] if split is not None else None
    if flat is not None and _same_shape(flat, back.outputs[0]):
        return flat
    reshape = ir.node("Reshape", [rows, back.inputs[1]])
    reshape.outputs[0].type, reshape.outputs[0].shape = back.outputs[0].type, back.outputs[0].shape
    graph.insert_before(back, reshape)
    return reshape.outputs[0]


def _flatten_output(out: ir.Value) -> int:
    """Let what reads `Reshape(Reshape(out, [B, S, H, D]), [B, S, H * D])` read `out`."""
    count = 0
    for split, _ in list(out.uses()):
        for back, _ in list(split.outputs[0].uses()) if split.op_type == "Reshape" else ():
            if back.op_type == "Reshape" and _same_shape(back.outputs[0], out):
                ir.convenience.replace_all_uses_with(back.outputs[0], out)
                count += 1
    return count


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the ONNX node of that type that makes a value, or None."""
    node = value.producer() if value is not None else None
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """Return what a swap of the axes of heads and positions was made of, or None if the value is not one."""
    node = _producer(value, "Transpose")
    return node.inputs[0] if node is not None and tuple(node.attributes["perm"].as_ints()) == SWAPPED else None


def _same_shape(first: ir.Value, second: ir.Value) -> bool:
    """Return whether both shapes are known and equal, their open axes by name."""
    return first.shape is not None and first.shape == second.shape
