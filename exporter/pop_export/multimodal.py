"""Take the text decoder out of a multimodal checkpoint, as a plain causal language model.

With text alone these models are their text decoder: the three position axes of Qwen-VL (mrope) are equal then, and
Gemma 3 masks image tokens only. tests/exporter/test_multimodal.py compares each of them with the whole model.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from pop_export.quiet import first_line
from pop_runtime.errors import ModelError

_LOG = logging.getLogger(__name__)

# model_type -> the config class of the plain causal twin; None: that of the checkpoint's own text_config
TEXT_TWINS: dict[str, type[PreTrainedConfig] | None] = {
    "gemma3": None,
    "llava": None,
    "mistral3": None,
    "qwen2_vl": Qwen2Config,
    "qwen2_5_vl": Qwen2Config,
    "qwen3_vl": Qwen3Config,
}
# where the checkpoints of the last years keep the decoder and its head; every other tensor is vision
_DECODER = re.compile(
    r"^(?:model\.language_model|language_model\.model|model(?=\.(?:embed_tokens|layers|norm)\.))\.(.+)"
)
_HEAD = re.compile(r"^(?:language_model\.)?lm_head\.(.+)")


def is_multimodal(config: dict[str, Any]) -> bool:
    """Return whether this config.json is that of a multimodal model whose text part can be exported."""
    return config.get("model_type") in TEXT_TWINS


def text_key(name: str) -> str | None:
    """Return the name that a tensor of a multimodal checkpoint has in the causal model, or None if it is not text."""
    if match := _DECODER.match(name):
        return f"model.{match.group(1)}"
    if match := _HEAD.match(name):
        return f"lm_head.{match.group(1)}"
    return None


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the plain causal model that equals the text part.

    Raises:
        ModelError: transformers has no causal model for it.
    """
    text = config.get_text_config(decoder=True)
    twin = TEXT_TWINS[config.model_type]
    if twin is not None:
        fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "dtype")}
        rope = fields.get("rope_parameters") or {}
        # equal positions on all three axes make mrope plain rope
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        if rope.get("rope_type") == "mrope":
            rope["rope_type"] = "default"
        text = twin(**{**fields, "rope_parameters": rope})
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{config.model_type}: its text part ({text.model_type}) has no causal language model")
    text.architectures = [AutoModelForCausalLM._model_mapping[type(text)].__name__]
    return text


def load_text_part(folder: Path, files: list[Path]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the text part as a causal model in fp32, and what transformers reports of missing tensors.

    Raises:
        ModelError: the weights are pickle files, or cannot be read.
    """
    if files[0].suffix != ".safetensors":
        raise ModelError(f"{folder}: the text part of a multimodal model is read from safetensors only")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = text_config(config)
        weights = _text_weights(files)
        # the whole model goes by the flag at the top, and by the file where that holds a head of its own
        flags = [getattr(part, "tie_word_embeddings", False) for part in (config, text)]
        head = weights.get("lm_head.weight")
        text.tie_word_embeddings = any(flags) and (head is None or head.equal(weights["model.embed_tokens.weight"]))
        if text.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return AutoModelForCausalLM._model_mapping[type(text)].from_pretrained(
            None,
            config=text,
            state_dict=weights,
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except Exception as error:  # transformers and safetensors raise any type for a broken checkpoint
        raise ModelError(f"{folder}: the checkpoint cannot be loaded: {first_line(error)}") from error


def _text_weights(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return the decoder's tensors by their names in the causal model."""
    weights, left_out = {}, 0
    for file in files:
        with safe_open(file, framework="pt") as archive:
            for name in archive.keys():  # noqa: SIM118 - not a dict
                key = text_key(name)
                if key is None:
                    left_out += 1
                else:
                    weights[key] = archive.get_tensor(name)
    _LOG.info("text part only: %d tensors taken, %d of the other parts left out", len(weights), left_out)
    return weights
