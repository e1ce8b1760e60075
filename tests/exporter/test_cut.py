"""Cutting the prefill graph, first on a decode graph built by hand, then on a traced one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir
import pytest

from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.passes.resolve_markers import METADATA_PREFIX
from pop_export.reference import PrefillPlan
from pop_runtime.errors import ModelError

FLOAT = ir.TensorType(ir.DataType.FLOAT)


def _cut(decode: ir.Model, skipped: Iterable[int]) -> ir.Model:
    return cut_prefill_graph(decode, PrefillPlan(frozenset(skipped)))


def _hand_built(num_layers: int) -> ir.Model:
    """Return a decode graph of layers `h + Mlp(Attention(K(h), V(h)))` with a head; `Neg` is the MLP, `Exp` a head."""
    h = ir.val("h", ir.DataType.FLOAT, ["B", "S", 4])
    lengths = ir.val("lengths", ir.DataType.INT64, ["B"])
    inputs, outputs, nodes = [h, lengths], [], []
    metadata = {METADATA_PREFIX + "past_lengths": "lengths"}
    for layer in range(num_layers):
        past = [
            ir.val(f"past_key_values.{layer}.{part}", ir.DataType.FLOAT, ["B", 1, "C", 4]) for part in ("key", "value")
        ]
        inputs += past
        key, value = ir.node("Abs", [h]), ir.node("Ceil", [h])
        attention = ir.node(
            "GroupQueryAttention", [h, key.outputs[0], value.outputs[0], *past], domain="com.microsoft", num_outputs=3
        )
        mlp = ir.node("Neg", [attention.outputs[0]])
        add = ir.node("Add", [h, mlp.outputs[0]])
        for made, name in (
            (key.outputs[0], f"layers.{layer}.key"), (value.outputs[0], f"layers.{layer}.value"),
            (attention.outputs[1], f"present.{layer}.key"), (attention.outputs[2], f"present.{layer}.value"),
            (add.outputs[0], f"layers.{layer}.output"),
        ):  # fmt: skip
            made.name, made.type = name, FLOAT
        for part in ("key", "value", "output"):
            metadata[f"{METADATA_PREFIX}layers.{layer}.{part}"] = f"layers.{layer}.{part}"
        metadata[f"{METADATA_PREFIX}layers.{layer}.input"] = h.name
        nodes += [key, value, attention, mlp, add]
        outputs += attention.outputs[1:]
        h = add.outputs[0]
    head = ir.node("Exp", [h])
    head.outputs[0].name, head.outputs[0].type = "logits", FLOAT
    graph = ir.Graph(
        inputs, [head.outputs[0], *outputs], nodes=[*nodes, head], name="hand",
        opset_imports={"": 24, "com.microsoft": 1},
    )  # fmt: skip
    return ir.Model(graph, ir_version=10, metadata_props=metadata)


def _kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def test_a_skipped_layer_keeps_only_what_makes_its_k_and_v():
    prefill = _cut(_hand_built(4), {1})
    # layers 0 and 2 whole; 1 skipped; 3, whose output nothing reads without a head, needs no attention either
    assert _kinds(prefill) == {
        "Abs": 4, "Ceil": 4, "GroupQueryAttention": 2, "Neg": 2, "Add": 2, "TensorScatter": 4,
    }  # fmt: skip


@pytest.mark.parametrize("skipped", [(1, 2), (0, 1, 2), (2, 3), (1, 2, 3)])
def test_neighbouring_skipped_layers_all_vanish(skipped):
    """Cut shallow first, the deeper neighbour revived the shallower: 28 of 30 attention nodes were left, not 20."""
    prefill = _cut(_hand_built(5), skipped)
    kept = 5 - len(skipped) - 1  # the last layer's output is not read
    assert _kinds(prefill)["GroupQueryAttention"] == kept
    assert _kinds(prefill)["Neg"] == kept
    reader = next(node for node in prefill.graph if node.outputs[0].name == f"layers.{skipped[-1]}.key")
    assert reader.inputs[0].name == ("h" if skipped[0] == 0 else f"layers.{skipped[0] - 1}.output")


def test_a_trailing_run_of_skipped_layers_frees_the_last_kept_layers_output_too():
    prefill = _cut(_hand_built(3), {2})
    assert _kinds(prefill)["GroupQueryAttention"] == 2  # layer 1 feeds the K and V of layer 2


def test_the_prefill_graph_has_every_buffer_in_order_and_no_logits():
    decode = _hand_built(3)
    prefill = _cut(decode, {0, 2})
    assert [value.name for value in prefill.graph.outputs] == [
        f"present.{layer}.{part}" for layer in range(3) for part in ("key", "value")
    ]
    assert [value.name for value in prefill.graph.inputs] == [value.name for value in decode.graph.inputs]


def test_the_decode_graph_is_not_changed_by_cutting():
    decode = _hand_built(3)
    before = ir.to_proto(decode).SerializeToString()
    _cut(decode, {0, 1})
    assert ir.to_proto(decode).SerializeToString() == before


def test_skipping_nothing_leaves_out_only_the_head_and_what_only_it_reads():
    assert _kinds(_cut(_hand_built(3), ())) == {
        "Abs": 3, "Ceil": 3, "GroupQueryAttention": 2, "Neg": 2, "Add": 2, "TensorScatter": 2,
    }  # fmt: skip


def test_a_layer_that_is_not_in_the_graph_is_an_error():
    with pytest.raises(ModelError, match=r"layers\.7\.output, found none"):
        _cut(_hand_built(3), {7})


def test_a_layer_without_an_attention_node_is_an_error():
    decode = _hand_built(3)
    next(node for node in decode.graph if node.op_type == "GroupQueryAttention").op_type = "Other"
    with pytest.raises(ModelError, match=r"layer 0: expected one node writing present\.0\.key, found none"):
        _cut(decode, {0})


def test_a_real_skipped_layer_has_no_attention_projection_or_mlp_and_weights_keep_their_names(llama_decode):
    prefill = _cut(llama_decode, {1, 3})
    weights = set(prefill.graph.initializers)
    assert weights <= set(llama_decode.graph.initializers)
    for layer in (1, 3, 4):  # 4 is kept, but nothing reads its output
        left = {name.split(".", 3)[3] for name in weights if name.startswith(f"model.layers.{layer}.")}
        assert left == {"input_layernorm.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}
    attending = {
        node.inputs[3].name for node in prefill.graph if node.op_type == "GroupQueryAttention" and node.inputs[3]
    }
    assert attending == {"past_key_values.0.key", "past_key_values.2.key"}
