"""One family for each way in which families differ by default; all that users ask for behind `-m slow`."""

from typing import get_args

import pytest

from pop_export.config import Dialect
from pop_export.graph.attention_form import choose_attention
from pop_runtime.errors import ModelError
from tests.exporter.families import proof
from tests.exporter.families.configs import COMMON_FAMILIES, tiny_family_model

CORE = {
    "llama": "fused",
    "gemma3_text": "fused",  # windows, two rope bases, norms of Q and K
    "gpt2": "fused",  # learned positions, weights stored the other way round
    "gpt_oss": "fused",  # attention sinks, experts with biases
    "bloom": "buffer",  # ALiBi, attention of its own
    "deepseek_v3": "buffer",  # latent attention: K and V of different sizes
}


def prove(exported: proof.Exported) -> None:
    ids = proof.prompt_ids()
    assert proof.prove_unpruned(exported, ids) <= proof.TOLERANCE
    assert proof.prove_pruned(exported, ids) <= proof.TOLERANCE
    assert proof.prove_batch(exported, ids) <= proof.TOLERANCE
    assert proof.pruning_effect(exported, ids) > 10 * proof.TOLERANCE


@pytest.mark.parametrize("model_type", CORE)
def test_the_pair_of_a_core_family_computes_what_pytorch_does(export_of, model_type):
    exported = export_of(model_type)
    prove(exported)
    fused = "GroupQueryAttention" in exported.decode_ops
    assert fused == (CORE[model_type] == "fused")
    assert fused or "TensorScatter" in exported.decode_ops


@pytest.mark.slow
@pytest.mark.parametrize("dialect", get_args(Dialect))
@pytest.mark.parametrize("model_type", COMMON_FAMILIES)
def test_the_pair_of_a_common_family_computes_what_pytorch_does(export_of, model_type, dialect):
    prove(export_of(model_type, dialect))


@pytest.mark.parametrize("model_type", ["mamba", "jamba", "qwen3_next", "lfm2", "falcon_h1", "deepseek_v4"])
def test_layers_that_keep_more_than_k_and_v_are_refused_by_name(model_type):
    model = tiny_family_model(model_type)
    with pytest.raises(ModelError, match=f"{type(model).__name__}: its layers keep more than K and V"):
        proof.kv_layout(model)


@pytest.mark.parametrize("model_type", ["roberta", "electra"])
def test_an_encoder_is_refused_by_name(model_type):
    model = tiny_family_model(model_type)
    with pytest.raises(ModelError, match=f"{type(model).__name__}: its tokens attend to later ones"):
        proof.kv_layout(model)


def test_a_model_without_a_cache_is_refused_by_name():
    with pytest.raises(ModelError, match="OpenAIGPTLMHeadModel: expected K and V from each of 4 layers"):
        proof.kv_layout(tiny_family_model("openai-gpt"))


def test_code_that_cannot_be_traced_ends_in_one_line_naming_the_architecture(monkeypatch, tmp_path):
    model = tiny_family_model("llama")
    own = type(model).forward

    def branching(self, input_ids, **kwargs):
        return own(self, input_ids if int(input_ids.sum()) > 0 else input_ids + 1, **kwargs)

    model.forward = branching.__get__(model)
    monkeypatch.setattr("pop_export.decoder.position_arguments", lambda *_: {})
    with pytest.raises(ModelError, match=r"^LlamaForCausalLM: its code cannot be traced .*not supported$") as refused:
        proof.export_pair(model, tmp_path)
    assert "\n" not in str(refused.value)


def test_attention_that_is_not_the_fused_operator_s_says_why():
    reasons = {name: choose_attention(tiny_family_model(name)).reason for name in ("mpt", "diffllama", "llama4_text")}
    assert reasons == {
        "mpt": "its attention is not behind transformers' attention interface",
        "diffllama": "it changes K or V after they were cached",
        "llama4_text": "its mask is neither causal nor a sliding window",
    }
