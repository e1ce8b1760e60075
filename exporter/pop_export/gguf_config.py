"""Turn GGUF metadata into a transformers config, strictly.

Every key under the architecture's prefix is applied, or checked, or the file is refused with that key's name: a rope
scaling or a window that is lost without a word makes a model that is fluent and wrong. Where the metadata leaves
something out, the value is the one llama.cpp computes with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from pop_export.quiet import first_line
from pop_runtime.checks import is_within, shown
from pop_runtime.errors import ModelError

Refuse = Callable[[str, str], ModelError]  # (key without prefix, what is wrong) -> the error to raise
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
           "attention.layer_norm_rms_epsilon")  # fmt: skip
_WHOLE = {*_KEYS, "attention.sliding_window"} - {"attention.layer_norm_rms_epsilon"}  # numbers that count something
_REAL = {
    "attention.layer_norm_rms_epsilon", "attention.scale", "attn_logit_softcapping", "final_logit_softcapping",
    "rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_GEMMA_HEAD_DIM = 256  # the head size at which Gemma's query_pre_attn_scalar is known to equal it
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}  # llama.cpp knows the 27B models, which scale by E / H, by these


@dataclass(frozen=True)
class GgufFamily:
    """How one GGUF architecture maps to transformers."""

    config: type[PreTrainedConfig]
    keys: dict[str, str] = field(default_factory=dict)  # metadata key without prefix -> config field, beyond _KEYS
    block: dict[str, str] = field(default_factory=dict)  # tensor of a block -> module, beyond _BLOCK
    permuted: bool = False  # rows of Q and K are stored interleaved for llama.cpp's rope
    norm_offset: float = 0.0  # what the converter added to every norm weight

    @property
    def block_names(self) -> dict[str, str]:
        """GGUF name of a block's tensor -> name of the module in the decoder layer."""
        return {**_BLOCK, **self.block}


FAMILIES = {
    "llama": GgufFamily(LlamaConfig, permuted=True),
    "qwen2": GgufFamily(Qwen2Config),
    "qwen3": GgufFamily(Qwen3Config, block=_QK_NORM),
    "gemma": GgufFamily(GemmaConfig, norm_offset=1.0),
    "gemma2": GgufFamily(Gemma2Config, keys=_SOFTCAPS, block=_SANDWICH, norm_offset=1.0),
    "gemma3": GgufFamily(Gemma3TextConfig, keys=_SOFTCAPS, block={**_SANDWICH, **_QK_NORM}, norm_offset=1.0),
}


def family_of(path: Path, metadata: dict[str, Any]) -> tuple[str, GgufFamily]:
    """Return the architecture's name and its mapping.

    Raises:
        ModelError: the architecture is not one of FAMILIES, or the file is one part of several.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ModelError(
            f"{path}: GGUF architecture {shown(architecture)} is not supported (supported: {', '.join(FAMILIES)}); "
            "give the safetensors checkpoint instead"
        )
    if (count := metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(f"{path}: this is one of {shown(count)} GGUF files; merge them with gguf-split")
    return architecture, FAMILIES[architecture]


def gguf_config(path: Path, metadata: dict[str, Any], *, num_rows: int, tensors: set[str]) -> PreTrainedConfig:
    """Return the transformers config that the metadata describes.

    Args:
        path: of the file, for messages.
        metadata: as read by `read_gguf`.
        num_rows: rows of the token embedding, V.
        tensors: names in the file. They say whether there are biases, and a head apart from the embedding.

    Raises:
        ModelError: a key is missing, of a kind that is not supported, or unknown (names the key).
    """
    architecture, family = family_of(path, metadata)
    prefix = f"{architecture}."
    left = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def refuse(key: str, text: str) -> ModelError:
        return ModelError(f"{path}: {prefix}{key}: {text}; give the safetensors checkpoint instead")

    _check_types(left, refuse)
    try:
        return _config(architecture, family, metadata, left, refuse, num_rows, tensors)
    except ModelError:
        raise
    except Exception as error:  # odd numbers, and the config classes check their fields with errors of their own
        raise ModelError(f"{path}: the metadata makes no {architecture} model: {first_line(error)}") from error


def _config(
    architecture: str,
    family: GgufFamily,
    metadata: dict[str, Any],
    left: dict[str, Any],
    refuse: Refuse,
    num_rows: int,
    tensors: set[str],
) -> PreTrainedConfig:
    """Return the config; `left` holds the architecture's keys without prefix, of which none may be left."""
    fields = _shape({**_KEYS, **family.keys}, left, refuse)
    if fields.setdefault("vocab_size", num_rows) != num_rows:
        raise refuse("vocab_size", f"expected {num_rows} (rows of token_embd.weight), found {fields['vocab_size']}")
    fields["rope_parameters"], unused = _rope(left)
    if architecture in ("gemma2", "gemma3"):
        fields.update(_gemma(architecture, fields, left, refuse))
    fields.update(_token_ids(metadata), tie_word_embeddings="output.weight" not in tensors)
    for name, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if tensor in tensors and hasattr(family.config, name):
            fields[name] = True
    for key, value in left.items():
        if key not in unused and not _is_neutral(key, value):
            raise refuse(key, f"this setting ({str(value)[:40]}) is not supported")
    return family.config(**fields)


def _check_types(left: dict[str, Any], refuse: Refuse) -> None:
    """Raise the error of the first key whose value is not the number that it should be; lists have one of their own."""
    for key, value in left.items():
        if key in _WHOLE and not isinstance(value, list) and not is_within(value, 1, 2**31 - 1):
            raise refuse(key, f"expected a whole number above 0, found {shown(value)}")
        is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if key in _REAL and not is_number:
            raise refuse(key, f"expected a number, found {shown(value)}")


def _shape(names: dict[str, str], left: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return the config fields that `names` maps metadata keys to; takes the keys it applies out of `left`."""
    for key in _NEEDED:
        if not left.get(key):
            raise refuse(key, f"expected a value above 0, found {left.get(key, 'none')}")
    fields = {}
    for key, name in names.items():
        if isinstance(left.get(key), list):
            raise refuse(key, f"expected one value for all layers, found {len(left[key])}")
        if key in left:
            fields[name] = left.pop(key)
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    for key in ("rope.dimension_count", "attention.value_length"):
        if left.get(key, fields["head_dim"]) != fields["head_dim"]:
            raise refuse(key, f"expected the head size {fields['head_dim']}, found {left[key]}")
        left.pop(key, None)
    return fields


def _is_neutral(key: str, value: Any) -> bool:
    """Return whether a key that nothing reads says only what holds anyway: 0 experts, a causal mask and the like."""
    neutral = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.finetuned": value}
    return key in neutral and neutral[key] == value


def _rope(left: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return rope_parameters and the keys without meaning for this scaling; takes the keys it applies out of `left`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base", 10000.0)}
    kind = left.get("rope.scaling.type")
    factor = left.get("rope.scaling.factor", left.get("rope.scale_linear"))
    if kind is None and factor is not None:
        kind = "linear"  # files older than the type key
    if kind in (None, "none"):
        left.pop("rope.scaling.type", None)
        return rope, {"rope.scaling.factor", "rope.scaling.original_context_length"} if kind else set()
    if kind not in ("linear", "yarn") or factor is None:
        return rope, set()  # what is left in `left` is refused by name
    for key in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"):
        left.pop(key, None)
    rope.update(rope_type=kind, factor=factor)
    if kind == "linear":
        return rope, {"rope.scaling.original_context_length"}
    names = {
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    rope.update({name: left.pop(key) for key, name in names.items() if key in left})
    return rope, set()


def _gemma(architecture: str, fields: dict[str, Any], left: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    """Return what a Gemma 2 or 3 config needs beyond the shared keys."""
    head_dim, num_layers = fields["head_dim"], fields["num_hidden_layers"]
    extra: dict[str, Any] = {}
    if "attention.scale" in left:
        scale = left.pop("attention.scale")
        extra["query_pre_attn_scalar"] = round(scale**-2)
        if abs(extra["query_pre_attn_scalar"] ** -0.5 - scale) > 1e-6 * scale:
            raise refuse("attention.scale", f"expected 1 / sqrt of a whole number, found {scale}")
    elif num_layers == _LAYERS_27B[architecture]:
        extra["query_pre_attn_scalar"] = fields["hidden_size"] // fields["num_attention_heads"]
    elif head_dim == _GEMMA_HEAD_DIM:
        extra["query_pre_attn_scalar"] = head_dim
    else:
        raise refuse("attention.scale", f"the scale of a head size of {head_dim} is not in the file")
    if "sliding_window" not in fields:
        raise refuse("attention.sliding_window", "expected this key, found none")
    if architecture == "gemma2":
        extra["attn_logit_softcapping"] = fields.get("attn_logit_softcapping", 50.0)
        extra["final_logit_softcapping"] = fields.get("final_logit_softcapping", 30.0)
        return extra
    if "attn_logit_softcapping" in fields:
        raise refuse("attn_logit_softcapping", "not expected in Gemma 3")
    # the file names neither: 5 sliding layers to 1 full, and a base of 10000 for the sliding ones
    pattern = left.pop("attention.sliding_window_pattern", 6)
    sliding = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if len(sliding) < num_layers:
        raise refuse("attention.sliding_window_pattern", f"expected {num_layers} layers, found {len(sliding)}")
    extra["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in sliding[:num_layers]]
    local = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base_swa", 10000.0)}
    extra["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    return extra


def _token_ids(metadata: dict[str, Any]) -> dict[str, int | None]:
    """Return the special token ids, None where the file names none."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
