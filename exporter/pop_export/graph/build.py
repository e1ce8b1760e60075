"""Build the decode graph: trace, then the passes that make it small and fast, in order."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxscript.optimizer
import onnxscript.rewriter
import torch
from onnxscript.rewriter.rules.common import mul_by_1_rule
from onnxscript.rewriter.rules.fusion import _rms_normalization, _rotary_embedding
from transformers import PreTrainedModel

from pop_export.config import Dialect
from pop_export.family import kv_layout
from pop_export.graph.attention_form import choose_attention
from pop_export.graph.fuse import WHY_ATTENTION_IS_NOT_FUSED
from pop_export.graph.passes.name_sizes import name_sizes
from pop_export.graph.passes.norms_of_one_type import norms_of_one_type
from pop_export.graph.passes.resolve_markers import resolve_markers
from pop_export.graph.passes.sort_topk import sort_topk
from pop_export.graph.passes.store_weights_as_read import store_weights_as_read
from pop_export.graph.trace import trace_decode_graph
from pop_export.interrupts import held_interrupts
from pop_export.quiet import deepest_line
from pop_runtime.errors import ModelError
from pop_runtime.manifest import KvLayer

__all__ = ["build_decode_graph", "kv_layout"]

WRAPPER_PREFIX = "model."  # trace.py holds the model under this attribute; checkpoint names come without it


def build_decode_graph(model: PreTrainedModel, kv_layers: tuple[KvLayer, ...], dialect: Dialect = "ort") -> ir.Model:
    """Return the full model as an ONNX graph over static KV buffers; its weights share memory with `model`."""
    form = choose_attention(model)
    try:
        with held_interrupts("tracing the model"):
            graph = trace_decode_graph(model, kv_layers, form, dialect)
    except ModelError:
        raise
    except Exception as error:  # torch.export and the converter raise any type for code that they cannot follow
        raise ModelError(
            f"{type(model).__name__}: its code cannot be traced into a graph ({deepest_line(error)}); "
            "this family is not supported"
        ) from error
    if not form.fused:
        graph.metadata_props[WHY_ATTENTION_IS_NOT_FUSED] = form.reason
    _hold_tensors(graph)
    name_sizes(graph)
    _name_weights_as_checkpoint(graph)
    store_weights_as_read(graph)
    _tidy(graph)
    resolve_markers(graph)
    _fuse(graph)
    common_passes.CommonSubexpressionEliminationPass()(graph)  # every rope gets its own cos and sin from the fusion
    common_passes.RemoveUnusedNodesPass()(graph)
    common_passes.TopologicalSortPass()(graph)
    if dialect == "standard":
        sort_topk(graph)
        _require_standard(graph)
    return graph


def _require_standard(graph: ir.Model) -> None:
    """Refuse a graph with operators that are not ONNX's own."""
    others = sorted({f"{node.domain}.{node.op_type}" for node in graph.graph if node.domain not in ("", "ai.onnx")})
    if others:
        raise ModelError(
            f"decode graph: expected ONNX operators alone (--dialect standard), found {', '.join(others)}; "
            "use --dialect ort"
        )


def _tidy(graph: ir.Model) -> None:
    """Fold constant shapes and merge what occurs twice.

    The same passes as onnxscript's `optimize_ir` but for its general rewrite rules, which take 20 s on 30 layers and
    find nothing in these graphs.
    """
    onnxscript.optimizer.fold_constants(graph)
    common_passes.RemoveUnusedNodesPass()(graph)
    common_passes.IdentityEliminationPass()(graph)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph)
    common_passes.DeduplicateInitializersPass()(graph)
    for node in graph.graph:
        node.metadata_props.clear()  # traces of the exporter's own source: two thirds of the file
        node.doc_string = None


def _fuse(graph: ir.Model) -> None:
    """Fuse norms and rotary embedding into opset-23 operators, where the family's code has the common form."""
    onnxscript.rewriter.RewriteRuleSet([mul_by_1_rule]).apply_to_model(graph)  # rope scaling by 1.0 hides the rope
    common_passes.IdentityEliminationPass()(graph)
    _rms_normalization.fuse_rms_normalization(graph)
    norms_of_one_type(graph)
    _rotary_embedding.fuse_rotary_embedding(graph)
    _rotary_embedding.fuse_partial_rotary_embedding(graph)


def _hold_tensors(graph: ir.Model) -> None:
    """Let the weights be the tensors they were traced with, whatever the model's parameters hold later."""
    for value in graph.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor):
            value.const_value = ir.tensor(raw.detach(), name=value.name)


def _name_weights_as_checkpoint(graph: ir.Model) -> None:
    for value in list(graph.graph.initializers.values()):
        if value.name and value.name.startswith(WRAPPER_PREFIX):
            value.name = value.name[len(WRAPPER_PREFIX) :]
