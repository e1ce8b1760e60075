"""Prove an export against plain PyTorch: E0 (decode graph = the model) and E1 (pair = the pruned twin).

The prompt is 40 tokens, fed whole, in chunks of 13, 1 and 26, and as 39 + 1; then 20 single tokens. For E0 the truth
is one forward over all 60 tokens without cache, positions or mask, so that a wrong default of ours cannot hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pop_export.bundle import save_graphs
from pop_export.config import Dialect
from pop_export.decoder import max_positions_of, num_layers_of
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.fuse import prepare_attention
from pop_export.reference import PrefillPlan, Reference
from pop_runtime.kv_cache import BoundGraph, KvCache, allocate_cache
from pop_runtime.manifest import Manifest, Plan, Windows
from pop_runtime.schedule import Stretch
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair, open_pair

SKIPPED = (1, 2)
NUM_PROMPT, NUM_STEPS = 40, 20
TOLERANCE = 1e-3  # times the largest logit
STEPS = [Stretch(at, at + 1, "decode") for at in range(NUM_PROMPT, NUM_PROMPT + NUM_STEPS)]


@dataclass(frozen=True)
class Exported:
    """A tiny export in a folder, open, with the model it was made from."""

    model: PreTrainedModel
    folder: Path
    manifest: Manifest
    sessions: SessionPair
    decode_ops: tuple[str, ...]  # operators of the decode graph


def export_pair(
    model: PreTrainedModel, folder: Path, skipped: tuple[int, ...] = SKIPPED, dialect: Dialect = "ort"
) -> Exported:
    """Return the pair exported to `folder` with `skipped` layers left out of prefill."""
    kv_layers = kv_layout(model)
    decode = build_decode_graph(model, kv_layers, dialect)
    manifest = Manifest(
        model={},
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_positions=max_positions_of(model),
        plan=Plan(len(kv_layers), skipped, "user"),
        windows=Windows(),
        kv_dtype="float32",
        kv_layers=kv_layers,
        precision="fp32",
        eos_token_ids=(),
        bos_token_id=None,
        pad_token_id=None,
        tokenizer=None,
        chat_template=None,
        generation_config=None,
        dialect=dialect,
    )
    prefill = cut_prefill_graph(decode, PrefillPlan(frozenset(skipped)))
    prepare_attention(decode, prefill, manifest.max_positions)
    ops = tuple(node.op_type for node in decode.graph)
    save_graphs(folder, {manifest.prefill_graph: prefill, manifest.decode_graph: decode}, manifest.weights)
    return Exported(model, folder, manifest, open_pair(folder, manifest, threads=1), ops)


def prompt_ids(num_tokens: int = NUM_PROMPT + NUM_STEPS, seed: int = 0, vocab_size: int = 250) -> list[int]:
    """Return seeded token ids."""
    return torch.randint(3, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def stretches(cuts: tuple[int, ...], stage: Any) -> list[Stretch]:
    """Return consecutive stretches of one stage between `cuts`."""
    return [Stretch(start, stop, stage) for start, stop in pairwise(cuts)]


def true_logits(model: PreTrainedModel, ids: list[int], num_prompt: int = NUM_PROMPT) -> np.ndarray:
    """Return the logits after the prompt and after each further token, from one plain forward."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, num_prompt - 1 :].numpy()


def twin_logits(model: PreTrainedModel, ids: list[int], feeds: list[Stretch], num_kept: int) -> np.ndarray:
    """Return the pruned twin's logits after each of the last `num_kept` feeds."""
    twin, tokens = Reference(model, PrefillPlan(frozenset(SKIPPED))), torch.tensor(ids)
    return torch.stack([twin.feed(tokens[f.start : f.stop], f.stage) for f in feeds][-num_kept:]).numpy()


def bundle_logits(exported: Exported, ids: list[int], feeds: list[Stretch], num_kept: int) -> np.ndarray:
    """Return the graphs' logits after each of the last `num_kept` feeds."""
    sequence = Sequence(exported.sessions, allocate_cache(exported.manifest, 1, len(ids)))
    rows = [sequence.feed(ids[f.start : f.stop], f.stage) for f in feeds][-num_kept:]
    return np.stack([row for row in rows if row is not None])


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference over the largest logit; infinity where a number is missing."""
    difference = np.abs(found - wanted)
    return float(difference.max() / np.abs(wanted).max()) if np.isfinite(difference).all() else float("inf")


def prove_unpruned(exported: Exported, ids: list[int]) -> float:
    """Return the largest relative difference of the decode graph to plain PyTorch, over the three ways of feeding."""
    truth = true_logits(exported.model, ids)
    ways = ((0, 40), (0, 13, 14, 40), (0, 39, 40))
    found = [bundle_logits(exported, ids, [*stretches(cuts, "decode"), *STEPS], 21) for cuts in ways]
    return max(relative(logits, truth) for logits in found)


def prove_pruned(exported: Exported, ids: list[int]) -> float:
    """Return the largest relative difference of the pair to the pruned twin; the prompt's last token runs full."""
    worst = 0.0
    for cuts in ((0, 39), (0, 13, 14, 39)):
        feeds = [*stretches(cuts, "prefill"), Stretch(39, 40, "decode"), *STEPS]
        twin = twin_logits(exported.model, ids, feeds, 21)
        worst = max(worst, relative(bundle_logits(exported, ids, feeds, 21), twin))
    return worst


def prove_batch(exported: Exported, ids: list[int], lengths: tuple[int, ...] = (40, 11)) -> float:
    """Return the same for rows of different lengths: prompts one row at a time, then 5 tokens decoded together."""
    rows = [ids[index : index + length + 5] for index, length in enumerate(lengths)]
    truth = [true_logits(exported.model, row, length)[1:] for row, length in zip(rows, lengths, strict=True)]
    cache = allocate_cache(exported.manifest, len(rows), max(lengths) + 5)
    for index, length in enumerate(lengths):
        graph = _bound(exported, cache.row(index))
        graph.run(np.array([rows[index][:length]], np.int64), np.array([length], np.int64))
    graph, worst = _bound(exported, cache), 0.0
    for step in range(5):
        ids_now = np.array([[row[length + step]] for row, length in zip(rows, lengths, strict=True)], np.int64)
        graph.run(ids_now, np.array(lengths, np.int64) + step + 1)
        worst = max(worst, *(relative(found, true[step]) for found, true in zip(graph.logits(), truth, strict=True)))
    return worst


def _bound(exported: Exported, cache: KvCache) -> BoundGraph:
    return BoundGraph(exported.sessions.decode, cache, exported.manifest.decode_graph, has_logits=True)


def pruning_effect(exported: Exported, ids: list[int]) -> float:
    """Return how far the pruned twin is from the full model: a proof of E1 means nothing if it is small."""
    feeds = [*stretches((0, 39), "prefill"), Stretch(39, 40, "decode"), *STEPS]
    return relative(twin_logits(exported.model, ids, feeds, 21), true_logits(exported.model, ids))


def num_layers(exported: Exported) -> int:
    """Return how many layers the export has."""
    return num_layers_of(exported.model)
