"""Trials B03 (partial rotary), B04 (head sizes, one KV head), B05 (biases) and B06 (Gemma's own terms)."""

import numpy as np
import pytest
import torch

from pop_export.decoder import max_positions_of
from pop_runtime.kv_cache import BoundGraph, allocate_cache
from pop_runtime.manifest import KvLayer
from tests.exporter.families import proof
from tests.exporter.families.configs import tiny_family_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
}


def prove_both(exported, num_prompt: int = 40) -> None:
    ids = proof.prompt_ids()
    assert proof.prove_unpruned(exported, ids) <= proof.TOLERANCE
    assert proof.prove_pruned(exported, ids) <= proof.TOLERANCE
    assert proof.pruning_effect(exported, ids) > 10 * proof.TOLERANCE


# B03


def test_partial_rotary_turns_the_first_channels_of_a_head_only(export_of):
    exported = export_of("phi3", partial_rotary_factor=0.75)
    prove_both(exported)
    cache = allocate_cache(exported.manifest, 1, 8)
    graph = BoundGraph(exported.sessions.decode, cache, "decode.onnx", has_logits=True)
    graph.run(np.array([[7, 7, 7]], np.int64), np.array([3], np.int64))
    keys = cache.buffers["past_key_values.0.key"][0]  # [H_kv, S_max, 16]
    np.testing.assert_allclose(keys[:, 0, 12:], keys[:, 2, 12:], atol=1e-5)
    assert np.abs(keys[:, 0, :12] - keys[:, 2, :12]).min(0).max() > 0.01


@pytest.mark.slow
def test_longrope_factors_are_of_the_rotary_width_and_the_bundle_ends_at_the_original_length(export_of):
    rope = {**LONGROPE, "partial_rotary_factor": 0.75}
    exported = export_of("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    prove_both(exported)
    assert exported.manifest.max_positions == 64
    plain = tiny_family_model("phi3", partial_rotary_factor=0.75)
    ids = proof.prompt_ids()
    effect = proof.relative(proof.true_logits(plain, ids), proof.true_logits(exported.model, ids))
    assert effect > 10 * proof.TOLERANCE


def test_a_rope_that_changes_with_the_length_ends_the_bundle_at_its_original_length():
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    assert max_positions_of(tiny_family_model("llama", rope_parameters=dynamic)) == 128
    assert max_positions_of(tiny_family_model("llama")) == 256


# B04

HEADS = {
    "qwen3": ({"head_dim": 32}, KvLayer(2, 32, 32)),
    "gemma": ({"head_dim": 32, "num_key_value_heads": 1}, KvLayer(1, 32, 32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", HEADS)
def test_caches_have_the_heads_and_sizes_of_the_config(export_of, model_type):
    changes, kv_layer = HEADS[model_type]
    exported = export_of(model_type, **changes)
    prove_both(exported)
    assert proof.prove_batch(exported, proof.prompt_ids(), (9, 4, 1)) <= proof.TOLERANCE
    assert exported.manifest.kv_layers == (kv_layer,) * 4
    for session in (exported.sessions.prefill, exported.sessions.decode):
        shapes = [value.shape for value in session.get_inputs() if value.name.startswith("past_key_values.")]
        assert len(shapes) == 8
        assert all((shape[1], shape[3]) == (kv_layer.num_heads, 32) for shape in shapes)


def test_head_sizes_are_read_off_the_model_not_off_hidden_over_heads():
    for model_type, (changes, kv_layer) in HEADS.items():
        assert proof.kv_layout(tiny_family_model(model_type, **changes)) == (kv_layer,) * 4


# B05

BIASED = {"qwen2": {}, "llama": {"attention_bias": True, "mlp_bias": True}}


@pytest.mark.parametrize("model_type", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_every_bias_is_in_the_graphs_and_counts(export_of, model_type):
    exported, ids = export_of(model_type, **BIASED[model_type]), proof.prompt_ids()
    prove_both(exported)
    biases = {name: p for name, p in exported.model.named_parameters() if name.endswith("bias")}
    assert len(biases) == {"qwen2": 3, "llama": 7}[model_type] * 4
    truth = proof.true_logits(exported.model, ids)
    for name, bias in biases.items():
        kept = bias.data
        bias.data = torch.zeros_like(kept)
        effect = proof.relative(proof.true_logits(exported.model, ids), truth)
        bias.data = kept
        assert effect > 10 * proof.TOLERANCE, name


# B06

GEMMA2 = {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 7}


@pytest.mark.slow
def test_gemma_2_keeps_both_soft_caps_and_its_scale(export_of):
    exported, ids = export_of("gemma2", **GEMMA2), proof.prompt_ids()
    prove_both(exported)
    truth = proof.true_logits(exported.model, ids)
    assert np.abs(truth).max() <= 2.0
    for fault in ({"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"query_pre_attn_scalar": 16}):
        without = proof.true_logits(tiny_family_model("gemma2", **{**GEMMA2, **fault}), ids)
        assert proof.relative(without, truth) > 10 * proof.TOLERANCE, fault


@pytest.mark.slow
def test_gemma_2_with_another_activation_uses_it(export_of):
    exported, ids = export_of("gemma2", **GEMMA2, hidden_activation="silu"), proof.prompt_ids()
    prove_both(exported)
    unset = proof.true_logits(tiny_family_model("gemma2", **GEMMA2), ids)
    assert proof.relative(unset, proof.true_logits(exported.model, ids)) > 10 * proof.TOLERANCE
