"""Load a .gguf file as a transformers model in fp32: every tensor is used, or the file is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from pop_export.gguf_config import GgufFamily, family_of, gguf_config
from pop_export.gguf_reader import GgufFile, read_gguf
from pop_export.gguf_tokenizer import gguf_tokenizer
from pop_export.hf_folder import first_names, refuse_incomplete
from pop_export.quiet import first_line, quiet_transformers
from pop_runtime.errors import ModelError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufCheckpoint:
    """What a .gguf file holds."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    token_ids: dict[str, Any]  # eos_token_id (a list), bos_token_id and pad_token_id as the metadata names them
    license: str | None


def load_gguf(path: Path) -> GgufCheckpoint:
    """Return the model and the tokenizer of a .gguf file, de-quantised to fp32.

    Raises:
        ModelError: the file is damaged or of an unsupported kind, or something in it has no place in the model (names
            the metadata key or the tensor).
    """
    file = read_gguf(path)
    architecture, family = family_of(path, file.metadata)
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{path}: expected the tensor token_embd.weight, found none")
    weights = _weights(file, family)
    head, embedding = weights.get("lm_head.weight"), weights["model.embed_tokens.weight"]
    if head is not None and head.shape == embedding.shape and torch.equal(head, embedding):
        del weights["lm_head.weight"]  # some converters store a tied head twice
    tensors = set(file.tensors) if "lm_head.weight" in weights else set(file.tensors) - {"output.weight"}
    config = gguf_config(path, file.metadata, num_rows=len(embedding), tensors=tensors)
    num_blocks = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if config.num_hidden_layers > num_blocks:  # a model of so many layers may take hours to build, only to be refused
        raise ModelError(
            f"{path}: {architecture}.block_count: expected {num_blocks} (blk.*), found {config.num_hidden_layers}; "
            "fetch it again"
        )
    if family.permuted:
        _unpermute(path, weights, config.num_attention_heads, config.num_key_value_heads)
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused below, with their names
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises any type for a config that makes no sense
        raise ModelError(f"{path}: the model cannot be built: {first_line(error)}") from error
    refuse_incomplete(str(path), report)
    if report["unexpected_keys"]:
        raise ModelError(f"{path}: tensors without a place in the model: {first_names(report['unexpected_keys'])}")
    if _ROPE_FREQS in file.tensors:
        _apply_rope_freqs(path, model, file.array(_ROPE_FREQS))
    license_name = file.metadata.get("general.license")
    ids = {f"{kind}_token_id": getattr(config, f"{kind}_token_id") for kind in ("bos", "pad")}
    eos = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return GgufCheckpoint(
        model=model,
        tokenizer=gguf_tokenizer(path, architecture, file.metadata),
        token_ids={**ids, "eos_token_id": [token for token in eos if token is not None]},
        license=license_name if isinstance(license_name, str) else None,
    )


def _weights(file: GgufFile, family: GgufFamily) -> dict[str, torch.Tensor]:
    """Return every tensor of the file, float32, by its name in transformers.

    Raises:
        ModelError: a tensor has no place in the model (names it).
    """
    weights = {}
    for name in file.tensors:
        if name == _ROPE_FREQS:
            continue
        target = _target_name(name, family)
        if target is None:
            raise ModelError(f"{file.path}: tensor {name} has no place in the model; give the safetensors checkpoint")
        values = torch.from_numpy(np.ascontiguousarray(file.array(name)))
        if family.norm_offset and name.endswith("norm.weight"):
            values = values - family.norm_offset
        weights[target] = values
    return weights


def _target_name(name: str, family: GgufFamily) -> str | None:
    """Return the transformers name of a GGUF tensor, or None."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, leaf = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or leaf not in family.block_names:
        return None
    return f"model.layers.{block}.{family.block_names[leaf]}.{kind}"


def _unpermute(path: Path, weights: dict[str, torch.Tensor], num_heads: int, num_kv_heads: int) -> None:
    """Put the rows of Q and K back as Hugging Face has them: half and half, where llama.cpp's rope pairs neighbours.

    Raises:
        ModelError: the rows are not pairs for each head (names the tensor).
    """
    for name, values in weights.items():
        heads = num_heads if ".q_proj." in name else num_kv_heads if ".k_proj." in name else 0
        if heads:
            if values.shape[0] % (2 * heads):
                raise ModelError(
                    f"{path}: {name}: expected rows in pairs for each of {heads} heads, found {values.shape[0]}; "
                    "give the safetensors checkpoint instead"
                )
            pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
            weights[name] = pairs.transpose(1, 2).reshape(values.shape).contiguous()


def _apply_rope_freqs(path: Path, model: PreTrainedModel, factors: np.ndarray) -> None:
    """Divide the rope frequencies by the factors [D / 2] in which llama.cpp keeps Llama 3's rope scaling.

    The factors are not a config field of transformers, so the module's own frequencies carry them.
    """
    rotary = model.model.rotary_emb
    inv_freq = getattr(rotary, "inv_freq", None)  # Gemma 3 has two, under other names
    if inv_freq is None or inv_freq.numel() != factors.size or not np.all(factors > 0):
        expected = "a model with one rope" if inv_freq is None else f"{inv_freq.numel()} positive factors"
        raise ModelError(f"{path}: {_ROPE_FREQS}: expected {expected}, found {factors.size} factors")
    divisor = torch.from_numpy(np.array(factors, dtype=np.float32)).reshape(inv_freq.shape)
    rotary.inv_freq = inv_freq / divisor
    rotary.original_inv_freq = rotary.inv_freq.clone()
