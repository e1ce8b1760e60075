"""Markers: operators that name a value of the traced graph and are taken out again by `passes/resolve_markers.py`."""

from __future__ import annotations

from torch import Tensor
from torch.onnx.ops import symbolic

MARKER = "Marker"  # op type, in domain "pop"


def mark(value: Tensor, name: str) -> Tensor:
    """Return `value` with the marker `name` on it."""
    return symbolic(f"pop::{MARKER}", (value,), attrs={"name": name}, dtype=value.dtype, shape=value.shape, version=1)
