"""What quantising and pruning do to a model's predictions, apart and together, measured through the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from pop_export.decoder import cache_argument
from pop_export.reference import PrefillPlan, Reference
from pop_runtime import sequence as runtime_sequence
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.schedule import Stage
from pop_runtime.sessions import open_pair

MAX_WINDOWS = 4
MAX_SCORED_TOKENS = 32  # predictions compared per window, after its prompt


@dataclass(frozen=True)
class PrecisionDamage:
    """KL divergence to the original checkpoint in PyTorch fp32, in nats per token, mean over predictions."""

    num_windows: int
    num_prompt_tokens: int
    num_scored_tokens: int  # of each window
    quantisation_kl_nats: float  # the decode graph, prompt at full depth
    pruning_kl_nats: float  # the plan in PyTorch fp32
    both_kl_nats: float  # the pair


@dataclass(frozen=True)
class OriginalScores:
    """Log-probabilities of the checkpoint as it was loaded, before any weight is changed."""

    windows: list[list[int]]
    num_prompt: int
    full: list[np.ndarray]  # per window [scored, V] float32
    pruned: list[np.ndarray]


def original_scores(model: PreTrainedModel, plan: PrefillPlan, samples: Sequence[np.ndarray]) -> OriginalScores:
    """Return what the original model predicts after the prompt half of each window, whole and with the plan.

    Args:
        model: causal LM in fp32.
        plan: what prefill leaves out.
        samples: windows of token ids, each at least 3 long.
    """
    length = min(len(sample) for sample in samples)
    num_prompt = max(2, length // 2)
    length = min(length, num_prompt + MAX_SCORED_TOKENS - 1)
    windows = [sample[:length].tolist() for sample in samples[:MAX_WINDOWS]]
    full, pruned = [], []
    for ids in windows:
        full.append(_model_scores(model, plan, ids, num_prompt, "decode"))
        pruned.append(_model_scores(model, plan, ids, num_prompt, "prefill"))
    return OriginalScores(windows, num_prompt, full, pruned)


def precision_damage(
    folder: Path, manifest: Manifest, original: OriginalScores, threads: int | None
) -> PrecisionDamage:
    """Return how far the bundle in `folder` is from the original model on the windows it was scored on."""
    sessions = open_pair(folder, manifest, threads)
    found: dict[Stage, list[np.ndarray]] = {"decode": [], "prefill": []}
    for ids in original.windows:
        for stage, scores in found.items():
            sequence = runtime_sequence.Sequence(sessions, allocate_cache(manifest, 1, len(ids)))
            scores.append(_bundle_scores(sequence, ids, original.num_prompt, stage))
    return PrecisionDamage(
        num_windows=len(original.windows),
        num_prompt_tokens=original.num_prompt,
        num_scored_tokens=len(original.full[0]),
        quantisation_kl_nats=mean_kl(original.full, found["decode"]),
        pruning_kl_nats=mean_kl(original.full, original.pruned),
        both_kl_nats=mean_kl(original.full, found["prefill"]),
    )


def mean_kl(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """Return the mean of KL(wanted || found) in nats over log-probabilities, lists of [scored, V]."""
    rows = [(np.exp(p) * (p - q)).sum(axis=-1, dtype=np.float64) for p, q in zip(wanted, found, strict=True)]
    return float(np.concatenate(rows).mean())


@torch.no_grad()
def _model_scores(
    model: PreTrainedModel, plan: PrefillPlan, ids: list[int], num_prompt: int, stage: Stage
) -> np.ndarray:
    """Return log-probabilities after the prompt's last token and each later one, [scored, V]."""
    reference, tokens = Reference(model, plan), torch.tensor(ids)
    reference.feed(tokens[: num_prompt - 1], stage)
    rest = torch.arange(num_prompt - 1, len(ids))[None]  # [1, scored]
    cache = {cache_argument(model): reference.cache, "use_cache": True}
    logits = model(input_ids=tokens[None, num_prompt - 1 :], position_ids=rest, **cache).logits[0]  # [scored, V]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def _bundle_scores(sequence: runtime_sequence.Sequence, ids: list[int], num_prompt: int, stage: Stage) -> np.ndarray:
    """Return the same from the bundle's graphs."""
    sequence.feed(ids[: num_prompt - 1], stage)
    rows = [sequence.feed([token], "decode") for token in ids[num_prompt - 1 :]]
    logits = torch.from_numpy(np.stack([row for row in rows if row is not None]))
    return torch.log_softmax(logits, dim=-1).numpy()
