"""Quantised pairs: what is stored, where, and that a wrong number in it cannot pass."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers

import pop_runtime
from pop_export import ExportConfig, pipeline, speed
from pop_export.channel_matrix import ChannelScheme
from pop_export.checkpoint import load_checkpoint
from pop_export.cli import main
from pop_export.config import BLOCK_SIZES
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.precision import least_bytes
from pop_export.quantize import Schemes, key_value_weights, quantize_pair, stored_plan
from pop_export.quantized_matrix import QuantizedMatrix, Scheme
from pop_export.reference import PrefillPlan
from pop_export.split_matrix import SplitMatrix, SplitScheme
from pop_export.stored_weights import stored_weights
from pop_export.verify import TOLERANCE
from pop_runtime.errors import BackendError, GateError, ModelError, UsageError
from tests.exporter.families.configs import tiny_family_model
from tests.tiny_models import TINY, tiny_model

INT4 = Schemes(Scheme(4, 32), Scheme(8, 32), Scheme(4, 32))


@pytest.fixture(autouse=True)
def _short_measurement(monkeypatch):
    monkeypatch.setattr(speed, "PROMPT_TOKENS", 64)


@pytest.fixture(scope="module")
def odd_sized():
    """Return a Llama with hidden 80 and intermediate 208, its decode graph: no block size divides both."""
    sizes = {"hidden_size": 80, "intermediate_size": 208, "num_attention_heads": 5, "num_key_value_heads": 1}
    model = tiny_model(transformers.LlamaConfig(**{**TINY, **sizes, "num_hidden_layers": 3}))
    return model, build_decode_graph(model, kv_layout(model))


@pytest.fixture(scope="module")
def fused():
    """Return a Phi-3 whose Q, K and V are one product, its decode graph, and a plan with a K and V of its own."""
    model = tiny_family_model("phi3", num_hidden_layers=3)
    weight = model.model.layers[1].self_attn.qkv_proj.weight.detach()
    refit = torch.cat([weight[:64], weight[64:] * 1.5 + 0.1])  # 64 rows of Q, then K and V
    plan = PrefillPlan(frozenset({0, 1}), {"model.layers.1.self_attn.qkv_proj.weight": refit})
    return model, build_decode_graph(model, kv_layout(model)), plan


def _nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def test_every_matrix_is_quantised_once_and_k_and_v_keep_eight_bits(llama, llama_decode):
    decode = llama_decode.clone()
    prefill = cut_prefill_graph(decode, PrefillPlan(frozenset({1, 3})))
    found = quantize_pair(decode, prefill, llama, INT4)
    assert found.kept == ()
    bits = {name: matrix.scheme.bits for name, matrix in found.matrices.items()}
    assert len(bits) == 5 * 7 + 1
    assert {name for name in bits if bits[name] == 8} == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(5) for part in "kv"
    }
    assert not _nodes(decode, "MatMul") and not _nodes(decode, "Gemm") and not _nodes(decode, "Gather")
    for name in set(prefill.graph.initializers) & set(decode.graph.initializers):
        shared = prefill.graph.initializers[name].const_value, decode.graph.initializers[name].const_value
        assert np.shares_memory(*(tensor.numpy() for tensor in shared)) or shared[0].nbytes <= 1024, name


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_scheme_takes_the_embedding_with_it_only_where_both_are_one_matrix(tied):
    model = tiny_model(transformers.LlamaConfig(**{**TINY, "tie_word_embeddings": tied, "num_hidden_layers": 2}))
    decode = build_decode_graph(model, kv_layout(model))
    embedding = SplitScheme(Scheme(8, 32), Scheme(4, 32))
    schemes = Schemes(Scheme(4, 32, "gptq", False), Scheme(8, 32), embedding, head=Scheme(4, 32, "gptq"))
    text = [np.arange(40) * 7 % 300]
    found = quantize_pair(decode, cut_prefill_graph(decode, PrefillPlan(frozenset({1}))), model, schemes, text).matrices
    assert isinstance(found["lm_head.weight"], QuantizedMatrix) and found["lm_head.weight"].zero_points is None
    if tied:
        assert "model.embed_tokens.weight" not in found
    else:
        assert isinstance(found["model.embed_tokens.weight"], SplitMatrix)


def test_k_and_v_weights_are_found_by_what_the_cache_reads(llama, llama_decode):
    assert key_value_weights(llama_decode, 5) == {
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(5) for part in "kv"
    }


def test_the_model_is_what_it_was_after_standing_in_for_the_stored_weights(llama, llama_decode):
    decode = llama_decode.clone()
    found = quantize_pair(decode, cut_prefill_graph(decode, PrefillPlan(frozenset({1}))), llama, INT4)
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    with pytest.raises(ZeroDivisionError), stored_weights(llama, found.matrices):
        changed = llama.state_dict()
        assert any(not changed[name].equal(before[name]) for name in before)
        raise ZeroDivisionError
    assert all(weight.equal(before[name]) for name, weight in llama.state_dict().items())


GPTQ8, CHANNELS = Scheme(8, 32, "gptq", False), ChannelScheme("gptq")
FITTED = {
    "int4 symmetric": Schemes(Scheme(4, 32, "gptq"), Scheme(8, 32), Scheme(8, 32), key_value=Scheme(4, 32, "gptq")),
    "int8": Schemes(GPTQ8, GPTQ8, Scheme(8, 32)),
    "int8-dynamic": Schemes(CHANNELS, CHANNELS, Scheme(8, 32)),
}


@pytest.mark.parametrize("schemes", FITTED.values(), ids=FITTED)
def test_the_part_that_prefill_has_of_a_fused_weight_is_stored_as_the_whole_is(fused, schemes):
    # the part was rounded anew, in 8 bits or unfitted: pair and twin differed, and no such export could pass
    model, decode, plan = fused
    decode = decode.clone()
    found = quantize_pair(decode, cut_prefill_graph(decode, plan), model, schemes, [np.arange(40) * 7 % 300])
    for layer in (0, 2):  # the last one is cut down to K and V as well
        name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        whole, part = found.matrices[name], found.matrices[f"{name}.kv"]
        np.testing.assert_array_equal(part.dequantized(), whole.dequantized()[64:])


@pytest.mark.parametrize("schemes", FITTED.values(), ids=FITTED)
def test_a_refitted_part_of_a_fused_weight_is_quantised_and_the_plan_told(fused, schemes):
    # it stayed in fp32, and nothing said so
    model, decode, plan = fused
    decode = decode.clone()
    prefill = cut_prefill_graph(decode, plan)
    found = quantize_pair(decode, prefill, model, schemes, [np.arange(40) * 7 % 300])
    assert not _nodes(prefill, "MatMul")
    (name, refit), (stored,) = *plan.weights.items(), stored_plan(plan, found).weights.values()
    part = torch.from_numpy(found.matrices[f"{name}.refit.kv"].dequantized())
    assert stored[64:].equal(part) and stored[:64].equal(refit[:64])
    assert 0 < (part - refit[64:]).abs().max() < 0.05


def test_experts_stay_in_fp32_and_the_export_says_so(monkeypatch, llama_folder, tmp_path, caplog):
    # nothing said so, though weights.bin of a tiny Mixtral in int4 had 0.85 of its bytes in fp32
    model = tiny_family_model("mixtral", num_hidden_layers=2)
    decode = build_decode_graph(model, kv_layout(model))
    bundle = _export(monkeypatch, (model, decode), llama_folder, tmp_path, precision="int4")
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    found = bundle.report["quantization"]
    assert sorted(found["unquantised_matrices"]) == sorted(experts) and len(experts) == 4
    num_bytes = 4 * sum(parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim != 2)
    assert found["unquantised_bytes"] == pytest.approx(num_bytes, rel=0.01)
    assert 0.5 < found["unquantised_share"] < 1
    (line,) = [record.getMessage() for record in caplog.records if "stay in fp32" in record.getMessage()]
    assert line.startswith(f"--precision int4: {found['unquantised_share']:.0%} of the weights' bytes stay in fp32 (")
    page = (bundle.folder / "report.html").read_text()
    assert f'data-path="quantization.unquantised_share">{found["unquantised_share"]:.1%}<' in page


def test_the_room_that_a_bundle_takes_is_that_of_experts_in_fp32(tmp_path):
    model = tiny_family_model("mixtral", num_hidden_layers=2)
    sizes = {ndim: sum(p.numel() for p in model.parameters() if p.ndim == ndim) for ndim in (1, 2, 3)}
    assert sizes[3] > sizes[2] > 0
    found = {
        precision: least_bytes(ExportConfig(model="x", out=tmp_path, precision=precision), model)
        for precision in ("fp32", "fp16", "int8", "int4")
    }
    assert found == {
        "fp32": 4 * sum(sizes.values()),
        "fp16": 2 * sum(sizes.values()),
        "int8": sizes[2] + 4 * (sizes[1] + sizes[3]),
        "int4": sizes[2] // 2 + 4 * (sizes[1] + sizes[3]),
    }


def test_a_fused_pair_with_fitted_weights_is_proven(fused, monkeypatch, llama_folder, tmp_path):
    bundle = _export(monkeypatch, fused[:2], llama_folder, tmp_path, precision="int4", symmetric=True)
    assert all(check["passed"] for check in bundle.report["verification"]["checks"])


def test_a_graph_without_matrices_is_refused(llama, llama_decode):
    decode = llama_decode.clone()
    for node in (*_nodes(decode, "MatMul"), *_nodes(decode, "Gemm"), *_nodes(decode, "Gather")):
        node.domain = "elsewhere"
    with pytest.raises(ModelError, match="expected weight matrices to quantise"):
        quantize_pair(decode, decode.clone(), llama, INT4)


# B07: with blocks of 512 another exporter gave zeros, and others read wrong rows where the last block is not full
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_any_block_size_gives_what_the_stored_weights_give(
    odd_sized, monkeypatch, llama_folder, tmp_path, precision, block_size
):
    bundle = _export(monkeypatch, odd_sized, llama_folder, tmp_path, precision=precision, block_size=block_size)
    exact = [check for check in bundle.report["verification"]["checks"] if check["name"].endswith("exact kernels")]
    assert len(exact) == 4
    for check in exact:
        assert check["largest_difference"] <= 1e-3 * check["largest_logit"]
        assert check["largest_logit"] > 1
    method = {"int8": "symmetric", "int4": "gptq"}[precision]  # by default
    assert bundle.manifest.precision == f"{precision}-block{block_size}-{method}"


def test_a_block_size_that_no_kernel_takes_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--block-size: expected one of 16, 32, 64, 128, 256, found 512"):
        ExportConfig(model="x", out=tmp_path, precision="int4", block_size=512)


@pytest.mark.parametrize(
    "settings", [{"quantizer": "hqq"}, {"quantizer": "k_quant"}, {"quantizer": "rtn"}, {"symmetric": True}]
)
def test_other_ways_to_find_scales_are_proven_alike(quick_export, settings):
    bundle = quick_export(prune_layers="1,3", precision="int4", **settings)
    assert all(check["passed"] for check in bundle.report["verification"]["checks"])
    assert bundle.manifest.precision.startswith("int4-block32-")


def test_the_damage_of_both_is_reported_apart_and_together(quick_export):
    int8, int4 = (
        quick_export(prune_layers="1,3", precision=precision, sink_tokens=0, boundary_tokens=1, force=True).report[
            "precision_damage"
        ]
        for precision in ("int8", "int4")
    )
    assert int8["pruning_kl_nats"] == int4["pruning_kl_nats"] > 0
    assert 0 < int8["quantisation_kl_nats"] < 0.5 * int4["quantisation_kl_nats"]
    assert int4["both_kl_nats"] > int4["quantisation_kl_nats"] > 0
    assert int4["num_pruned_tokens"] == int4["num_prompt_tokens"] - 1 > 0


def test_damage_is_measured_on_the_text_and_under_the_windows_that_plans_are(quick_export):
    report = quick_export(prune_layers="1,3", precision="int8").report
    damage, protocol = report["precision_damage"], report["quality"]["protocol"]
    assert damage["num_prompt_tokens"] == protocol["context_tokens"]
    assert damage["num_pruned_tokens"] == protocol["context_tokens"] - 4 - 64 > 0
    assert damage["both_kl_nats"] > damage["quantisation_kl_nats"]


@pytest.mark.parametrize(
    ("settings", "parts"), [({"symmetric": True}, [""]), ({}, [""]), ({"quantizer": "rtn"}, [".frequent", ".rare"])]
)
def test_head_and_embedding_read_the_same_bytes(quick_export, settings, parts):
    bundle = quick_export(prune_layers="1,3", precision="int4", **settings)
    places = {}
    for graph in ("decode.onnx", "prefill.onnx"):
        model = onnx.load(bundle.folder / graph, load_external_data=False)
        for tensor in model.graph.initializer:
            if tensor.external_data:
                places[graph, tensor.name] = {entry.key: entry.value for entry in tensor.external_data}
    for part in parts:
        head = places["decode.onnx", f"lm_head.weight{part}.q"]
        rows = [places[graph, f"lm_head.weight{part}.rows"] for graph in ("decode.onnx", "prefill.onnx")]
        assert rows == [head, head]


@pytest.mark.parametrize(
    ("settings", "key_bits", "num_loud", "has_zero_points"),
    [
        ({"precision": "int8"}, 8, 1, False),
        ({"precision": "int4", "symmetric": True}, 4, 0, False),
        ({"precision": "int4"}, 8, 0, True),
    ],
)
def test_what_decodes_fast_is_in_the_graph(quick_export, settings, key_bits, num_loud, has_zero_points):
    bundle = quick_export(prune_layers="1,3", **settings)
    assert all(check["passed"] for check in bundle.report["verification"]["checks"])
    graph = onnx.load(bundle.folder / "decode.onnx", load_external_data=False).graph
    products = {node.input[1]: node for node in graph.node if node.op_type == "MatMulNBits"}
    key = products["model.layers.0.self_attn.k_proj.weight.q"]
    assert [attribute.i for attribute in key.attribute if attribute.name == "bits"] == [key_bits]
    assert sum(tensor.name == "lm_head.weight.q.loud" for tensor in graph.initializer) == num_loud
    assert any(len(node.input) > 3 and node.input[3] for node in products.values()) == has_zero_points


def test_one_wrong_number_in_the_weights_is_found(quick_export, monkeypatch, tmp_path):
    real = QuantizedMatrix.dequantized
    monkeypatch.setattr(QuantizedMatrix, "dequantized", lambda self: np.roll(real(self), 1, axis=0))
    with pytest.raises(GateError, match="exact kernels"):
        quick_export(prune_layers="1,3", precision="int8")
    assert list(tmp_path.iterdir()) == []
    assert TOLERANCE["float32"] == 1e-3


def test_a_quantised_bundle_runs(quick_export):
    bundle = quick_export(prune_layers="1,3", precision="int4")
    model = pop_runtime.load(bundle.folder, threads=1)
    tokens = [token.id for token in model.generate([7, 200, 13, 90, 41, 5], max_new_tokens=8, ignore_eos=True)]
    assert len(tokens) == 8


def test_bf16_is_refused_where_it_cannot_be_verified(quick_export, tmp_path):
    with pytest.raises(BackendError, match="expected bfloat16 kernels in onnxruntime"):
        quick_export(precision="bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--block-size", "32"], "--block-size: expected --precision int8 or int4 with it, found fp32"),
        (["--asymmetric"], "--symmetric: expected --precision int8 or int4 with it, found fp32"),
        (["--quantizer", "rtn"], "--quantizer: expected --precision int8, int4 or int8-dynamic with it, found fp32"),
        (
            ["--precision", "int8", "--quantizer", "hqq"],
            "--quantizer hqq: expected --precision int4 with it, found int8",
        ),
        (["--precision", "int4", "--quantizer", "hqq", "--symmetric"], "expected --quantizer gptq or rtn with it"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line_and_exit_2(tmp_path, capsys, flags, message):
    assert main(["--model", "x", "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err


def _export(monkeypatch, odd_sized, llama_folder, tmp_path, **settings):
    """Export the odd-sized model without loading or tracing it again."""
    model, decode = odd_sized
    loaded = load_checkpoint(str(llama_folder), offline=True)
    monkeypatch.setattr(pipeline, "load_checkpoint", lambda *_, **__: dataclasses.replace(loaded, model=model))
    monkeypatch.setattr(pipeline, "build_decode_graph", lambda *_: decode.clone())
    return pipeline.export(
        ExportConfig(
            model=str(llama_folder), out=tmp_path / "bundle", calibration_samples=2, calibration_length=32, threads=1,
            prune_layers="1", **settings,
        )
    )  # fmt: skip


def test_json_report_names_the_precision_and_what_is_not_quantised(quick_export, caplog):
    bundle = quick_export(prune_layers="1", precision="int8")
    report = json.loads((bundle.folder / "report.json").read_text())
    assert report["precision"] == "int8-block32-symmetric"
    assert report["quantization"]["unquantised_matrices"] == []
    norms = 4 * 64 * (2 * 5 + 1)
    assert norms <= report["quantization"]["unquantised_bytes"] <= norms + 256  # and the frequencies of the rotation
    assert report["quantization"]["unquantised_share"] < 0.01
    assert not [record for record in caplog.records if "stay in fp32" in record.getMessage()]
