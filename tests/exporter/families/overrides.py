"""What the names that config classes share cannot say about a tiny model: every entry has its reason."""

from __future__ import annotations

from typing import Any

SLIDING = ["sliding_attention", "full_attention"] * 2
LOW_PAD = {"pad_token_id": 1}  # positions start after the pad id, so that it has to lie below max_positions

OVERRIDES: dict[str, dict[str, Any]] = {
    # roberta's kin: positions are counted from the pad id
    **{
        name: LOW_PAD
        for name in ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
                     "xmod", "prophetnet", "xglm")
    },
    # rotary width in channels, not as a share of the head
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "minimax_m3_vl_text": {"rotary_dim": 8, "dense_intermediate_size": 128},
    # layer patterns written out: 4 layers would show one kind only
    "cohere_compass_text": {
        "layer_types": SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in SLIDING},
    },
    "gemma3_text": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "ministral": {"layer_types": SLIDING},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "laguna": {"layer_types": SLIDING, "num_attention_heads_per_layer": [4, 4, 4, 4], "sliding_window": 8},
    "kolibri1": {"layer_types": SLIDING},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 128, "no_rope_layers": [1, 0, 1, 0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    # sizes under names of their own
    "dots1": {"n_shared_experts": 1},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 16)},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
        "laurel_rank": 8, "layer_types": SLIDING, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 16, "layer_types": SLIDING,
        "per_layer_config": {},
    },
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
}  # fmt: skip
