"""Build the tokenizer that a GGUF file describes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from pop_export.quiet import first_line
from pop_export.tokenizer_files import check_template
from pop_runtime.checks import is_within, shown
from pop_runtime.errors import ModelError

_LOG = logging.getLogger(__name__)
_FIELDS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "add_space_prefix": "add_prefix_space",
}
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# how llama.cpp names the rules that transformers' table lacks
_GPT2_SPLIT = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
_DIGIT_SPLIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_SPLIT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")


def gguf_tokenizer(path: Path, architecture: str, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer, with its special tokens, chat template and the file's rule for bos and eos.

    Raises:
        ModelError: the file holds no tokenizer, one of a kind that is not supported (names the key), or a chat template
            that is none.
    """
    try:
        return _tokenizer(path, architecture, metadata)
    except ModelError:
        raise
    except Exception as error:  # transformers and tokenizers raise any type for odd entries
        raise ModelError(f"{path}: tokenizer.ggml.*: the tokenizer cannot be built: {first_line(error)}") from error


def _tokenizer(path: Path, architecture: str, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer, or raise whatever its parts raise."""
    prefix = "tokenizer.ggml."
    fields = {name: metadata[prefix + key] for key, name in _FIELDS.items() if prefix + key in metadata}
    kind, tokens = fields.get("tokenizer_type"), fields.get("tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ModelError(f"{path}: {prefix}model: expected a tokenizer of kind gpt2 or llama, found {kind}")
    for key in ("tokens", "merges"):
        texts = fields.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ModelError(f"{path}: {prefix}{key}: expected a list of texts, found {shown(texts)}; fetch it again")
    special: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        if is_within(token_id := metadata.get(prefix + key), 0, len(tokens) - 1):
            special[name] = tokens[token_id]
    if kind == "gpt2" and "merges" not in fields and "scores" not in fields:
        fields["merges"] = _no_merges(path, fields)
    backend, _ = convert_gguf_tokenizer(architecture, fields)
    if kind == "gpt2":
        _set_split(path, backend, fields.get("pre_tokenizer_type"))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    fast.chat_template = metadata.get("tokenizer.chat_template")
    check_template(fast, f"{path}: tokenizer.chat_template")
    _set_template(fast, metadata, kind, fields.get("pre_tokenizer_type"))
    return fast


def _no_merges(path: Path, fields: dict[str, Any]) -> list[str]:
    """Return the empty list of merges of a vocabulary of single bytes; any other vocabulary needs merges."""
    kinds = fields.get("token_type") or [1] * len(fields["tokens"])
    if any(len(token) > 1 for token, kind in zip(fields["tokens"], kinds, strict=True) if kind == 1):
        raise ModelError(f"{path}: tokenizer.ggml.merges: expected the merges of the vocabulary, found none")
    return []


def _set_split(path: Path, backend: Tokenizer, rule: str | None) -> None:
    """Split text as the vocabulary's merges were learned; the wrong rule gives other ids without a word.

    Raises:
        ModelError: the rule is not known.
    """
    if rule in _DIGIT_SPLIT:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif rule in (None, "default"):
        _LOG.warning("%s: tokenizer.ggml.pre is not set; text is split as for GPT-2", path)
    elif rule not in _GPT2_SPLIT and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelError(f"{path}: tokenizer.ggml.pre: rule {rule!r} is not supported; give the safetensors checkpoint")
    if rule in _LLAMA3_SPLIT:
        backend.model.ignore_merges = True  # a piece that is a token stays whole


def _set_template(fast: PreTrainedTokenizerFast, metadata: dict[str, Any], kind: str, rule: str | None) -> None:
    """Let encoding add bos and eos exactly where the file says so."""
    # llama.cpp adds bos to SentencePiece and Llama 3 vocabularies that do not say
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or rule in _LLAMA3_SPLIT)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos = [fast.bos_token] if add_bos and fast.bos_token else []
    eos = [fast.eos_token] if add_eos and fast.eos_token else []
    named = [(token, fast.convert_tokens_to_ids(token)) for token in dict.fromkeys(bos + eos)]
    pair = [f"{token}:1" for token in bos] + ["$B:1"] + [f"{token}:1" for token in eos]
    single = [*bos, "$A", *eos]
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=single + pair, special_tokens=named
    )
