"""KV buffers and hidden states in a device's memory, cut into rows as a numpy array would be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pop_runtime.errors import BackendError
from pop_runtime.open_provider import onnxruntime
from pop_runtime.providers import Place


@dataclass(frozen=True)
class DeviceBuffer:
    """Rows of one K or V buffer, [B, H_kv, S_max, D], or of hidden states, outside of numpy's reach."""

    owner: onnxruntime.OrtValue  # keeps the memory alive
    pointer: int
    shape: tuple[int, ...]
    row_bytes: int

    def __getitem__(self, rows: slice) -> DeviceBuffer:
        start, stop, _ = rows.indices(self.shape[0])
        shape = (max(0, stop - start), *self.shape[1:])
        return DeviceBuffer(self.owner, self.pointer + start * self.row_bytes, shape, self.row_bytes)


Buffer = np.ndarray | DeviceBuffer


def zeros(shape: tuple[int, ...], dtype: type[np.generic], place: Place) -> Buffer:
    """Return a buffer full of zeros, so that no stray NaN can reach an attention kernel.

    In the computer's own memory it is an array, whose pages the system hands out only when they are written.

    Raises:
        BackendError: the device refuses the memory.
        MemoryError: the system does.
    """
    if place.memory == "cpu":
        return np.zeros(shape, dtype)
    return to_device(np.zeros(shape, dtype), place)


def to_device(values: np.ndarray, place: Place) -> DeviceBuffer:
    """Return a copy of an array in a device's memory.

    Raises:
        BackendError: the device refuses the memory.
    """
    try:
        owner = onnxruntime.OrtValue.ortvalue_from_numpy(values, place.memory, place.device)
    except Exception as error:  # ONNX Runtime's errors share no base but Exception
        found = " ".join(str(error).split())
        raise BackendError(
            f"buffers: expected {values.nbytes} bytes on {place.memory} {place.device}, found {found}; "
            "ask for fewer tokens"
        ) from error
    return DeviceBuffer(owner, owner.data_ptr(), values.shape, values.nbytes // values.shape[0])


def address(buffer: Buffer) -> int:
    """Return where a buffer's first number lies."""
    return buffer.pointer if isinstance(buffer, DeviceBuffer) else int(buffer.ctypes.data)


def where(buffer: Buffer, onnx_type: int, place: Place) -> tuple[str, int, int, list[int], int]:
    """Return what `IOBinding.bind_input` and `bind_output` want after the name; the caller keeps the buffer alive.

    Args:
        buffer: without gaps.
        onnx_type: of its numbers, a TensorProto.DataType.
        place: where it lies.
    """
    return place.memory, place.device, onnx_type, list(buffer.shape), address(buffer)


def write(buffer: Buffer, values: np.ndarray) -> None:
    """Put values of the buffer's shape and type into it; it stays where it is."""
    if isinstance(buffer, DeviceBuffer):
        buffer.owner.update_inplace(np.ascontiguousarray(values))
    else:
        buffer[:] = values


def read(buffer: Buffer) -> np.ndarray:
    """Return what is in a buffer: a copy of a device's memory, the array itself in the computer's own."""
    return buffer.owner.numpy() if isinstance(buffer, DeviceBuffer) else buffer


def copy_positions(target: dict[str, Buffer], source: dict[str, Buffer], num_positions: int, place: Place) -> None:
    """Copy the first positions of every buffer; between device buffers by way of the computer's own memory."""
    for name, buffer in source.items():
        if isinstance(buffer, np.ndarray):
            room = target[name]
            assert isinstance(room, np.ndarray)
            room[:, :, :num_positions] = buffer[:, :, :num_positions]
        else:
            old = buffer.owner.numpy()
            grown = np.zeros(target[name].shape, old.dtype)
            grown[:, :, :num_positions] = old[:, :, :num_positions]
            target[name] = to_device(grown, place)
