"""Prove a bundle before it is handed out: what its graphs compute against plain PyTorch, whole and in uneven pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from pop_export.decoder import largest_attention_window, max_positions_of
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.fuse import write_graph
from pop_export.graph.passes.exact_kernels import exact_kernels
from pop_export.graph.passes.multiply_dynamically import multiply_exactly
from pop_export.reference import PrefillPlan, Reference
from pop_runtime import sequence as runtime_sequence
from pop_runtime.errors import GateError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.schedule import Stage, Stretch
from pop_runtime.sessions import PREFILL_ENTRIES, SessionPair, open_graphs, open_session

NUM_STEPS = 8  # single tokens fed after the prompt
MIN_PROMPT_TOKENS = 96
MAX_PROMPT_TOKENS = 1100  # eager attention needs H * S * S floats a layer
# Largest logit difference over the largest logit, by what the graph computes in:
# - fp32 leaves 1e-5 to 1e-4 between two orders of summation;
# - fp16 keeps 11 bits of every activation and of K and V, fp32 of the twin all 24;
# - fast kernels for quantised weights keep 7 bits of the activations, on which random models lose up to 0.3 and trained
#   ones a tenth of that. This only catches a broken kernel: what is stored is proven at 1e-3, with exact kernels.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8 activations": 0.5}


@dataclass(frozen=True)
class Check:
    """One comparison: the largest absolute difference over the logits of the prompt's last token and of the steps."""

    name: str
    largest_difference: float
    largest_logit: float
    tolerance: float  # times largest_logit
    arithmetic: str = "float32"  # what the graphs computed in, a key of TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether the difference is a number and within tolerance."""
        return bool(self.largest_difference <= self.tolerance * self.largest_logit)


@dataclass(frozen=True)
class Verification:
    """All comparisons of one bundle."""

    num_prompt_tokens: int
    num_steps: int
    checks: tuple[Check, ...]


def prompt_length(model: PreTrainedModel) -> int:
    """Return how many prompt tokens to verify with: beyond the attention window where there is one, if affordable."""
    window = largest_attention_window(model)
    wanted = max(MIN_PROMPT_TOKENS, int(1.37 * window) if window <= MAX_PROMPT_TOKENS / 1.37 else 0)
    return max(3, min(wanted, max_positions_of(model) - NUM_STEPS))


def uneven_pieces(num_tokens: int, stage: Stage) -> list[Stretch]:
    """Return the tokens as uneven stretches of one stage: one of a single token among them if there are enough."""
    cuts = [0, num_tokens * 13 // 40, num_tokens * 13 // 40 + 1, num_tokens]
    bounds = sorted({min(cut, num_tokens) for cut in cuts})
    return [Stretch(start, stop, stage) for start, stop in pairwise(bounds)]


def verify(
    sessions: SessionPair,
    manifest: Manifest,
    model: PreTrainedModel,
    plan: PrefillPlan,
    ids: Sequence[int],
    arithmetic: str | None = None,
) -> Verification:
    """Return the comparisons of a bundle's two graphs with PyTorch.

    Args:
        sessions: of both graphs.
        manifest: of the bundle.
        model: what it was exported from.
        plan: what its prefill graph leaves out.
        ids: text to verify on, `prompt_length(model)` + NUM_STEPS tokens.
        arithmetic: what the graphs compute in, a key of TOLERANCE; None: in the type of the KV buffers.
    """
    arithmetic = arithmetic or manifest.kv_dtype
    num_prompt = len(ids) - NUM_STEPS
    last = [Stretch(num_prompt - 1, num_prompt, "decode")]
    steps = [Stretch(at, at + 1, "decode") for at in range(num_prompt, len(ids))]
    schedules: dict[str, tuple[list[Stretch], bool]] = {
        "decode graph, prompt whole": ([Stretch(0, num_prompt, "decode")], False),
        "decode graph, prompt in uneven pieces": (uneven_pieces(num_prompt, "decode"), False),
        "pair, prompt whole": ([Stretch(0, num_prompt - 1, "prefill"), *last], True),
        "pair, prompt in uneven pieces": ([*uneven_pieces(num_prompt - 1, "prefill"), *last], True),
    }
    full = _reference_logits(model, plan, ids, [Stretch(0, num_prompt, "decode"), *steps])
    pair = _reference_logits(model, plan, ids, [Stretch(0, num_prompt - 1, "prefill"), *last, *steps])
    checks = []
    for name, (stretches, is_pair) in schedules.items():
        sequence = runtime_sequence.Sequence(sessions, allocate_cache(manifest, 1, len(ids)))
        found = bundle_logits(sequence, ids, [*stretches, *steps])
        checks.append(compare_logits(name, found, pair if is_pair else full, arithmetic))
    return Verification(num_prompt, len(steps), tuple(checks))


def verify_last_layer(
    folder: Path,
    sessions: SessionPair,
    manifest: Manifest,
    decode: ir.Model,
    model: PreTrainedModel,
    ids: Sequence[int],
) -> Check:
    """Return how far a prefill that skips only the last layer is from the full model: nothing should be lost.

    Nothing reads what the last layer leaves at prompt positions, so this holds for any model; it tests the cutting,
    the cache and the hand-over between the graphs, whatever the plan is.

    Args:
        folder: holds the graphs and the weights.
        sessions: of both graphs.
        manifest: of the bundle.
        decode: the decode graph, whose weights are in the folder.
        model: as for `verify`.
        ids: as for `verify`.
    """
    last_layer = len(manifest.kv_layers) - 1
    name = "last-layer-check.onnx"
    write_graph(cut_prefill_graph(decode, PrefillPlan(frozenset({last_layer}))), folder / name)
    try:
        prefill = open_session(folder / name, sessions.threads, PREFILL_ENTRIES)
    finally:
        (folder / name).unlink()
    num_prompt = len(ids) - NUM_STEPS
    steps = [Stretch(at, at + 1, "decode") for at in range(num_prompt, len(ids))]
    pruned_prompt = [Stretch(0, num_prompt - 1, "prefill"), Stretch(num_prompt - 1, num_prompt, "decode")]
    full = _reference_logits(model, PrefillPlan(frozenset()), ids, [Stretch(0, num_prompt, "decode"), *steps])
    pair = dataclasses.replace(sessions, prefill=prefill)
    sequence = runtime_sequence.Sequence(pair, allocate_cache(manifest, 1, len(ids)))
    found = bundle_logits(sequence, ids, [*pruned_prompt, *steps])
    return compare_logits("only the last layer skipped, against the full model", found, full, manifest.kv_dtype)


def verify_quantized(
    folder: Path,
    sessions: SessionPair,
    manifest: Manifest,
    graphs: tuple[ir.Model, ir.Model],
    model: PreTrainedModel,
    plan: PrefillPlan,
    ids: Sequence[int],
) -> tuple[Verification, Check]:
    """Return the comparisons of a quantised bundle, and that with only the last layer skipped.

    Copies of its graphs whose kernels are exact have to equal PyTorch as fp32 does, so that a wrong layout of the
    weights cannot pass; then its own fast kernels have to agree as far as they can.

    Args:
        folder: holds the graphs and the weights.
        sessions: as in `verify`.
        manifest: as in `verify`.
        graphs: decode and prefill, their weights in the folder.
        model: computes with the weights that the bundle stores.
        plan: as in `verify`.
        ids: as in `verify`.
    """
    exact = dataclasses.replace(manifest, decode_graph="exact-decode.onnx", prefill_graph="exact-prefill.onnx")
    copies = [graph.clone() for graph in graphs]
    try:
        for copy, name in zip(copies, (exact.decode_graph, exact.prefill_graph), strict=True):
            exact_kernels(copy)
            multiply_exactly(copy)
            write_graph(copy, folder / name)
        exact_sessions = open_graphs(folder, exact, sessions.threads)
        proof = verify(exact_sessions, exact, model, plan, ids)
        last_layer = verify_last_layer(folder, exact_sessions, exact, copies[0], model, ids)
    finally:
        for name in (exact.decode_graph, exact.prefill_graph):
            (folder / name).unlink(missing_ok=True)
    fast = verify(sessions, manifest, model, plan, ids, "int8 activations")
    exact_checks = [dataclasses.replace(check, name=f"{check.name}, exact kernels") for check in proof.checks]
    checks = (*exact_checks, *fast.checks)
    return dataclasses.replace(proof, checks=checks), last_layer


def require_passed(checks: Iterable[Check]) -> None:
    """Raise GateError with the first comparison beyond tolerance, if there is one."""
    for check in checks:
        if not check.passed:
            raise GateError(
                f"verification, {check.name}: expected logits within {check.tolerance:g} x {check.largest_logit:.3g} "
                f"of PyTorch, found {check.largest_difference:.3g}; no bundle was written"
            )


def _reference_logits(
    model: PreTrainedModel, plan: PrefillPlan, ids: Sequence[int], stretches: Sequence[Stretch]
) -> np.ndarray:
    """Return the logits after the prompt and after each step, [1 + NUM_STEPS, V]."""
    reference, tokens = Reference(model, plan), torch.tensor(ids)
    rows = [reference.feed(tokens[stretch.start : stretch.stop], stretch.stage) for stretch in stretches]
    return torch.stack(rows[-1 - NUM_STEPS :]).float().numpy()


def bundle_logits(sequence: runtime_sequence.Sequence, ids: Sequence[int], stretches: Sequence[Stretch]) -> np.ndarray:
    """Return the same from the bundle's graphs."""
    rows = [sequence.feed(ids[stretch.start : stretch.stop], stretch.stage) for stretch in stretches]
    return np.stack([row for row in rows[-1 - NUM_STEPS :] if row is not None])


def compare_logits(name: str, found: np.ndarray, wanted: np.ndarray, arithmetic: str) -> Check:
    """Return the comparison of logits [rows, V] with those that they should be."""
    difference = np.abs(found - wanted)
    largest = float(difference.max()) if np.isfinite(difference).all() else float("nan")
    return Check(name, largest, float(np.abs(wanted).max()), TOLERANCE[arithmetic], arithmetic)
