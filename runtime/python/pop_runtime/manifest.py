"""`manifest.json`: the one contract between an export and everything that runs it.

The exporter fills the dataclasses and calls `write_manifest` last; readers call `read_manifest`, which refuses a newer
format, a missing or altered file and any path that leaves the bundle's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from pop_runtime.checks import shown
from pop_runtime.errors import ModelError

FORMAT = "pop-bundle"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MAKER = "pop-export"  # the command that makes bundles
KV_DTYPES = ("float32", "float16", "bfloat16")
DIALECTS = ("ort", "standard")  # with ONNX Runtime's own operators, or with those of ONNX alone


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
class Segment:
    """A part of one or both graphs as a graph of its own, over the same weights."""

    graph: str  # file name
    stages: tuple[str, ...]  # "prefill", "decode" or both
    hidden_in: str | None  # input for the hidden states of the segment before; None reads none
    hidden_out: str | None  # output of its own; None hands on what it was given
    layers: tuple[int, ...] = ()  # whose K and V it reads and writes
    hidden_size: int = 0  # E of the hidden states [B, S, E]


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
    tokenizer_config: str | None = (
        None  # file name of `tokenizer_config.json`: the special tokens a chat template names
    )
    dialect: str = "ort"  # one of DIALECTS: operators of the graphs
    segments: tuple[Segment, ...] = ()  # both graphs again, in the order in which they run, kept layers once

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored in small integers: precision "int8-...", "int4-..."."""
        return self.precision.startswith("int")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return size and sha256 of the named files of a folder, sorted by name: what `Manifest.files` holds."""
    return {name: FileEntry((folder / name).stat().st_size, sha256_of(folder / name)) for name in sorted(names)}


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write `manifest.json`, through a temporary name, and return its path; the same manifest gives the same bytes.

    Raises:
        ModelError: the manifest contradicts itself or names a file outside the folder.
    """
    check_manifest(manifest, str(folder / MANIFEST_NAME))
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(manifest)}
    path = folder / MANIFEST_NAME
    temporary = folder / f".{MANIFEST_NAME}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a bundle; unknown keys are let through, so that a later minor export still reads.

    Raises:
        ModelError: no folder, no manifest, not JSON, another format or a newer version, a key that is missing or of the
            wrong type, values that contradict each other, or a path that leaves the folder.
    """
    path = folder / MANIFEST_NAME
    try:
        if not folder.is_dir():
            raise ModelError(f"{folder}: expected a bundle folder, found none; make one with pop-export --out {folder}")
        if not path.is_file():
            raise ModelError(f"{path}: expected a bundle's manifest, found none; re-run pop-export --out {folder}")
    except OSError as error:  # a parent may not be looked into, or a name is too long
        raise ModelError(f"{folder}: expected a bundle folder, found {error.strerror}; give another one") from error
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON, found {_one_line(error)}; re-run pop-export") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise ModelError(f"{path}, format: expected {FORMAT!r}, found {shown(found)}; give a folder made by pop-export")
    version = _decode(content.get("format_version"), int, f"{path}, format_version")
    if version > FORMAT_VERSION:
        raise ModelError(
            f"{path}, format_version: expected at most {FORMAT_VERSION}, found {version}; update the pop-export package"
        )
    manifest = _decode(content, Manifest, str(path))
    check_manifest(manifest, str(path))
    return manifest


def _is_chain(segments: tuple[Segment, ...]) -> bool:
    """Return whether in each stage the first segment alone reads no hidden states."""
    if any(stage not in ("prefill", "decode") for segment in segments for stage in segment.stages):
        return False
    chains = [[part.hidden_in is None for part in segments if stage in part.stages] for stage in ("prefill", "decode")]
    return not segments or all(reads_ids == [True] + [False] * (len(reads_ids) - 1) for reads_ids in chains)


def check_manifest(manifest: Manifest, place: str) -> None:
    """Check what types cannot say: value ranges, counts that must agree, and that every path stays inside the folder.

    Raises:
        ModelError: the first value that is wrong, after `place`.
    """
    plan, skipped = manifest.plan, manifest.plan.skipped_layers
    named = (manifest.prefill_graph, manifest.decode_graph, manifest.weights)
    optional = (manifest.tokenizer, manifest.tokenizer_config, manifest.chat_template, manifest.generation_config)
    segments = [segment.graph for segment in manifest.segments]
    unlisted = [name for name in (*named, *optional, *segments) if name is not None and name not in manifest.files]
    outside = [name for name in manifest.files if not _stays_inside(name)]
    patterns = (manifest.past_key, manifest.past_value, manifest.present_key, manifest.present_value)
    odd = [name for name in patterns if not _numbers_layers(name)]
    layers = [size for kv in manifest.kv_layers for size in dataclasses.astuple(kv)]
    rules: tuple[tuple[bool, str, str, object], ...] = (
        (not outside, "files", "paths inside the folder", outside),
        (not unlisted, "files", "every file the manifest names", f"no entry for {', '.join(unlisted)}"),
        (not odd, "past_key, present_key, ...", "names with {layer} once and no other brace", odd),
        (_is_chain(manifest.segments), "segments", "one that reads ids first in each stage", manifest.segments),
        (manifest.kv_dtype in KV_DTYPES, "kv_dtype", f"one of {', '.join(KV_DTYPES)}", manifest.kv_dtype),
        (manifest.dialect in DIALECTS, "dialect", f"one of {', '.join(DIALECTS)}", manifest.dialect),
        (len(manifest.kv_layers) == plan.num_layers, "kv_layers", f"{plan.num_layers} layers", len(manifest.kv_layers)),
        (plan.num_layers > 0 and min(layers, default=0) > 0, "kv_layers", "sizes of at least 1", manifest.kv_layers),
        (
            list(skipped) == sorted(set(skipped)) and all(0 <= layer < plan.num_layers for layer in skipped),
            "plan.skipped_layers",
            f"ascending layers of 0..{plan.num_layers - 1}",
            list(skipped),
        ),
        (
            manifest.windows.boundary_tokens >= 1,
            "windows.boundary_tokens",
            "at least 1",
            manifest.windows.boundary_tokens,
        ),
        (manifest.windows.sink_tokens >= 0, "windows.sink_tokens", "at least 0", manifest.windows.sink_tokens),
        (manifest.vocab_size >= 1, "vocab_size", "at least 1", manifest.vocab_size),
        (manifest.max_positions >= 2, "max_positions", "at least 2", manifest.max_positions),
    )
    for holds, key, expected, found in rules:
        if not holds:
            raise ModelError(f"{place}, {key}: expected {expected}, found {shown(found)}; re-run pop-export")


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Check size and sha256 of every file that the manifest lists.

    Raises:
        ModelError: the first file that is missing, of another size, altered or unreadable.
    """
    verify_entries(folder, manifest.files, MAKER)


def verify_entries(folder: Path, files: dict[str, FileEntry], maker: str) -> None:
    """Check size and sha256 of files, and name the command that makes them anew.

    Raises:
        ModelError: the first file that is missing, of another size, altered or unreadable.
    """
    for name, entry in files.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size if path.is_file() else None
        except OSError as error:  # a name that no file can have
            raise ModelError(f"{folder}, {shown(name)}: expected a file, found {error.strerror}") from error
        if num_bytes is None:
            raise ModelError(f"{path}: expected a file of {entry.bytes} bytes, found none; re-run {maker}")
        if num_bytes != entry.bytes:
            raise ModelError(f"{path}: expected {entry.bytes} bytes, found {num_bytes}; re-run {maker}")
        try:
            sha256 = sha256_of(path)
        except OSError as error:
            raise ModelError(f"{path}: expected a readable file, found {_one_line(error)}; check its rights") from error
        if sha256 != entry.sha256:
            raise ModelError(f"{path}: expected sha256 {entry.sha256}, found {sha256} (altered); re-run {maker}")


def _stays_inside(name: str) -> bool:
    """Return whether a name, read as a POSIX or a Windows path, is a relative path without `..`."""
    windows = PureWindowsPath(name)
    parts = PurePosixPath(name).parts
    return bool(parts) and not (name.startswith("/") or windows.anchor or ".." in parts or ".." in windows.parts)


def _numbers_layers(name: str) -> bool:
    """Return whether a name takes a layer's number, and `str.format` finds nothing else to do in it."""
    return name.count("{layer}") == 1 and not set(name.replace("{layer}", "")) & set("{}")


def _decode(value: Any, kind: Any, place: str) -> Any:
    """Return a JSON value as the annotated type `kind` of a dataclass field, `place` telling where it stands."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:  # only `X | None` occurs
        return None if value is None else _decode(value, arguments[0], place)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(_expect(value, dict, "an object", place), kind, place)
    if origin is dict:
        items = _expect(value, dict, "an object", place).items()
        return {key: _decode(item, arguments[1], f"{place}, {key}") for key, item in items}
    if origin is tuple:
        items = enumerate(_expect(value, list, "a list", place))
        return tuple(_decode(item, arguments[0], f"{place}[{index}]") for index, item in items)
    return _expect(value, kind, {int: "an integer", str: "a string"}[kind], place)


def _decode_fields(value: dict[str, Any], kind: Any, place: str) -> Any:
    """Return the dataclass `kind` with its fields taken from an object; only fields with a default may be missing."""
    hints = typing.get_type_hints(kind)
    found = {}
    for spec in dataclasses.fields(kind):
        if spec.name in value:
            found[spec.name] = _decode(value[spec.name], hints[spec.name], f"{place}, {spec.name}")
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise ModelError(f"{place}: expected the key {spec.name!r}, found none; re-run pop-export")
    return kind(**found)


def _expect(value: Any, kind: type, expected: str, place: str) -> Any:
    """Return `value` if it is of a JSON type; a boolean is no integer."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"{place}: expected {expected}, found {shown(value)}; re-run pop-export")
    return value


def _one_line(error: BaseException) -> str:
    """Return an error's text as one line."""
    return " ".join(str(error).split()) or type(error).__name__
