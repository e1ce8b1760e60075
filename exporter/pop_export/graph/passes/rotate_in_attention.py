"""Let `GroupQueryAttention` rotate Q and K itself."""

from __future__ import annotations

import onnx_ir as ir

TABLE_OF = "pop.rope_table."  # metadata of a graph: + name of the cosines -> name of their table, see `rope_tables.py`


def rotate_in_attention(model: ir.Model) -> int:
    """Take `RotaryEmbedding` from before attention into it, where the cosines and sines of all positions are known.

    Where Q, K and V then are the parts of one packed product, attention reads the product. Runs on flat heads.

    Returns:
        How many attention nodes rotate.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type == "GroupQueryAttention" and not node.attributes["do_rotary"].as_int():
            count += _rotate(model, node)
    return count


def _rotate(model: ir.Model, attention: ir.Node) -> bool:
    turned = [value.producer() if value is not None else None for value in attention.inputs[:2]]
    query, key = (node if node is not None and node.op_type == "RotaryEmbedding" else None for node in turned)
    if query is None or key is None or list(query.inputs[1:]) != list(key.inputs[1:]) or len(query.inputs) != 3:
        return False
    names = [model.metadata_props.get(f"{TABLE_OF}{value.name}") for value in query.inputs[1:] if value is not None]
    tables = [model.graph.initializers.get(name) for name in names if name is not None]
    if len(tables) != 2 or None in tables:
        return False
    inputs = [query.inputs[0], key.inputs[0], *attention.inputs[2:7], *tables, *attention.inputs[9:]]
    split = _split(inputs[:3])
    if split is not None:
        inputs[:3] = [split.inputs[0], None, None]
    interleaved = query.attributes.get_int("interleaved", 0)
    attributes = {**attention.attributes, "do_rotary": ir.AttrInt64("do_rotary", 1),
                  "rotary_interleaved": ir.AttrInt64("rotary_interleaved", interleaved)}  # fmt: skip
    new = ir.node("GroupQueryAttention", inputs, attributes, domain=attention.domain, num_outputs=3)
    model.graph.insert_before(attention, new)
    for old, value in zip(attention.outputs, new.outputs, strict=True):
        value.type, value.shape = old.type, old.shape
        name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        value.name = name
    model.graph.remove(attention, safe=True)
    return True


def _split(values: list[ir.Value | None]) -> ir.Node | None:
    """Return the node that the values are all parts of, in order."""
    node = values[0].producer() if values[0] is not None else None
    return node if node is not None and node.op_type == "Split" and list(node.outputs) == values else None
