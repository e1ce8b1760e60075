"""Store each weight once, in the orientation in which the graph reads it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

TRANSPOSED = "pop.transposed"  # metadata of an initializer that lies the other way round than the parameter it is


def store_weights_as_read(model: ir.Model) -> int:
    """Remove `Transpose` nodes between a weight and the `MatMul` that reads it.

    torch keeps linear weights as [N, K] and traces `x @ W.T`. Left in the graph, ONNX Runtime would transpose at load
    and hold a private copy. Two cases:

    - only the transpose is read: the weight is stored as [K, N] under its own name (experts: [experts, K, N]);
    - the plain weight is read as well (the embedding that is also the head): it is stored once as it is, and the
      `MatMul` becomes a `Gemm` that reads it transposed.

    Returns:
        How many transposes were removed.
    """
    graph = model.graph
    removed = 0
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" and node.domain == "" else None
        if weight is None or not weight.is_initializer() or weight.const_value is None:
            continue
        perm = tuple(node.attributes["perm"].as_ints())
        if perm not in ((1, 0), (0, 2, 1)):
            continue
        if all(user is node for user, _ in weight.uses()):
            _transpose_initializer(weight, perm)
            ir.convenience.replace_all_uses_with(node.outputs[0], weight)
        else:
            reads = node.outputs[0].uses()
            if len(perm) != 2 or any(user.op_type != "MatMul" or index != 1 for user, index in reads):
                continue
            for user, _ in list(node.outputs[0].uses()):
                _read_transposed(graph, user, weight)
        graph.remove(node, safe=True)
        removed += 1
    return removed


def _transpose_initializer(weight: ir.Value, perm: tuple[int, ...]) -> None:
    tensor = weight.const_value
    assert tensor is not None
    name = weight.name
    sizes = tensor.shape.numpy()
    shape = ir.Shape([sizes[axis] for axis in perm])

    def transposed() -> ir.Tensor:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy().transpose(perm)), dtype=tensor.dtype, name=name)

    # Lazy: a second copy of every weight at once would double the export's peak memory.
    weight.const_value = ir.LazyTensor(transposed, dtype=tensor.dtype, shape=shape, name=name)
    weight.shape = shape
    weight.metadata_props[TRANSPOSED] = "yes"


def _read_transposed(graph: ir.Graph, matmul: ir.Node, weight: ir.Value) -> None:
    x, out = matmul.inputs[0], matmul.outputs[0]
    assert x is not None and weight.shape is not None
    V, E = weight.shape.numpy()
    rows = _constant(graph, "pop.head.rows", [-1, E])
    shape = _constant(graph, "pop.head.shape", [-1, 1, V])  # the head reads one position
    flat = ir.node("Reshape", [x, rows])
    gemm = ir.node("Gemm", [flat.outputs[0], weight], {"transB": 1})
    back = ir.node("Reshape", [gemm.outputs[0], shape])
    back.outputs[0].type, back.outputs[0].shape = out.type, out.shape
    graph.insert_before(matmul, [flat, gemm, back])
    ir.convenience.replace_all_uses_with(out, back.outputs[0], replace_graph_outputs=True)
    back.outputs[0].name = out.name
    graph.remove(matmul, safe=True)


def _constant(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.val(name, const_value=ir.tensor(np.array(values, np.int64), name=name))
    graph.register_initializer(value)
    return value
