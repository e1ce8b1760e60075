"""Drop the columns of a fused projection that nothing reads: the Q of a skipped layer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

SUFFIX = ".kv"  # ends the name of the part of a weight that is read
COLUMNS = "pop.columns"  # metadata of such a part: which columns it has of the whole, as "low:high"


def narrow_projections(model: ir.Model) -> int:
    """Cut weights of which only a contiguous part of the outputs is read, through slices of the last axis.

    Before: `MatMul(x, W) [-> Add(bias)] -> Slice(a, b)...`; after: the same with W[:, low:high] and the slices moved by
    `low`, where low..high is all that the slices read. A `Split` of which the first outputs are unused is narrowed
    alike. Anything else is left as it is.

    Returns:
        How many weights were narrowed.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type == "MatMul" or (node.op_type == "Gemm" and not _int(node, "transB")):
            count += _narrow(model, node)
    return count


def narrowed_weights(model: ir.Model) -> dict[str, tuple[str, slice]]:
    """Return, by name of each part that a graph has of a constant, the name of the whole and the part's columns."""
    bounds = {value.name or "": value.metadata_props.get(COLUMNS) for value in model.graph.initializers.values()}
    return {
        name: (name.removesuffix(SUFFIX), slice(*map(int, columns.split(":"))))
        for name, columns in bounds.items()
        if columns is not None
    }


def _narrow(model: ir.Model, linear: ir.Node) -> bool:
    weight = linear.inputs[1]
    if weight is None or not weight.is_initializer() or weight.const_value is None or len(weight.uses()) != 1:
        return False
    num_columns = weight.const_value.shape.numpy()[1]
    chain = _chain(linear)
    readers = [reader for reader, _ in chain[-1].outputs[0].uses()]
    spans = [_span(reader, num_columns) for reader in readers]
    known = [span for span in spans if span is not None]
    if not readers or len(known) != len(spans):
        return False
    low, high = min(start for start, _ in known), max(stop for _, stop in known)
    if (low, high) == (0, num_columns):
        return False
    _cut_input(model, linear, 1, low, high, f"{weight.name}{SUFFIX}")
    for node in chain:
        for index, value in enumerate(node.inputs):
            if value is not weight and value is not None and _is_bias(value, num_columns):
                # not after the bias: layers may share one, where all of theirs are equal
                _cut_input(model, node, index, low, high, f"{weight.name}.bias{SUFFIX}")
        node.outputs[0].shape = None
    for reader, span in zip(readers, known, strict=True):
        _move(model, reader, span, low)
    return True


def _chain(linear: ir.Node) -> list[ir.Node]:
    """Return the linear node and the `Add` of its bias, if one follows."""
    uses = list(linear.outputs[0].uses())
    if len(uses) != 1 or uses[0][0].op_type != "Add":
        return [linear]
    node, index = uses[0]
    other = node.inputs[1 - index]
    return [linear, node] if other is not None and other.is_initializer() else [linear]


def _is_bias(value: ir.Value, num_columns: int) -> bool:
    """Return whether a value is a constant of one number per column."""
    return value.const_value is not None and value.const_value.shape.numpy() == (num_columns,)


def _span(reader: ir.Node, num_columns: int) -> tuple[int, int] | None:
    """Return which columns a reader takes, or None if it is not a plain slice or split of the last axis."""
    if reader.op_type == "Slice" and len(reader.inputs) >= 4:
        starts, stops, axes = (_constant(value) for value in reader.inputs[1:4])
        steps = _constant(reader.inputs[4]) if len(reader.inputs) > 4 else [1]
        if starts is None or stops is None or axes not in ([2], [-1]) or steps != [1] or len(starts) != 1:
            return None
        start, stop = (at + num_columns if at < 0 else min(at, num_columns) for at in (starts[0], stops[0]))
        return (start, stop) if start < stop else None
    if reader.op_type == "Split" and len(reader.inputs) == 2:
        sizes = _constant(reader.inputs[1])
        if sizes is None or _int(reader, "axis") not in (2, -1) or len(sizes) != len(reader.outputs):
            return None
        unused = [not output.uses() and not output.is_graph_output() for output in reader.outputs]
        num_dropped = unused.index(False) if False in unused else 0
        return sum(sizes[:num_dropped]), num_columns
    return None


def _move(model: ir.Model, reader: ir.Node, span: tuple[int, int], low: int) -> None:
    """Let a reader find its columns in the narrowed product."""
    if reader.op_type == "Slice":
        reader.replace_input_with(1, _integers(model, [span[0] - low]))
        reader.replace_input_with(2, _integers(model, [span[1] - low]))
        return
    sizes = _constant(reader.inputs[1])
    assert sizes is not None
    dropped = 0
    while sum(sizes[:dropped]) < low:
        dropped += 1
    kept = ir.node(
        "Split", [reader.inputs[0], _integers(model, sizes[dropped:])], {"axis": -1}, num_outputs=len(sizes) - dropped
    )
    model.graph.insert_before(reader, kept)
    for old, new in zip(reader.outputs[dropped:], kept.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
    model.graph.remove(reader, safe=True)


def _cut_input(model: ir.Model, node: ir.Node, index: int, low: int, high: int, name: str) -> None:
    """Let a node read columns low..high of a constant, by a new one of that name."""
    old = node.inputs[index]
    assert old is not None and old.const_value is not None and old.name is not None
    value = ir.val(name, const_value=ir.tensor(np.ascontiguousarray(old.const_value.numpy()[..., low:high]), name=name))
    value.metadata_props[COLUMNS] = f"{low}:{high}"
    model.graph.register_initializer(value)
    node.replace_input_with(index, value)
    if not old.uses():
        assert old.name is not None
        del model.graph.initializers[old.name]


def _integers(model: ir.Model, values: list[int]) -> ir.Value:
    name = "pop.narrow." + "_".join(map(str, values))
    if name not in model.graph.initializers:
        model.graph.register_initializer(ir.val(name, const_value=ir.tensor(np.array(values, np.int64), name=name)))
    return model.graph.initializers[name]


def _constant(value: ir.Value | None) -> list[int] | None:
    if value is None or value.const_value is None:
        return None
    return [int(item) for item in value.const_value.numpy().reshape(-1)]


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()
