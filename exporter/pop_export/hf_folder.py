"""Load a Hugging Face folder: everything that can be refused is refused before any weight is read or code is run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pop_export import multimodal
from pop_export.quiet import first_line, quiet_transformers
from pop_runtime.checks import shown
from pop_runtime.errors import ModelError

_LOG = logging.getLogger(__name__)
_CAUSAL_CLASSES = {
    name
    for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in ([entry] if isinstance(entry, str) else entry)
    if not name.endswith("ForConditionalGeneration")
}
# What decides how a folder is loaded, by the type that transformers writes:
_CONFIG_TYPES = {
    "model_type": (str, "text"),
    "architectures": (list, "a list of names"),
    "text_config": (dict, "an object"),
    "quantization_config": (dict, "an object"),
    "compression_config": (dict, "an object"),
}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file.

    Raises:
        ModelError: the file cannot be read, is not JSON or does not hold an object.
    """
    try:
        if not file.is_file():
            return {}
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:  # no JSON or UTF-8; not to be read; nested too deep
        raise ModelError(f"{file}: expected JSON, found: {first_line(error)}; repair or remove the file") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object in config.json, in which what decides how the folder is loaded is of its type or left out.

    Raises:
        ModelError: as `read_json`, or an entry is of another type (names it).
    """
    file = folder / "config.json"
    config = read_json(file)
    _check_types(config, str(file))
    _check_types(config.get("text_config") or {}, f"{file}, text_config")
    return config


def _check_types(config: dict[str, Any], place: str) -> None:
    """Raise ModelError for the first entry of another type than `_CONFIG_TYPES` says."""
    for name, (kind, expected) in _CONFIG_TYPES.items():
        value = config.get(name)
        is_wrong = value is not None and not isinstance(value, kind)
        if is_wrong or (name == "architectures" and not all(isinstance(entry, str) for entry in value or ())):
            raise ModelError(f"{place}, {name}: expected {expected}, found {shown(value)}; fetch the checkpoint again")


def load_folder(folder: Path, *, trust_remote_code: bool, allow_pickle: bool) -> tuple[PreTrainedModel, list[Path]]:
    """Return the causal language model of a folder in fp32, and the weight files it was read from.

    The text part of a multimodal checkpoint is returned as a plain causal model.

    Raises:
        ModelError: the folder is no checkpoint, is not a decoder, wants code or pickle that was not allowed, is
            pre-quantised, or its weights are missing, damaged or incomplete.
    """
    config = read_config(folder)
    refuse_non_checkpoint(folder)
    refuse_remote_code(folder, config, trust_remote_code)
    refuse_quantized(folder, config)
    if not (trust_remote_code and config.get("auto_map")):
        refuse_non_decoder(folder, config)
    files = weight_files(folder, allow_pickle=allow_pickle)
    with quiet_transformers():
        if multimodal.is_multimodal(config):
            model, report = multimodal.load_text_part(folder, files)
        else:
            model, report = _load_causal(folder, trust_remote_code=trust_remote_code, files=files)
    refuse_incomplete(str(folder), report)
    return model, files


def refuse_non_checkpoint(folder: Path) -> None:
    """Raise a ModelError if the folder has no config.json, or is something else that we know by its files."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(f"{folder}: expected a whole model, found an adapter (adapter_config.json); merge it first")
    if (folder / "config.json").is_file():
        return
    if (folder / "manifest.json").is_file() and (folder / "decode.onnx").is_file():
        raise ModelError(f"{folder}: expected a checkpoint, found an exported bundle; give the model it was made from")
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise ModelError(f"{folder}: expected config.json, found none; to export {gguf[0].name} give its own path")
    raise ModelError(f"{folder}: expected config.json, found none; this is not a Hugging Face checkpoint folder")


def refuse_remote_code(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Raise a ModelError if the model or the tokenizer asks for Python code from the folder and that is not allowed."""
    if trust_remote_code:
        return
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        if content.get("auto_map"):
            raise ModelError(
                f"{folder / name}: the model wants to run Python code from its folder (auto_map); "
                "read that code, then pass --trust-remote-code to allow it"
            )


def refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    """Raise a ModelError naming the method if the weights are stored quantised."""
    for part in (config, config.get("text_config") or {}):
        settings = part.get("quantization_config") or part.get("compression_config")
        if settings:
            method = settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else "unknown")
            raise ModelError(
                f"{folder}: the checkpoint is already quantised ({method}), which cannot be exported; "
                "give the original fp32, fp16 or bf16 checkpoint"
            )


def refuse_non_decoder(folder: Path, config: dict[str, Any]) -> None:
    """Raise a ModelError naming the architecture if it is not a decoder-only language model."""
    model_type = config.get("model_type")
    architecture = (config.get("architectures") or [None])[0]
    name = architecture or model_type or "unknown"
    if model_type is None:
        raise ModelError(f"{folder / 'config.json'}: expected model_type, found none; this is no transformers config")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"{folder}: unknown architecture {name} (model_type {model_type}); it is not supported")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{folder}: {name} is an encoder-decoder; only decoder-only language models can be exported")
    if multimodal.is_multimodal(config):
        return
    causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # BERT and its kin are in the causal mapping too: what the checkpoint was saved as decides
    encoder = architecture is None and "is_decoder" in CONFIG_MAPPING[model_type]().to_dict()
    encoder = (encoder or (architecture or "").endswith("LMHeadModel")) and config.get("is_decoder") is False
    if not causal or encoder or (architecture is not None and architecture not in _CAUSAL_CLASSES):
        raise ModelError(
            f"{folder}: {name} is not a decoder-only language model with a head, which is what can be exported"
        )


def weight_files(folder: Path, *, allow_pickle: bool) -> list[Path]:
    """Return the weight files that will be read, safetensors before pickle.

    Raises:
        ModelError: there are none, a shard named in the index is missing, or there is only pickle, not allowed.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        whole, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if suffix == "bin" and not allow_pickle and (whole.is_file() or index.is_file()):
            break
        if whole.is_file():
            return [whole]
        if index.is_file():
            weight_map = read_json(index).get("weight_map") or {}
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise ModelError(
                    f"{index}, weight_map: expected names of files by tensor, found {shown(weight_map)}; "
                    "fetch the checkpoint again"
                )
            shards = [folder / name for name in sorted(set(weight_map.values()))]
            missing = [shown(shard.name) for shard in shards if not _is_file(shard)]
            if missing or not shards:
                found = f"{', '.join(missing[:3])} missing" if missing else "an empty weight_map"
                raise ModelError(f"{index}: expected {len(shards)} shards, found {found}; fetch the checkpoint again")
            return shards
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles and not allow_pickle:
        raise ModelError(
            f"{folder}: the weights are pickle files ({pickles[0]}), which can carry code; "
            "pass --allow-pickle to read them, or convert them to safetensors"
        )
    found = f"{pickles[0]}, which transformers does not read" if pickles else "no weights"
    raise ModelError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found {found}")


def _is_file(path: Path) -> bool:
    """Return whether there is such a file: there is none of a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _load_causal(folder: Path, *, trust_remote_code: bool, files: list[Path]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the model that transformers makes of the folder in fp32, and its report of missing tensors."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=files[0].suffix == ".safetensors",
            ignore_mismatched_sizes=True,  # they are in the report, and refused below with their names
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise any type for a broken checkpoint
        raise ModelError(f"{folder}: the checkpoint cannot be loaded: {first_line(error)}") from error


def refuse_incomplete(place: str, report: dict[str, Any]) -> None:
    """Raise a ModelError if transformers had to invent a tensor; warn of tensors that nothing uses."""
    wrong = [entry[0] if isinstance(entry, tuple) else entry for entry in report["mismatched_keys"]]
    for problem, names in (("missing", report["missing_keys"]), ("of the wrong shape", wrong)):
        if names:
            raise ModelError(f"{place}: {len(names)} tensors are {problem}: {first_names(names)}")
    if report["unexpected_keys"]:
        _LOG.warning("%s: tensors that the model does not use: %s", place, first_names(report["unexpected_keys"]))


def first_names(names: Any) -> str:
    """Return the first three names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
