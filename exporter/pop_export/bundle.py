"""Where a bundle may be written, and its graphs over one file of weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from pop_export.graph.fuse import Fusion, write_graph
from pop_export.graph.passes.quantize_embedding import SAME_BYTES
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import FORMAT, MANIFEST_NAME, Manifest, sha256_of
from pop_runtime.staging import existing_parent, scratch_folder

INLINE_BYTES = 1024  # smaller constants stay in the graph, where ONNX Runtime folds shapes with them
ALIGNMENT_BYTES = 4096  # a page: each weight can be mapped by itself
PAGED_BYTES = 1 << 16  # smaller ones, as the scales of quantised weights, share pages: padding would be 1 % of a bundle


@dataclass(frozen=True)
class Bundle:
    """A finished export."""

    folder: Path
    manifest: Manifest
    report: dict[str, Any]  # what report.json holds


def check_target(out: Path, force: bool) -> None:
    """Refuse a target that would destroy something or cannot be written, before any work is done.

    Raises:
        UsageError: `out` is a file, a folder of something else, or a bundle and `force` is not given; or it cannot be
            made.
    """
    try:
        _refuse_other_content(out, force)
        if os.path.ismount(out):  # it could not be renamed in the end
            raise UsageError(
                f"--out {out}: expected a folder that can be replaced, found a mount point; name one in it"
            )
        with scratch_folder(out):
            pass  # its place can be written, and its name is not too long
    except OSError as error:
        found = f"{error.strerror} ({error.filename})"
        raise UsageError(f"--out {out}: expected a folder that can be made, found {found}; choose another") from error


def _refuse_other_content(out: Path, force: bool) -> None:
    """Raise UsageError unless there is nothing in the way of a bundle, or `force` and a bundle that it may replace."""
    if out.is_file() or (out.is_symlink() and not out.exists()):
        raise UsageError(f"--out {out}: expected a folder to make, found a file; choose another name")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not _is_bundle(out):
        raise UsageError(f"--out {out}: expected a bundle or nothing, found a folder with other files; choose another")
    if not force:
        raise UsageError(f"--out {out}: a bundle is already there; pass --force to replace it")


def _is_bundle(folder: Path) -> bool:
    """Return whether a folder holds a manifest of ours, of whatever version: other programs have files of that name."""
    try:
        content = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def check_space(out: Path, num_bytes: int) -> None:
    """Refuse a target whose disk cannot hold the weights, before the long part of the work.

    Args:
        out: the folder to make.
        num_bytes: the least that the bundle takes.

    Raises:
        ModelError: less is free.
    """
    free = shutil.disk_usage(existing_parent(out)).free
    if free < num_bytes:
        raise ModelError(
            f"{out}: expected room for at least {num_bytes / 1e6:.1f} MB, found {free / 1e6:.1f} MB free; "
            "clear some, or choose another disk with --out"
        )


def save_graphs(folder: Path, graphs: dict[str, ir.Model], weights: str) -> dict[str, Fusion]:
    """Write several graphs, fused, over one file of weights; a weight of the same name is written once.

    So is one whose metadata says that it reads the bytes of another in a different shape (`SAME_BYTES`).

    Args:
        folder: where.
        graphs: by file name; changed in place: their weights point to the file afterwards.
        weights: file name of the weights.

    Returns:
        By file name, what was fused.
    """
    shared: dict[str, ir.TensorProtocol] = {}
    for model in graphs.values():
        for value in sorted(model.graph.initializers.values(), key=_place):
            assert value.const_value is not None
            if value.const_value.nbytes > INLINE_BYTES:
                shared.setdefault(_stored_as(value), value.const_value)
    external = dict(zip(shared, _written(list(shared.values()), folder, weights), strict=True))
    weights_sha256, fusions = sha256_of(folder / weights), {}
    for file_name, model in graphs.items():
        for value in model.graph.initializers.values():
            if _stored_as(value) in external:
                value.const_value = _view(external[_stored_as(value)], value)
        model.graph.name = graph_name(file_name, model, weights_sha256)
        fusions[file_name] = write_graph(model, folder / file_name)
    return fusions


def _place(value: ir.Value) -> tuple[bool, int]:
    """Return what orders weights in the file: those with pages of their own first, then the widest numbers."""
    assert value.const_value is not None
    return value.const_value.nbytes <= PAGED_BYTES, -int(value.const_value.dtype.itemsize)


def _written(tensors: list[ir.TensorProtocol], folder: Path, name: str) -> list[ir.ExternalTensor]:
    """Return tensors as they lie in a new file, each at a multiple of the size of its numbers."""
    for threshold in (PAGED_BYTES, INLINE_BYTES):
        written = ir.external_data.convert_tensors_to_external(
            tensors, folder, name, alignment=ALIGNMENT_BYTES, align_threshold=threshold
        )
        if not any((tensor.offset or 0) % tensor.dtype.itemsize for tensor in written):
            break
    return written


def graph_name(file_name: str, model: ir.Model, of: str) -> str:
    """Return a name that no other graph has: engine caches of execution providers tell graphs apart by it alone.

    Args:
        file_name: of the graph; its stem begins the name.
        model: the graph; its own name is set to that stem.
        of: what tells it from an equal graph over other weights.
    """
    model.graph.name = Path(file_name).stem
    content = ir.to_proto(model).SerializeToString(deterministic=True) + of.encode()
    return f"{Path(file_name).stem}-{hashlib.sha256(content).hexdigest()[:16]}"


def _stored_as(value: ir.Value) -> str:
    """Return the name of the weight whose bytes a weight reads."""
    assert value.name is not None
    return value.metadata_props.get(SAME_BYTES, value.name)


def _view(stored: ir.TensorProtocol, value: ir.Value) -> ir.ExternalTensor:
    """Return the stored bytes as the tensor `value` is."""
    assert isinstance(stored, ir.ExternalTensor) and value.const_value is not None and value.name is not None
    assert stored.nbytes == value.const_value.nbytes
    return ir.ExternalTensor(
        stored.location,
        stored.offset,
        stored.length,
        value.const_value.dtype,
        shape=ir.Shape(value.const_value.shape.numpy()),
        name=value.name,
        base_dir=stored.base_dir,
    )
