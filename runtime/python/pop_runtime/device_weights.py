"""Weights that both graphs read, once in a device's memory: uploaded here, and handed to both sessions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pop_runtime.errors import BackendError, ModelError
from pop_runtime.open_provider import onnxruntime
from pop_runtime.providers import Place

if TYPE_CHECKING:
    from onnx import TensorProto

Where = tuple[int, int, int, tuple[int, ...]]  # offset and length in the file, element type, shape


def upload_shared(graphs: Iterable[Path], weights: Path, place: Place) -> dict[str, onnxruntime.OrtValue]:
    """Return the weights that all graphs read, by the name of their initializer, in a device's memory.

    Each has to outlive the sessions that get it with `SessionOptions.add_initializer`.

    Args:
        graphs: files whose external data lies in `weights`.
        weights: the bundle's.
        place: whose memory to use.

    Raises:
        BackendError: the device refuses the memory; `onnx`, which reads the graphs, is missing.
        ModelError: a graph asks for bytes outside of `weights`.
    """
    tables = [_external(graph, weights) for graph in graphs]
    common = [name for name in tables[0] if all(table.get(name) == tables[0][name] for table in tables)]
    file = np.memmap(weights, np.uint8, "r")
    return {name: _uploaded(file, tables[0][name], place) for name in common}


def _external(graph: Path, weights: Path) -> Mapping[str, Where]:
    """Return where in the weights file each initializer of a graph lies."""
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise BackendError("onnx: expected the package, found none; pip install 'pop-export[gpu]'") from error
    found, size = {}, weights.stat().st_size
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        location, offset, length = place.get("location"), int(place.get("offset", 0)), int(place.get("length", -1))
        if location != weights.name or length != _num_bytes(tensor) or offset < 0 or offset + length > size:
            raise ModelError(
                f"{graph}, {tensor.name}: expected {_num_bytes(tensor)} bytes within {weights.name} ({size} bytes), "
                f"found {length} at {offset} of {location}; re-run pop-export"
            )
        found[tensor.name] = (offset, length, tensor.data_type, tuple(tensor.dims))
    return found


def _num_bytes(tensor: TensorProto) -> int:
    from onnx import helper

    return math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _uploaded(file: np.ndarray, where: Where, place: Place) -> Any:
    """Return a tensor on the device with these bytes of a file."""
    offset, length, kind, shape = where
    try:
        owner = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), kind, place.memory, place.device)
        bits = np.dtype(f"u{length // max(1, math.prod(shape))}")  # numpy has no bfloat16; only sizes are compared
        owner.update_inplace(np.frombuffer(file, bits, math.prod(shape), offset).reshape(shape))
    except Exception as error:  # ONNX Runtime's errors share no base but Exception
        raise BackendError(
            f"weights: expected {length} bytes on {place.memory} {place.device}, found {' '.join(str(error).split())}; "
            "free the device's memory, or export with a smaller --precision"
        ) from error
    return onnxruntime.OrtValue.from_dlpack(owner)  # sessions take only values that do not own their memory
