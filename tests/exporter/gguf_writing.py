"""Write tiny Hugging Face models as F32 .gguf files, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from pop_export.gguf_config import FAMILIES
from tests.tiny_models import byte_tokenizer

NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Return the model's tensors under GGUF names, permuted and offset as the converter does."""
    family = FAMILIES[architecture]
    block = {module: leaf for leaf, module in family.block_names.items()}
    config = model.config
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        if stem in NAMES:
            target = f"{NAMES[stem]}.{kind}"
        else:
            _, layer, module = stem.split(".", 2)
            target = f"blk.{layer}.{block[module]}.{kind}"
        if family.permuted and (".attn_q." in target or ".attn_k." in target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = halves.transpose(1, 2).reshape(value.shape)
        if family.norm_offset and target.endswith("norm.weight"):
            value = value + family.norm_offset
        tensors[target] = value.detach().float().contiguous().numpy()
    return tensors


def metadata_of(model: Any, architecture: str) -> dict[str, Any]:
    """Return the metadata that every architecture has, without prefix."""
    config = model.config
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if architecture in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        values["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return values


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
    stored: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """Write the model as `path`.

    Args:
        extra: metadata with the architecture's prefix left out; None as a value leaves the key out.
        extra_tensors: as in `gguf_tensors`; None as a value leaves the tensor out.
        tokenizer: keys below `tokenizer.` that replace or join those of the byte tokenizer; None leaves one out.
        stored: tensors already quantised, with their type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        f"{architecture}.{key}": value for key, value in {**metadata_of(model, architecture), **(extra or {})}.items()
    }
    values.update({f"tokenizer.{key}": value for key, value in {**byte_vocabulary(), **(tokenizer or {})}.items()})
    values["general.license"] = "apache-2.0"
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    for name, value in {**gguf_tensors(model, architecture), **(extra_tensors or {})}.items():
        if value is not None:
            writer.add_tensor(name, value)
    for name, (data, kind) in (stored or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_vocabulary() -> dict[str, Any]:
    """Return the byte tokenizer's vocabulary, padded to the 300 rows of the tiny models, as GGUF metadata."""
    fast = byte_tokenizer()
    tokens = fast.convert_ids_to_tokens(list(range(len(fast))))
    kinds = [1] * 256 + [3] * (len(tokens) - 256)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.bos_token_id": 256,
        "ggml.eos_token_id": 257,
        "ggml.padding_token_id": 258,
        "ggml.add_bos_token": False,
        "chat_template": fast.chat_template,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add one value with the type that its Python type says."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def logits(model: Any, num_tokens: int = 60) -> torch.Tensor:
    """Return the logits [1, S, V] of a fixed prompt."""
    ids = torch.randint(0, 256, (1, num_tokens), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(ids).logits


def config_of(architecture: str, **changes: Any) -> Any:
    """Return a tiny config of the architecture whose file says all that the model is."""
    from tests.tiny_models import TINY

    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "gemma": transformers.GemmaConfig,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
    }
    fields = dict(TINY)
    if architecture.startswith("gemma"):
        fields.update(head_dim=32)
    if architecture in ("gemma2", "gemma3"):
        fields.update(sliding_window=8, head_dim=256, query_pre_attn_scalar=256, num_hidden_layers=7)
    return kinds[architecture](**{**fields, **changes})
