"""Turn the markers that tracing left into named values."""

from __future__ import annotations

import onnx_ir as ir

from pop_export.graph.marker import MARKER
from pop_runtime.errors import ModelError

METADATA_PREFIX = "pop.value."  # graph metadata: "pop.value.layers.3.key" -> name of that value


def resolve_markers(model: ir.Model) -> int:
    """Remove every marker, name the value it stood on, and note that name in the graph's metadata.

    Two markers may stand on one value (a layer's output is mostly the next layer's input): the first names it.

    Returns:
        How many markers were removed.
    """
    graph = model.graph
    markers = [node for node in graph if node.domain == "pop" and node.op_type == MARKER]
    named: set[ir.Value] = set()
    for node in markers:
        name = node.attributes["name"].as_string()
        value = node.inputs[0]
        assert value is not None
        if value not in named and not value.is_graph_input() and not value.is_initializer():
            value.name = name
            named.add(value)
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        assert value.name is not None
        model.metadata_props[METADATA_PREFIX + name] = value.name
        graph.remove(node, safe=True)
    model.opset_imports.pop("pop", None)
    return len(markers)


def marked_value(model: ir.Model, name: str) -> ir.Value:
    """Return the value that the marker `name` stood on.

    Raises:
        ModelError: there was no such marker, or the value is gone.
    """
    wanted = model.metadata_props.get(METADATA_PREFIX + name)
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        if value.name == wanted:
            return value
    for node in model.graph:
        for value in node.outputs:
            if value.name == wanted:
                return value
    raise ModelError(f"decode graph: expected the value {name}, found none; this family is not supported")
