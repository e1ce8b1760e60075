"""Whether graphs are those of the manifest: their inputs and outputs, and what segments hand to one another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pop_runtime.chain import ChainedSession
from pop_runtime.errors import ModelError
from pop_runtime.manifest import Manifest

if TYPE_CHECKING:
    import onnxruntime

ORT_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}


def check_graph(
    session: onnxruntime.InferenceSession | ChainedSession, manifest: Manifest, place: str, has_logits: bool
) -> None:
    """Check that a graph has the inputs and outputs which the manifest promises, with the right types and sizes.

    Raises:
        ModelError: the first that is missing, or has another type or size.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = {value.name: value for value in session.get_outputs()}
    for name in (manifest.input_ids, manifest.attention_mask):
        _check_value(inputs, name, ("tensor(int64)",), (None, None), place)
    for layer, kv in enumerate(manifest.kv_layers):
        key, value = (None, kv.num_heads, None, kv.key_head_size), (None, kv.num_heads, None, kv.value_head_size)
        kind = (ORT_TYPES[manifest.kv_dtype],)
        _check_value(inputs, manifest.past_key.format(layer=layer), kind, key, place)
        _check_value(inputs, manifest.past_value.format(layer=layer), kind, value, place)
        _check_value(outputs, manifest.present_key.format(layer=layer), kind, key, place)
        _check_value(outputs, manifest.present_value.format(layer=layer), kind, value, place)
    if has_logits:
        _check_value(outputs, manifest.logits, tuple(ORT_TYPES.values()), (None, None, manifest.vocab_size), place)


def check_hidden_states(session: onnxruntime.InferenceSession | ChainedSession, folder: Path) -> None:
    """Check that each link of a chain reads the hidden states, [B, S, E], that one before it makes.

    Raises:
        ModelError: the first value that is missing, or has another type or size.
    """
    made: onnxruntime.NodeArg | None = None
    for link in session.links if isinstance(session, ChainedSession) else ():
        place = str(folder / link.graph)
        if link.hidden_in is not None:
            kinds, size = (tuple(ORT_TYPES.values()), None) if made is None else ((made.type,), made.shape[2])
            inputs = {value.name: value for value in link.session.get_inputs()}
            source = "the segment before" if made is not None else "manifest.json"
            _check_value(inputs, link.hidden_in, kinds, (None, None, size), place, source)
            if made is None:
                raise ModelError(
                    f"{place}, {link.hidden_in}: expected hidden states of the segment before, found none; "
                    "re-run pop-export"
                )
        if link.hidden_out is None:
            continue
        outputs = {value.name: value for value in link.session.get_outputs()}
        _check_value(outputs, link.hidden_out, tuple(ORT_TYPES.values()), (None, None, None), place)
        made = outputs[link.hidden_out]
        if not isinstance(made.shape[2], int) or made.shape[2] < 1:
            raise ModelError(
                f"{place}, {link.hidden_out}: expected hidden states of a fixed size, found {made.shape}; "
                "re-run pop-export"
            )


def _check_value(
    values: Mapping[str, onnxruntime.NodeArg],
    name: str,
    kinds: tuple[str, ...],
    shape: tuple[int | None, ...],
    place: str,
    source: str = "manifest.json",
) -> None:
    """Check one graph input or output; None in `shape` is any size, and a size the graph leaves open is accepted."""
    if name not in values:
        raise ModelError(f"{place}: expected the value {name!r} (manifest.json), found none; re-run pop-export")
    value = values[name]
    if value.type not in kinds:
        expected = " or ".join(kinds)
        raise ModelError(f"{place}, {name}: expected {expected} ({source}), found {value.type}; re-run pop-export")
    agrees = len(value.shape) == len(shape) and all(
        wanted is None or not isinstance(found, int) or found == wanted
        for wanted, found in zip(shape, value.shape, strict=True)
    )
    if not agrees:
        raise ModelError(
            f"{place}, {name}: expected shape {list(shape)} ({source}), found {value.shape}; re-run pop-export"
        )
