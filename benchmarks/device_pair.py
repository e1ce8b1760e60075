"""Export a model's pair for a device and hold it against PyTorch there: what the GPU benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from pop_export.bundle import save_graphs
from pop_export.config import Dialect
from pop_export.decoder import max_positions_of
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.fuse import prepare_attention
from pop_export.half_precision import cast_weights, rounded_weights
from pop_export.reference import PrefillPlan, Reference
from pop_export.verify import TOLERANCE
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest, Plan, Windows
from pop_runtime.providers import Target
from pop_runtime.schedule import Stretch
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair, open_pair

NUM_STEPS = 4


@dataclass(frozen=True)
class Difference:
    """The pair against its twin in PyTorch on the same device."""

    largest: float  # of all logits, over the largest logit
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether it is a number and within tolerance."""
        return bool(self.largest <= self.tolerance)


def export_pair(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, dialect: Dialect, skipped: tuple[int, ...]
) -> Manifest:
    """Write both graphs of a model on the CPU and return their manifest; nothing is calibrated or fitted."""
    kv_layers = kv_layout(model)
    with cast_weights(model, dtype):
        decode = build_decode_graph(model, kv_layers, dialect)
        prefill = cut_prefill_graph(decode, PrefillPlan(frozenset(skipped)))
        prepare_attention(decode, prefill, max_positions_of(model))
    name = str(dtype).removeprefix("torch.")
    manifest = Manifest(
        model={}, vocab_size=model.get_output_embeddings().weight.shape[0], max_positions=max_positions_of(model),
        plan=Plan(len(kv_layers), skipped, "user"), windows=Windows(), kv_dtype=name, kv_layers=kv_layers,
        precision=name, eos_token_ids=(), bos_token_id=None, pad_token_id=None, tokenizer=None, chat_template=None,
        generation_config=None, dialect=dialect,
    )  # fmt: skip
    save_graphs(folder, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights)
    return manifest


def open_on(folder: Path, manifest: Manifest, target: Target) -> SessionPair:
    """Return the pair, open on a device."""
    return open_pair(folder, manifest, None, target=target)


def compare(
    pair: SessionPair, manifest: Manifest, model: PreTrainedModel, dtype: torch.dtype, ids: list[int], device: str
) -> Difference:
    """Return how far the pair is from PyTorch, which computes in fp32 with the same rounded weights on the device.

    The prompt goes through prefill in two uneven pieces, its last token and `NUM_STEPS` more through decode.
    """
    prompt = len(ids) - NUM_STEPS
    cut = prompt * 2 // 5
    feeds = [Stretch(0, cut, "prefill"), Stretch(cut, prompt - 1, "prefill")]
    feeds += [Stretch(at, at + 1, "decode") for at in range(prompt - 1, len(ids))]
    sequence = Sequence(pair, allocate_cache(manifest, 1, len(ids), pair.place))
    found = [sequence.feed(ids[feed.start : feed.stop], feed.stage) for feed in feeds]
    plan = PrefillPlan(frozenset(manifest.plan.skipped_layers))
    with rounded_weights(model, dtype), torch.device(device):
        model.to(device)  # type: ignore[arg-type]
        twin, tokens = Reference(model, plan), torch.tensor(ids)
        wanted = [twin.feed(tokens[feed.start : feed.stop], feed.stage).float().cpu().numpy() for feed in feeds]
    model.to("cpu")  # type: ignore[arg-type]
    rows = np.stack([row for row in found if row is not None])
    truth = np.stack(wanted[-len(rows) :])
    difference = np.abs(rows - truth)
    largest = float(difference.max() / np.abs(truth).max()) if np.isfinite(difference).all() else float("nan")
    return Difference(largest, TOLERANCE[str(dtype).removeprefix("torch.")])


def median_ms(action: Callable[[], object], device: str, rounds: int) -> float:
    """Return the median time of an action in ms, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        started = time.perf_counter()
        action()
        synchronize(device)
        times.append((time.perf_counter() - started) * 1e3)
    return float(np.median(times[1:]))


def synchronize(device: str) -> None:
    """Wait until a GPU has done all that it was given."""
    if device != "cpu":
        torch.cuda.synchronize()
