"""An embedding whose frequent tokens keep more bits: looked up and multiplied as one matrix."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from pop_export.graph.passes.exact_head import exact_head
from pop_export.graph.passes.exact_kernels import exact_kernels
from pop_export.graph.passes.quantize_embedding import quantize_embedding
from pop_export.graph.passes.quantize_matmuls import quantize_matmuls
from pop_export.quantized_matrix import Scheme
from pop_export.split_matrix import SplitMatrix, SplitScheme, StoredMatrix, parts_of, store_matrix

V = 120  # of which 30 count as frequent
SCHEME = SplitScheme(Scheme(8, 32), Scheme(4, 64, symmetric=False))


def _table(num_columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((V, num_columns)).astype(np.float32)


def _tied(num_columns: int) -> ir.Model:
    """Return a graph that looks rows up and multiplies them with the table that they are from."""
    ids = ir.val("ids", ir.DataType.INT64, ["B"])
    table = ir.val("table", const_value=ir.tensor(_table(num_columns), name="table"))
    rows = ir.node("Gather", [table, ids])
    logits = ir.node("Gemm", [rows.outputs[0], table], {"transB": 1})
    for node, name, size in ((rows, "rows", num_columns), (logits, "logits", V)):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape(["B", size])
    outputs = [rows.outputs[0], logits.outputs[0]]
    return ir.Model(
        ir.Graph([ids], outputs, nodes=[rows, logits], initializers=[table], opset_imports={"": 24}), ir_version=11
    )


def test_frequent_rows_come_closer_than_rare_ones():
    table = _table(64)
    matrix = store_matrix(table, SCHEME)
    assert isinstance(matrix, SplitMatrix)
    errors = np.square(matrix.dequantized() - table).mean(axis=1)
    assert [len(part.packed) for _, part in parts_of("x", matrix)] == [30, 90]
    assert errors[:30].max() < 0.05 * errors[30:].min()


@pytest.mark.parametrize("num_columns", [64, 80])
@pytest.mark.parametrize("exact", [True, False])
def test_lookup_and_product_are_those_of_the_stored_matrix(num_columns, exact):
    model, matrices = _tied(num_columns), dict[str, StoredMatrix]()
    assert quantize_embedding(model, lambda _: SCHEME, matrices) == 1
    assert quantize_matmuls(model, lambda _: SCHEME, matrices) == 1
    if exact:
        exact_kernels(model)
    else:
        assert exact_head(model, np.arange(num_columns, dtype=np.float32), matrices) == 2  # a product for each part
    model.graph.sort()
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.array([0, 29, 30, 119, 5, 44])  # first and last of both parts among them
    rows, logits = session.run(None, {"ids": ids})
    stored = matrices["table"].dequantized()
    np.testing.assert_allclose(rows, stored[ids], atol=1e-6)
    wanted = stored[ids] @ stored.T
    tolerance = 1e-4 if exact else 2e-2
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()
