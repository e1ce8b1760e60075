"""Fuse what a finished graph still has in pieces, for ONNX Runtime: the last thing before a graph is written.

Cutting, re-fitting and quantising find their places by projections and marked hidden states, some of which fused
operators hide. So a graph stays in pieces as long as it is worked on, and `write_graph` fuses a copy of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from pop_export.graph.passes.flatten_heads import flatten_heads
from pop_export.graph.passes.fuse_residual_norms import fuse_residual_norms
from pop_export.graph.passes.pack_projections import pack_projections
from pop_export.graph.passes.rotate_in_attention import rotate_in_attention
from pop_export.graph.passes.round_by_row import round_by_row
from pop_export.graph.rope_tables import attach_rope_tables

ORT_DOMAIN = "com.microsoft"
WHY_ATTENTION_IS_NOT_FUSED = "pop.attention_not_fused"  # metadata of a graph, from `attention_form.py`


@dataclass(frozen=True)
class Fusion:
    """What was fused in one graph and what was not, as report.json has it."""

    num_nodes: int  # of the graph as it is written
    num_flat_heads: int  # inputs and outputs of attention that need no reshape and transpose any more
    num_rotating: int  # attention nodes that rotate Q and K themselves
    num_residual_norms: int  # additions to the residual stream fused with the norm that follows
    not_fused: tuple[str, ...]  # what is in pieces still, and why where that is known


def prepare_attention(decode: ir.Model, prefill: ir.Model, max_positions: int) -> None:
    """Give both graphs the constants that fused attention reads, while their weights are still to be written.

    They can be cut and written as before: what uses the constants comes in `write_graph`.
    """
    if ORT_DOMAIN in decode.opset_imports and attach_rope_tables(decode, prefill, max_positions):
        pack_projections(decode, prefill)


def write_graph(model: ir.Model, path: Path) -> Fusion:
    """Write a fused copy of a graph whose weights are in a file beside `path`.

    A graph without any of ONNX Runtime's own operators is written as it is: it is meant for other runtimes too.
    """
    written = model.clone()
    num_flat_heads = num_rotating = num_residual_norms = 0
    if ORT_DOMAIN in model.opset_imports:
        round_by_row(written)
        num_flat_heads = flatten_heads(written)
        num_rotating = rotate_in_attention(written)
        num_residual_norms = fuse_residual_norms(written)
        common_passes.RemoveUnusedNodesPass()(written)
        common_passes.TopologicalSortPass()(written)
    ir.save(written, path)
    left = tuple(_left_in_pieces(written))
    return Fusion(len(written.graph), num_flat_heads, num_rotating, num_residual_norms, left)


def _left_in_pieces(model: ir.Model) -> list[str]:
    """Return what a written graph does with several operators where ONNX Runtime has one."""
    kinds = Counter(node.op_type for node in model.graph)
    left = []
    if WHY_ATTENTION_IS_NOT_FUSED in model.metadata_props:
        left.append(f"attention: {model.metadata_props[WHY_ATTENTION_IS_NOT_FUSED]}")
    if kinds["Cos"] and not kinds["RotaryEmbedding"]:
        left.append("rotary embedding: it has another form than halves or pairs of a head's numbers")
    attention = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    num_reshaped = sum(_producer_kind(value) == "Reshape" for node in attention for value in node.inputs[:3])
    if num_reshaped:
        left.append(f"heads: {num_reshaped} of {3 * len(attention)} inputs of attention are reshaped")
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    num_added = sum(_producer_kind(node.inputs[0]) == "Add" for node in norms)
    if num_added:
        left.append(f"norms: {num_added} follow an addition and are apart from it")
    if kinds["ReduceMean"]:
        left.append(f"norms: {kinds['ReduceMean']} means are taken by themselves")
    return left


def _producer_kind(value: ir.Value | None) -> str | None:
    node = value.producer() if value is not None else None
    return None if node is None else node.op_type
