"""Load a checkpoint's tokenizer, find its end tokens, and write the files that the runtime reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pop_export.quiet import first_line, quiet_transformers
from pop_runtime.chat import compile_template
from pop_runtime.checks import shown
from pop_runtime.errors import ModelError
from pop_runtime.sampling import settings_in_force
from pop_runtime.stop_strings import stored_strings

if TYPE_CHECKING:
    from pop_export.checkpoint import Checkpoint

_LOG = logging.getLogger(__name__)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PROBE = "pop end of turn probe"  # an answer that no template writes by itself
_OF_THIS_MACHINE = ("name_or_path", "is_local", "local_files_only")  # what save_pretrained notes of the loading

_NOT_SETTINGS = ("transformers_version", "_from_model_config", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class TokenizerFiles:
    """The names of the written files, relative to the folder."""

    tokenizer: str
    chat_template: str | None
    generation_config: str


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face folder.

    Raises:
        ModelError: there is none, it is damaged or cannot be written as a tokenizer.json, or its chat template is none.
    """
    has_file = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    if not has_file and not trust_remote_code:
        raise ModelError(f"{folder}: no tokenizer: expected {', '.join(_TOKENIZER_FILES[:3])} or similar, found none")
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True, use_fast=True
            )
    except Exception as error:  # transformers and tokenizers raise any type for a broken file
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(
            f"{folder}: {type(tokenizer).__name__} cannot be written as tokenizer.json, which the runtime needs"
        )
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first that is there is read
    name = next((name for name in names if (folder / name).is_file()), names[-1])
    check_template(tokenizer, str(folder / name))
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Raise ModelError unless the chat template, where there is one, is Jinja as the runtime reads it."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name, of which a bundle keeps this one
        template = template.get("default")
    if template is None:
        return
    if not isinstance(template, str):
        raise ModelError(f"{place}: expected the text of a chat template, found {shown(template)}; mend the file")
    compile_template(template, place, "mend or remove the template")


def check_generation_settings(folder: Path, model: PreTrainedModel) -> None:
    """Raise ModelError, naming the checkpoint's file, for a setting that the runtime would refuse in every request."""
    settings = _generation_settings(model)
    try:
        settings_in_force(settings)
        stored_strings(settings)
    except ModelError as error:  # begins with the name of the bundle's file
        name = "generation_config.json" if (folder / "generation_config.json").is_file() else "config.json"
        raise ModelError(f"{folder / name}{str(error).removeprefix('generation_config.json')}") from error


def _generation_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the checkpoint's own settings of generation, whatever transformers thinks of them."""
    own = model.generation_config.to_diff_dict()
    return {key: value for key, value in own.items() if value is not None and key not in _NOT_SETTINGS}


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes right after an assistant's answer, or None."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template may raise anything; chat then fails at run time, with its own message
        _LOG.warning("the chat template does not render a plain exchange: %s", first_line(error))
        return None
    _, found, tail = text.rpartition(_PROBE)
    tail = tail.lstrip()
    special = [token for token in tokenizer.all_special_tokens if found and tail.startswith(token)]
    return tokenizer.convert_tokens_to_ids(max(special, key=len)) if special else None


def valid_token_ids(ids: Iterable[Any], num_rows: int, what: str) -> tuple[int, ...]:
    """Return the ids in the order given, each once, without those that the embedding of `num_rows` rows lacks."""
    kept: list[int] = []
    for value in ids:
        if value is None or isinstance(value, bool) or value in kept:
            continue
        if isinstance(value, int) and 0 <= value < num_rows:
            kept.append(value)
        else:
            _LOG.warning("%s id %r is outside the vocabulary of %d tokens and is ignored", what, value, num_rows)
    return tuple(kept)


def save_tokenizer(checkpoint: Checkpoint, folder: Path) -> TokenizerFiles:
    """Write tokenizer, chat template and generation config into `folder`, and return the names of the files.

    The generation config holds the checkpoint's own settings, whatever transformers thinks of them, and every end id.

    Raises:
        ModelError: the tokenizer cannot be written as tokenizer.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with quiet_transformers():
            checkpoint.tokenizer.save_pretrained(folder)
    except Exception as error:  # slow tokenizers and damaged ones raise any type
        raise ModelError(f"{folder}: the tokenizer cannot be written: {first_line(error)}") from error
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder}: {type(checkpoint.tokenizer).__name__} did not write tokenizer.json")
    _write_json(folder / "tokenizer_config.json", _without_traces(folder / "tokenizer_config.json"))
    settings = _generation_settings(checkpoint.model)
    settings["eos_token_id"] = list(checkpoint.eos_token_ids)
    for key in ("bos_token_id", "pad_token_id"):
        settings.pop(key, None)
        if (value := getattr(checkpoint, key)) is not None:
            settings[key] = value
    _write_json(folder / "generation_config.json", settings)
    template = "chat_template.jinja"
    return TokenizerFiles(
        tokenizer="tokenizer.json",
        chat_template=template if (folder / template).is_file() else None,
        generation_config="generation_config.json",
    )


def _without_traces(file: Path) -> dict[str, Any]:
    """Return the object in tokenizer_config.json without what it says of the machine it was loaded on."""
    config = json.loads(file.read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in _OF_THIS_MACHINE}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
