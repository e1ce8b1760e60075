"""`manifest.json`: the one contract between an export and everything that runs it.

The exporter fills the dataclasses and calls `write_manifest` last; readers call `read_manifest`, which refuses a newer
format, a missing or altered file and any path that leaves the bundle's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pop_runtime.errors import ModelError

FORMAT = "pop-bundle"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class KvLayer:
    """Shape of one layer's K and V buffers, which are `[B, num_heads, S_max, head_size]` each."""

    num_heads: int
    key_head_size: int
    value_head_size: int


@dataclass(frozen=True)
class Plan:
    """Which layers the prefill graph leaves out, and how the choice was made."""

    num_layers: int
    skipped_layers: tuple[int, ...]  # ascending
    chosen_by: str  # "gates", "search" or "user"
    refitted_layers: tuple[int, ...] = ()  # skipped layers whose K/V projections were re-fitted
    surrogate_layers: tuple[int, ...] = ()  # skipped layers replaced by a linear surrogate


@dataclass(frozen=True)
class Windows:
    """How many tokens at the start of a sequence and at the end of each turn run at full depth."""

    sink_tokens: int = 0
    boundary_tokens: int = 1  # at least 1: the last prompt token predicts the first new one


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything a runtime has to know about a bundle; see docs/bundle.md for each field."""

    model: dict[str, Any]  # name, source, revision, sha256, license, architecture, model_type
    vocab_size: int  # rows of the head: the last axis of `logits`
    max_positions: int  # longest sequence, prompt and new tokens together
    plan: Plan
    windows: Windows
    kv_dtype: str  # "float32", "float16" or "bfloat16"
    kv_layers: tuple[KvLayer, ...]
    precision: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    tokenizer: str | None  # file name of the Hugging Face `tokenizer.json`, or None
    chat_template: str | None  # file name of the Jinja chat template, or None
    generation_config: str | None  # file name of `generation_config.json`, or None
    tools: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    prefill_graph: str = "prefill.onnx"
    decode_graph: str = "decode.onnx"
    weights: str = "weights.bin"
    input_ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    logits: str = "logits"
    past_key: str = "past_key_values.{layer}.key"
    past_value: str = "past_key_values.{layer}.value"
    present_key: str = "present.{layer}.key"
    present_value: str = "present.{layer}.value"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
