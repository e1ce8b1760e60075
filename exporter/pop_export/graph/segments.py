"""Cut both graphs into segments, so that a runtime can hold what they share once: the kept layers.

ONNX Runtime repacks the weights of every session. Two whole graphs therefore cost nearly two copies of the kept layers.
Segments end where runs of kept and of skipped layers meet: a run of kept layers is one segment of both stages, a run of
skipped ones has a small segment for prefill (K, V and surrogates) and its own full one for decode. Hidden states are
handed from each segment to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import onnx_ir as ir

from pop_export.graph.cut import PASSED_ON
from pop_export.graph.passes.multiply_dynamically import OP_TYPE as DYNAMIC
from pop_export.graph.passes.resolve_markers import marked_value
from pop_export.reference import PrefillPlan
from pop_runtime.errors import ModelError
from pop_runtime.schedule import Stage

FILE_NAME = "segment-{index}-{kind}.onnx"


@dataclass(frozen=True)
class CutSegment:
    """One segment as a graph of its own; its weights are those of the graph it was cut from."""

    file_name: str
    stages: tuple[Stage, ...]
    hidden_in: str | None  # None: it reads `input_ids`
    hidden_out: str | None  # None: it leaves the hidden states as they are, or gives logits
    layers: tuple[int, ...]  # whose buffers it reads and writes
    hidden_size: int
    model: ir.Model


def cut_segments(decode: ir.Model, prefill: ir.Model, plan: PrefillPlan) -> list[CutSegment]:
    """Return the segments in the order in which they run; a stage leaves those of the other out.

    Args:
        decode: the full graph, not fused.
        prefill: cut from it by `plan`, not fused.
        plan: what prefill leaves out.

    Raises:
        ModelError: a layer reads more of earlier ones than their hidden states.
    """
    num_layers = sum(value.name.startswith("past_key_values.") for value in decode.graph.inputs if value.name) // 2
    written = plan.skipped_layers | {num_layers - 1}  # nothing reads what the last layer would leave of a prompt
    segments: list[CutSegment] = []
    for index, (is_cut, run) in enumerate(groupby(range(num_layers), written.__contains__)):
        layers = list(run)
        start, stop = layers[0], layers[-1] + 1
        is_first, is_last = start == 0, stop == num_layers
        full_in = None if is_first else _border(decode, None, start)
        full_out = None if is_last else _border(decode, None, stop)
        if not is_cut:
            segments.append(_segment(decode, index, "kept", ("prefill", "decode"), layers, full_in, full_out))
            continue
        cut_in = None if is_first else _border(prefill, plan, start)
        cut_out = None if is_last else _border(prefill, plan, stop)
        if cut_out is cut_in:
            cut_out = None
        segments.append(_segment(prefill, index, "skipped", ("prefill",), layers, cut_in, cut_out))
        segments.append(_segment(decode, index, "full", ("decode",), layers, full_in, full_out))
    _require_disjoint(segments)
    return segments


def _border(model: ir.Model, plan: PrefillPlan | None, layer: int) -> ir.Value:
    """Return the hidden states that enter a layer: of the full graph without a plan, else of the pruned one."""
    before = layer - 1
    if before < 0:
        return marked_value(model, "layers.0.input")
    if plan is None or before not in plan.skipped_layers:
        return marked_value(model, f"layers.{before}.output")
    if before not in plan.surrogates:
        return _border(model, plan, before)
    name = PASSED_ON.format(layer=before)
    return next(value for node in model.graph for value in node.outputs if value.name == name)


def _segment(
    model: ir.Model,
    index: int,
    kind: str,
    stages: tuple[Stage, ...],
    layers: Sequence[int],
    hidden_in: ir.Value | None,
    hidden_out: ir.Value | None,
) -> CutSegment:
    """Return the part of a graph between two borders."""
    parts = [f"{layer}.{part}" for layer in layers for part in ("key", "value")]
    results = {value.name: value for value in model.graph.outputs}
    outputs = [results[f"present.{part}"] for part in parts]
    if hidden_out is not None:
        outputs.append(hidden_out)
    elif "decode" in stages:
        outputs.append(results["logits"])
    inputs = [*([hidden_in] if hidden_in is not None else []), *model.graph.inputs]
    graph = ir.convenience.extract(model.graph, inputs, outputs)
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
    for name, value in model.graph.initializers.items():  # tables that nothing reads until a graph is written
        if name not in graph.initializers and not value.uses():
            graph.register_initializer(ir.val(name, const_value=value.const_value))
    part = ir.Model(graph, ir_version=model.ir_version, metadata_props=dict(model.metadata_props))
    names = [value.name if value is not None else None for value in (hidden_in, hidden_out)]
    hidden = hidden_in if hidden_in is not None else hidden_out
    size = 0 if hidden is None else int(hidden.shape[-1])  # type: ignore[index, arg-type]
    return CutSegment(FILE_NAME.format(index=index, kind=kind), stages, names[0], names[1], tuple(layers), size, part)


def _require_disjoint(segments: list[CutSegment]) -> None:
    """Refuse segments of one stage that multiply by a weight twice: a layer then reads more than hidden states."""
    for stage in ("prefill", "decode"):
        seen: dict[str, str] = {}
        for segment in segments:
            for name in sorted(_weights(segment.model)) if stage in segment.stages else ():
                if name in seen:
                    raise ModelError(
                        f"{segment.file_name}: expected {name} in one segment of {stage}, found it in {seen[name]} too"
                    )
                seen[name] = segment.file_name


def _weights(model: ir.Model) -> set[str]:
    """Return the names of the weights that a graph multiplies by."""
    values = (node.inputs[1] for node in model.graph if node.op_type in ("MatMul", "Gemm", "MatMulNBits", DYNAMIC))
    return {value.name for value in values if value is not None and value.is_initializer() and value.name}
