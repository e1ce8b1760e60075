"""Add to a verified bundle the segments of its graphs, and prove that they compute what the two graphs do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pop_export.bundle import graph_name
from pop_export.graph.fuse import write_graph
from pop_export.graph.passes.exact_kernels import exact_kernels
from pop_export.graph.passes.multiply_dynamically import multiply_exactly
from pop_export.graph.segments import CutSegment, cut_segments
from pop_export.reference import PrefillPlan
from pop_export.verify import NUM_STEPS, Check, compare_logits
from pop_runtime.errors import ModelError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest, Segment, Windows
from pop_runtime.schedule import Stretch, plan_turn
from pop_runtime.sequence import Sequence as TokenSequence
from pop_runtime.sessions import SessionPair, open_graphs, open_segments

EXACT = "exact-"  # begins the names of files that are there for the proof alone


@dataclasses.dataclass(frozen=True)
class Segmented:
    """A bundle with segments, or why it has none."""

    manifest: Manifest
    checks: tuple[Check, ...]
    why_not: str | None = None


def add_segments(
    folder: Path,
    manifest: Manifest,
    graphs: tuple[ir.Model, ir.Model],
    plan: PrefillPlan,
    ids: Sequence[int],
    whole: SessionPair,
) -> Segmented:
    """Write the segments of a bundle's graphs beside them.

    Args:
        folder: of the bundle, verified.
        manifest: of the bundle.
        graphs: decode and prefill, not fused, their weights in the folder.
        plan: what prefill leaves out.
        ids: text to compare on, NUM_STEPS tokens of it as single steps.
        whole: sessions of both graphs.
    """
    try:
        segments = cut_segments(*graphs, plan)
    except (ModelError, ValueError) as problem:  # `extract` raises ValueError for a part that reads more than it should
        return Segmented(manifest, (), " ".join(str(problem).split()))
    written = dataclasses.replace(manifest, segments=_write(folder, segments))
    if not manifest.is_quantized:
        return Segmented(written, (_check(folder, written, ids, whole),))
    with _exact_copies(folder, manifest, graphs, plan) as exact:
        return Segmented(written, (_check(folder, exact, ids, open_graphs(folder, exact, whole.threads)),))


def segments_summary(segmented: Segmented) -> dict[str, Any]:
    """Return `segments` of report.json: the files, and how far what they compute is from the two graphs."""
    return {
        "graphs": [segment.graph for segment in segmented.manifest.segments],
        "checks": [{**dataclasses.asdict(check), "passed": check.passed} for check in segmented.checks],
        "why_not": segmented.why_not,
    }


def _write(folder: Path, segments: Sequence[CutSegment], prefix: str = "") -> tuple[Segment, ...]:
    for segment in segments:
        graph = segment.model.graph
        graph.name = graph_name(segment.file_name, segment.model, of=graph.name or "")  # that of the whole graph
        write_graph(segment.model, folder / (prefix + segment.file_name))
    return tuple(
        Segment(
            prefix + segment.file_name,
            segment.stages,
            segment.hidden_in,
            segment.hidden_out,
            segment.layers,
            segment.hidden_size,
        )
        for segment in segments
    )


@contextmanager
def _exact_copies(
    folder: Path, manifest: Manifest, graphs: tuple[ir.Model, ir.Model], plan: PrefillPlan
) -> Iterator[Manifest]:
    """Yield a bundle with exact kernels: fast ones round activations, so that the least difference grows."""
    copies = (graphs[0].clone(), graphs[1].clone())
    for copy in copies:
        exact_kernels(copy)
        multiply_exactly(copy)
    exact = dataclasses.replace(manifest, decode_graph=f"{EXACT}decode.onnx", prefill_graph=f"{EXACT}prefill.onnx")
    try:
        for copy, name in zip(copies, (exact.decode_graph, exact.prefill_graph), strict=True):
            write_graph(copy, folder / name)
        yield dataclasses.replace(exact, segments=_write(folder, cut_segments(*copies, plan), EXACT))
    finally:
        for path in folder.glob(f"{EXACT}*.onnx"):
            path.unlink()


def _check(folder: Path, manifest: Manifest, ids: Sequence[int], whole: SessionPair) -> Check:
    """Return how far the chains of segments are from the two graphs, over a pruned prompt, a full one and steps."""
    chained = open_segments(folder, manifest, whole.threads)
    found, wanted = (_logits(sessions, manifest, ids) for sessions in (chained, whole))
    return compare_logits("segments, against the two graphs", found, wanted, manifest.kv_dtype)


def _logits(sessions: SessionPair, manifest: Manifest, ids: Sequence[int]) -> np.ndarray:
    """Return the logits of stretches fed stage by stage, of a turn of both stages fed at once if possible, of steps."""
    num_prompt = len(ids) - NUM_STEPS
    quarter = num_prompt // 4
    chunks = [[Stretch(0, quarter, "prefill")], [Stretch(0, quarter, "decode")]] if quarter else []
    chunks.append(plan_turn(0, num_prompt - 2 * quarter, Windows(1, max(1, quarter)), num_prompt))
    chunks += [[Stretch(0, 1, "decode")]] * NUM_STEPS
    sequence = TokenSequence(sessions, allocate_cache(manifest, 1, len(ids)))
    rows = [
        sequence.feed_stretches(ids[sequence.num_cached : sequence.num_cached + chunk[-1].stop], chunk)
        for chunk in chunks
    ]
    return np.stack([row for row in rows if row is not None])
