"""A tiny config for any decoder family in transformers' causal mapping, from the names that config classes share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.exporter.families.overrides import OVERRIDES
from tests.tiny_models import redraw

NUM_LAYERS = 4
VOCAB_SIZE = 300
WINDOW = 8

COMMON_FAMILIES = (
    "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "smollm3",
    "granite", "olmo", "olmo2", "olmo3", "cohere", "cohere2", "glm", "glm4", "starcoder2", "gpt_neox", "opt",
    "falcon", "stablelm", "helium", "nemotron", "ernie4_5", "exaone4", "hunyuan_v1_dense", "seed_oss", "mixtral",
    "qwen3_moe", "olmoe",
)  # fmt: skip

# One size, and every name that some config class gives it. A class takes the names it declares.
SIZES: tuple[tuple[Any, str], ...] = (
    (64, "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim"),
    (128, "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dim_ff"),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads"),
    (16, "head_dim kv_channels dim_head"),
    (VOCAB_SIZE, "vocab_size n_token n_words"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length seq_length max_target_positions"),
    (258, "pad_token_id pad_index"),
    (256, "bos_token_id bos_index"),
    (257, "eos_token_id eos_index"),
    # mixture of experts
    (4, "num_local_experts num_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k moe_top_k top_k num_experts_per_token"),
    (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (1, "n_group topk_group num_expert_group first_k_dense_replace moe_layer_start_index num_dense_layers"),
    # multi-head latent attention
    (24, "q_lora_rank"),
    (16, "kv_lora_rank qk_nope_head_dim"),
    (8, "qk_rope_head_dim"),
    (12, "v_head_dim"),
)


def causal_model_types() -> list[str]:
    """Return every model type of the causal mapping, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the family's config at hidden 64, 4 layers, 4 heads, windows of 8 and a vocabulary of 300.

    Args:
        model_type: a key of transformers' causal mapping.
        changes: fields to set otherwise.
    """
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**_tiny_fields(config_class, OVERRIDES.get(model_type, {})), **changes})


def _tiny_fields(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a tiny config, those of the configs inside it included."""
    try:
        default = config_class()
    except Exception:  # some classes refuse their own defaults
        default = config_class(**overrides)
    declared = default.to_dict()
    fields = {name: value for value, names in SIZES for name in names.split() if name in declared}
    if declared.get("sliding_window"):
        fields["sliding_window"] = WINDOW
    if "qk_rope_head_dim" in declared:
        fields["num_key_value_heads"] = 4
        fields.pop("head_dim", None)  # the heads follow from the three sizes of latent attention
    for name in config_class.sub_configs:
        part = getattr(default, name)
        if isinstance(part, PreTrainedConfig):
            fields[name] = {
                **_tiny_fields(type(part), OVERRIDES.get(part.model_type, {})),
                "model_type": part.model_type,
            }
    return fields | overrides


def as_checkpoint(model_type: str) -> dict[str, Any]:
    """Return what the config.json of a checkpoint of this family says, as far as the loader looks at it."""
    config_class = CONFIG_MAPPING[model_type]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if "text_config" in config_class.sub_configs:  # checkpoints hold the whole, not its text part
        architecture = architecture.replace("ForCausalLM", "ForConditionalGeneration")
    known = {"model_type": model_type, "architectures": [architecture]}
    try:
        return {**config_class().to_dict(), **known}
    except Exception:  # some classes refuse their own defaults
        return known


def tiny_family_model(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a re-drawn eager fp32 model of the family.

    Raises:
        ModelError: the tiny config still makes a model of more than 250 million parameters.
    """
    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert num_parameters < 250e6, f"{model_type}: {num_parameters} parameters: the tiny config is not tiny"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    redraw(model, seed)
    return model
