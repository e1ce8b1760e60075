"""Translate a traced forward into ONNX, without torch's decomposition where nothing needs it.

Decomposing runs the whole program twice more under fake tensors: two thirds of an export's time. Most families' code
traces to operators that all have a translation, but for conversions of type, which are replaced here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pop_export.graph.type_promotion import promotion_where_needed

OPSET = 24
_ATEN = torch.ops.aten
_CONVERSIONS = (_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.to.device, _ATEN.to.other, _ATEN.type_as.default)


def translate(program: ExportedProgram, input_names: list[str], output_names: list[str]) -> ir.Model:
    """Return a traced program as an ONNX graph; changes the program's conversions of type."""

    def export() -> ir.Model:
        with promotion_where_needed(program.graph_module):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                input_names=input_names,
                output_names=output_names,
            )
        assert exported is not None
        return exported.model

    with quiet_tracing():
        _replace_conversions(program.graph_module)
        if _replace_in_place(program.graph_module):
            program.run_decompositions = lambda *_, **__: program
            try:
                return export()
            except torch.onnx.OnnxExporterError:  # an operator has no translation: decompose after all
                del program.run_decompositions
        return export()


def _replace_in_place(module: GraphModule) -> bool:
    """Give operators that change their input their plain form; return whether none is left that does.

    Only where the input is nobody's view and has no view: then its later readers simply read the new value.
    """
    is_functional = True
    for node in list(module.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        packet = getattr(_ATEN, node.target.overloadpacket.__name__.removesuffix("_"), None)
        plain = getattr(packet, node.target._overloadname, None)
        changed = node.args[0]
        if (
            plain is None
            or plain._schema.is_mutable
            or _returns_view(changed)
            or any(map(_returns_view, changed.users))
        ):
            is_functional = False
            continue
        node.target = plain
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, writer=node: user > writer)
    module.recompile()
    return is_functional


def _returns_view(node: Node) -> bool:
    """Return whether a value shares memory with another; an operator that changes its own input does not count."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return node.op != "call_function"
    return not schema.is_mutable and any(value.alias_info is not None for value in schema.returns)


def _replace_conversions(module: GraphModule) -> None:
    """Take conversions to the type a value has already out, and turn the others into the form with a translation."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in _CONVERSIONS:
            continue
        source, dtype = node.args[0], node.meta["val"].dtype
        replacement: Any = source
        if not isinstance(source, Node) or source.meta["val"].dtype != dtype:
            with module.graph.inserting_before(node):
                replacement = module.graph.call_function(_ATEN._to_copy.default, (source,), {"dtype": dtype})
            replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        module.graph.erase_node(node)
    module.recompile()


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Keep torch's and onnxscript's chatter about tracing off the user's terminal."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
