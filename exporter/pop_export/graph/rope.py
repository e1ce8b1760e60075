"""Rotary embeddings whose frequencies depend on the sequence's length, as a graph can hold them.

`longrope` and `dynamic` change all frequencies once a sequence outgrows its original length, so K that is cached
already would be wrong. The graph keeps those of the original length, and `decoder.max_positions_of` ends there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

LENGTH_DEPENDENT = ("longrope", "dynamic")


@contextmanager
def frozen_rope(model: PreTrainedModel) -> Iterator[None]:
    """Keep every rotary embedding at its original frequencies while the context is open."""
    with ExitStack() as stack:
        for module in model.modules():
            types = getattr(module, "rope_type", None)
            if any(name in LENGTH_DEPENDENT for name in (types.values() if isinstance(types, dict) else (types,))):
                stack.enter_context(_plain_forward(module))
        yield


@contextmanager
def _plain_forward(module: Any) -> Iterator[None]:
    """Take the decorator that updates the frequencies off the module's forward."""
    buffers = dict(module.named_buffers(recurse=False))
    for name in buffers:
        original = buffers.get(name.replace("inv_freq", "original_inv_freq"))
        if name.endswith("inv_freq") and "original" not in name and original is not None:
            buffers[name].copy_(original)  # an earlier, longer sequence may have changed it
    assert isinstance(module, nn.Module)
    module.forward = MethodType(inspect.unwrap(type(module).forward), module)
    try:
        yield
    finally:
        del module.forward
