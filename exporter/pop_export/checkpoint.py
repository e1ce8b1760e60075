"""Load a checkpoint: resolve what `--model` names, read model and tokenizer, and refuse what cannot be exported."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pop_export.gguf_file import load_gguf
from pop_export.hf_folder import load_folder, read_config, read_json, refuse_non_checkpoint
from pop_export.locate import Location, locate
from pop_export.quiet import first_line
from pop_export.tokenizer_files import (
    TokenizerFiles,
    check_generation_settings,
    end_of_turn_id,
    load_tokenizer,
    save_tokenizer,
    valid_token_ids,
)
from pop_runtime.errors import ModelError
from pop_runtime.manifest import sha256_of

__all__ = ["Checkpoint", "TokenizerFiles", "load_checkpoint", "save_tokenizer"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A causal language model ready to be exported, with its tokenizer and its origin."""

    model: PreTrainedModel  # fp32, eval, eager attention, no gradients, on the CPU
    tokenizer: PreTrainedTokenizerBase
    source: dict[str, Any]  # name, source, revision, sha256, license, architecture, model_type
    eos_token_ids: tuple[int, ...]  # every id that ends a generation, each inside the vocabulary
    bos_token_id: int | None
    pad_token_id: int | None


def load_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Checkpoint:
    """Return the checkpoint that `model` names.

    Args:
        model: tried in this order: a name from models/*.toml, a folder, a .gguf file, a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id; None: its default branch.
        offline: never touch the network; what is not on this machine is refused.
        trust_remote_code: let Python code from the model's folder run.
        allow_pickle: read weights from pickle files if there are no safetensors; tensors only, never code.

    Raises:
        ModelError: nothing of that name; not a decoder-only language model; anything missing, damaged or not allowed.
        UsageError: a revision of something that has none.
    """
    place = locate(
        model, revision=revision, offline=offline, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle
    )
    if place.path.is_dir():
        return _load_folder(place, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    return _load_gguf(place)


def _load_folder(place: Location, *, trust_remote_code: bool, allow_pickle: bool) -> Checkpoint:
    """Return the checkpoint in a Hugging Face folder."""
    folder = place.path
    refuse_non_checkpoint(folder)
    config, generation = read_config(folder), read_json(folder / "generation_config.json")
    model, files = load_folder(folder, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    check_generation_settings(folder, model)
    # as written in the files: a config class has end ids of its own where the file names none
    declared = [generation, config, config.get("text_config") or {}]
    return _checkpoint(place, model, tokenizer, declared, _sha256_of_all(files), _card_license(folder))


def _load_gguf(place: Location) -> Checkpoint:
    """Return the checkpoint in a .gguf file."""
    loaded = load_gguf(place.path)
    return _checkpoint(place, loaded.model, loaded.tokenizer, [loaded.token_ids], sha256_of(place.path), loaded.license)


def _checkpoint(
    place: Location,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    declared: list[dict[str, Any]],
    sha256: str,
    license_name: str | None,
) -> Checkpoint:
    """Return the checked and frozen whole; `declared` are the objects that may name special token ids, best first."""
    _refuse_not_finite(place.path, model)
    model.eval().requires_grad_(False)
    num_rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_rows:
        _LOG.warning("%s: the tokenizer has %d tokens, the embedding %d rows", place.path, len(tokenizer), num_rows)
    return Checkpoint(
        model=model,
        tokenizer=tokenizer,
        source={
            "name": place.name,
            "source": place.source,
            "revision": place.revision,
            "sha256": sha256,
            "license": place.license or license_name,
            "architecture": type(model).__name__,
            "model_type": model.config.model_type,
        },
        eos_token_ids=_eos_ids(declared, tokenizer, num_rows),
        bos_token_id=_single_id("bos", declared, tokenizer, num_rows),
        pad_token_id=_single_id("pad", declared, tokenizer, num_rows),
    )


def _eos_ids(declared: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[int, ...]:
    """Return the union of all end ids: of the configs, of the tokenizer, and the end of turn of the chat template.

    The template's is left out where the first config lists several: its author then chose which tokens end a
    generation, and the token after an answer need not be one (some models go on after it).
    """
    ids: list[Any] = []
    for source in declared:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    ids.append(tokenizer.eos_token_id)
    listed = declared[0].get("eos_token_id")
    if not (isinstance(listed, list) and len(listed) > 1):
        ids.append(end_of_turn_id(tokenizer))
    return valid_token_ids(ids, num_rows, "end token")


def _single_id(
    kind: str, declared: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, num_rows: int
) -> int | None:
    """Return the id of the bos or pad token: the tokenizer's own, else the first that a config names."""
    ids = [getattr(tokenizer, f"{kind}_token_id")] + [source.get(f"{kind}_token_id") for source in declared]
    return next(iter(valid_token_ids(ids, num_rows, f"{kind} token")), None)


def _refuse_not_finite(place: Path, model: PreTrainedModel) -> None:
    """Raise a ModelError naming the first tensor that holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        # the sum is five times as fast as a look at every value, but huge weights may overflow it
        if not torch.isfinite(parameter.sum()) and not torch.isfinite(parameter).all():
            raise ModelError(f"{place}: {name} holds NaN or infinite values; fetch the checkpoint again")


def _sha256_of_all(files: list[Path]) -> str:
    """Return the sha256 of the single weight file, or of a listing `sha256  name` of all of them, one a line."""
    if len(files) == 1:
        return sha256_of(files[0])
    listing = "".join(f"{sha256_of(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


def _card_license(folder: Path) -> str | None:
    """Return the `license:` of the model card's front matter, or None.

    Raises:
        ModelError: the card cannot be read.
    """
    card = folder / "README.md"
    if not card.is_file():
        return None
    try:
        head, _, rest = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
    except OSError as error:
        raise ModelError(f"{card}: cannot be read: {first_line(error)}; repair or remove the file") from error
    front = rest.partition("\n---")[0] if not head.strip() else ""
    found = [line.partition(":")[2].strip() for line in front.splitlines() if line.startswith("license:")]
    return found[0] if found else None
