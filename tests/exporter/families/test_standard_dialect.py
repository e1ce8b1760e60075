"""Dialect `standard`: ONNX operators alone, the same numbers in ONNX Runtime and in ONNX's own evaluator."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from pop_runtime.providers import CAPACITY
from pop_runtime.schedule import Stretch
from tests.exporter.families import proof
from tests.exporter.families.configs import COMMON_FAMILIES
from tests.exporter.families.page import proven_families
from tests.exporter.families.sweep import TEXT_PARTS
from tests.exporter.families.test_families import CORE, prove

FAMILIES = (*CORE, "gemma2")  # and one with soft-caps beside its windows
DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "tensorrt.md"
WRITTEN_OUT = {"gpt_oss", "gemma2"}  # sinks and soft-caps are not in the operator that TensorRT takes


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_pair_in_onnx_operators_alone_computes_what_pytorch_does(export_of, model_type):
    exported = export_of(model_type, "standard")
    prove(exported)
    fused = model_type in WRITTEN_OUT or CORE[model_type] == "fused"
    assert ("Attention" in exported.decode_ops) == (fused and model_type not in WRITTEN_OUT)
    assert exported.decode_ops.count("TensorScatter") == 2 * proof.num_layers(exported)


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", sorted({*proven_families()} - {*COMMON_FAMILIES, *FAMILIES}))
def test_the_pair_of_a_family_that_dialect_ort_proves_computes_what_pytorch_does(export_of, model_type):
    prove(export_of(TEXT_PARTS.get(model_type, model_type), "standard"))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_both_graphs_pass_the_checker_and_strict_shape_inference(export_of, model_type):
    exported = export_of(model_type, "standard")
    for name in (exported.manifest.prefill_graph, exported.manifest.decode_graph):
        onnx.checker.check_model(str(exported.folder / name), full_check=True)
        graph = onnx.load(exported.folder / name)
        assert {node.domain for node in graph.graph.node} == {""}
        assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 24)]
        onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_operator_type_and_attribute_is_one_that_tensorrt_s_parser_takes(export_of, model_type):
    exported = export_of(model_type, "standard")
    listed = re.findall(r"`(\w+)`", PAGE.read_text().partition("| operator | TensorRT")[2])
    for name in (exported.manifest.prefill_graph, exported.manifest.decode_graph):
        graph = onnx.shape_inference.infer_shapes(onnx.load(exported.folder / name)).graph
        constants = {value.name for value in graph.initializer}
        assert {node.op_type for node in graph.node} <= set(listed)
        types = {value.data_type for value in graph.initializer}
        types |= {value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
        assert types <= {TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}
        past = {value.name for value in graph.input if value.name.startswith("past_key_values.")}
        present = {value.name for value in graph.output if value.name.startswith("present.")}
        assert all(value.type.tensor_type.shape.dim[2].dim_param == CAPACITY for value in graph.input[2:])
        for node in graph.node:
            attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
            match node.op_type:
                case "Attention":
                    assert len(node.input) == 4 and len(node.output) == 1 and set(attributes) <= {"scale", "is_causal"}
                case "TensorScatter":
                    assert attributes["axis"] == -2
                    assert node.input[0] in past and node.output[0] in present
                case "TopK":
                    assert attributes.get("sorted", 1) == 1
                case "LayerNormalization" | "RMSNormalization":
                    assert len(node.output) == 1
                case "RotaryEmbedding":
                    assert len(node.input) == 3
                case "ScatterND":
                    assert attributes.get("reduction", b"none") == b"none"
                case "ReduceSum" | "Squeeze" | "Unsqueeze":
                    assert all(name in constants for name in node.input[1:])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_onnx_s_own_evaluator_agrees(export_of, model_type):
    exported = export_of(model_type, "standard")
    ids = proof.prompt_ids()[:20]
    truth = proof.true_logits(exported.model, ids, 18)  # after 18, 19 and 20 tokens
    full = [*proof.stretches((0, 7, 8, 18), "decode"), Stretch(18, 19, "decode"), Stretch(19, 20, "decode")]
    assert proof.relative(_evaluated(exported, ids, full, 3), truth) <= proof.TOLERANCE
    pruned = [*proof.stretches((0, 7, 17), "prefill"), *proof.stretches((17, 18, 19, 20), "decode")]
    twin = proof.twin_logits(exported.model, ids, pruned, 3)
    assert proof.relative(_evaluated(exported, ids, pruned, 3), twin) <= proof.TOLERANCE
    assert proof.relative(twin, truth) > 10 * proof.TOLERANCE


def _evaluated(exported: proof.Exported, ids: list[int], feeds: list[Stretch], num_kept: int) -> np.ndarray:
    """Return the logits after each of the last `num_kept` feeds, from onnx.reference over buffers of 24 places."""
    manifest = exported.manifest
    graphs = {
        stage: ReferenceEvaluator(onnx.load(exported.folder / name))
        for stage, name in (("prefill", manifest.prefill_graph), ("decode", manifest.decode_graph))
    }
    buffers = {}
    for layer, kv in enumerate(manifest.kv_layers):
        buffers[manifest.past_key.format(layer=layer)] = np.zeros((1, kv.num_heads, 24, kv.key_head_size), np.float32)
        buffers[manifest.past_value.format(layer=layer)] = np.zeros(
            (1, kv.num_heads, 24, kv.value_head_size), np.float32
        )
    rows = []
    for feed in feeds:
        inputs = {
            manifest.input_ids: np.array([ids[feed.start : feed.stop]]),
            manifest.attention_mask: np.ones((1, feed.stop), np.int64),
        }
        graph = graphs[feed.stage]
        outputs = dict(zip(graph.output_names, graph.run(None, inputs | buffers), strict=True))
        buffers = {name: outputs[name.replace("past_key_values", "present")] for name in buffers}
        rows.append(outputs.get(manifest.logits))
    return np.stack([row[0, 0] for row in rows[-num_kept:]])
