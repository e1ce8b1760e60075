"""Write a bundle: into a temporary sibling first, and under its name only when it is whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from pop_export.graph.fuse import Fusion, write_graph
from pop_export.graph.passes.quantize_embedding import SAME_BYTES
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import MANIFEST_NAME, Manifest, sha256_of

INLINE_BYTES = 1024  # smaller constants stay in the graph, where ONNX Runtime folds shapes with them
FULL_BYTES = 1 << 20  # a disk with less room is taken for full
ALIGNMENT_BYTES = 4096  # a page: each weight can be mapped by itself
PAGED_BYTES = 1 << 16  # smaller ones, as the scales of quantised weights, share pages: padding would be 1 % of a bundle


@dataclass(frozen=True)
class Bundle:
    """A finished export."""

    folder: Path
    manifest: Manifest
    report: dict[str, Any]  # what report.json holds


def check_target(out: Path, force: bool) -> None:
    """Refuse a target that would destroy something, before any work is done.

    Raises:
        UsageError: `out` is a file, a folder of something else, or a bundle and `force` is not given.
    """
    if out.is_file() or (out.is_symlink() and not out.exists()):
        raise UsageError(f"--out {out}: expected a folder to make, found a file; choose another name")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise UsageError(f"--out {out}: expected a bundle or nothing, found a folder with other files; choose another")
    if not force:
        raise UsageError(f"--out {out}: a bundle is already there; pass --force to replace it")


def check_space(out: Path, num_bytes: int) -> None:
    """Refuse a target whose disk cannot hold the weights, before the long part of the work.

    Args:
        out: the folder to make.
        num_bytes: the least that the bundle takes.

    Raises:
        ModelError: less is free.
    """
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ModelError(
            f"{out}: expected room for at least {num_bytes / 1e6:.1f} MB, found {free / 1e6:.1f} MB free; "
            "clear some, or choose another disk with --out"
        )


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty sibling of `out` to fill; it takes the name `out` if the block ends well, and else is removed.

    What an earlier run left behind when it was killed is removed first.

    Raises:
        ModelError: the disk is full or cannot be written.
    """
    out = out.absolute()
    staging = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        staging.mkdir()
        yield staging
        _replace(out, staging)
    except OSError as error:
        reason = "the disk is full" if _is_full(error, out.parent) else error.strerror or str(error)
        raise ModelError(f"{error.filename or out}: cannot write the bundle: {reason}; nothing was changed") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_full(error: OSError, folder: Path) -> bool:
    """Return whether a full disk is the cause; numpy's writes fail without a code."""
    return error.errno == errno.ENOSPC or (error.errno is None and shutil.disk_usage(folder).free < FULL_BYTES)


def _remove_leftovers(out: Path) -> None:
    for folder in out.parent.glob(f".{out.name}.partial-*"):
        pid = folder.name.rpartition("-")[2]
        if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _replace(out: Path, staging: Path) -> None:
    """Put `staging` in the place of `out`, whose old content is deleted only then."""
    if not out.exists():
        staging.rename(out)
        return
    target = out.resolve()  # a link to a bundle keeps pointing to the new one
    old = target.parent / f".{target.name}.partial-old-{os.getpid()}"
    target.rename(old)
    try:
        staging.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)


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
