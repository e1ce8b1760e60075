"""What quantising and pruning do to a model's predictions, apart and together, measured through the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from pop_export.damage import Protocol
from pop_export.decoder import cache_argument, position_arguments
from pop_export.reference import PrefillPlan, Reference
from pop_runtime import sequence as runtime_sequence
from pop_runtime.errors import GateError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.schedule import Stretch, plan_turn
from pop_runtime.sessions import SessionPair

MAX_WINDOWS = 8
MAX_SCORED_TOKENS = 32  # predictions compared per window, after its prompt
# Nats per token that activations and weights rounded to 8 bits may cost: nearly three times what int4's weights do
# where they are not fitted to text. A model beyond that has activations that 8 bits cannot hold.
MAX_DYNAMIC_KL = 0.25


@dataclass(frozen=True)
class PrecisionDamage:
    """KL divergence to the original checkpoint in PyTorch fp32, in nats per token, mean over predictions."""

    num_windows: int
    num_prompt_tokens: int
    num_pruned_tokens: int  # of each prompt: what lies between sink and boundary
    num_scored_tokens: int  # of each window
    quantisation_kl_nats: float  # the decode graph, prompt at full depth
    pruning_kl_nats: float  # the plan in PyTorch fp32
    both_kl_nats: float  # the pair, as it runs


@dataclass(frozen=True)
class OriginalScores:
    """Log-probabilities of the checkpoint as it was loaded, before any weight is changed."""

    windows: list[list[int]]
    num_prompt: int
    stretches: tuple[Stretch, ...]  # of a pruned prompt
    full: list[np.ndarray]  # per window [scored, V] float32
    pruned: list[np.ndarray]


def original_scores(
    model: PreTrainedModel, plan: PrefillPlan, windows: Sequence[np.ndarray], protocol: Protocol
) -> OriginalScores:
    """Return what the original model predicts after the first part of each window, read whole and with the plan.

    Args:
        model: causal LM in fp32.
        plan: what prefill leaves out.
        windows: token ids, all of the protocol's length; no more than MAX_WINDOWS are used.
        protocol: lengths of prompt and continuation, of which no more than MAX_SCORED_TOKENS are used.
    """
    num_prompt = protocol.context_tokens
    length = num_prompt + min(protocol.continuation_tokens, MAX_SCORED_TOKENS) - 1  # the last token is never fed
    texts = [window[:length].tolist() for window in windows[:MAX_WINDOWS]]
    stretches = tuple(plan_turn(0, num_prompt, protocol.windows, num_prompt))
    full = [_model_scores(model, plan, ids, [Stretch(0, num_prompt, "decode")]) for ids in texts]
    pruned = [_model_scores(model, plan, ids, stretches) for ids in texts]
    return OriginalScores(texts, num_prompt, stretches, full, pruned)


def precision_damage(sessions: SessionPair, manifest: Manifest, original: OriginalScores) -> PrecisionDamage:
    """Return how far a bundle is from the original model on the windows it was scored on."""
    full: list[np.ndarray] = []
    pruned: list[np.ndarray] = []
    for ids in original.windows:
        for scores, stretches in ((full, [Stretch(0, original.num_prompt, "decode")]), (pruned, original.stretches)):
            sequence = runtime_sequence.Sequence(sessions, allocate_cache(manifest, 1, len(ids)))
            scores.append(_bundle_scores(sequence, ids, stretches))
    return PrecisionDamage(
        num_windows=len(original.windows),
        num_prompt_tokens=original.num_prompt,
        num_pruned_tokens=sum(piece.stop - piece.start for piece in original.stretches if piece.stage == "prefill"),
        num_scored_tokens=len(original.full[0]),
        quantisation_kl_nats=mean_kl(original.full, full),
        pruning_kl_nats=mean_kl(original.full, original.pruned),
        both_kl_nats=mean_kl(original.full, pruned),
    )


def require_small_damage(damage: PrecisionDamage) -> None:
    """Refuse products in integers that change what the model says.

    Raises:
        GateError: the damage without any pruning is not below MAX_DYNAMIC_KL.
    """
    if not damage.quantisation_kl_nats < MAX_DYNAMIC_KL:
        raise GateError(
            f"--precision int8-dynamic: expected KL to the checkpoint below {MAX_DYNAMIC_KL} nats per token, found "
            f"{damage.quantisation_kl_nats:.3g}; no bundle was written; use --precision int8"
        )


def mean_kl(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """Return the mean of KL(wanted || found) in nats over log-probabilities, lists of [scored, V]."""
    rows = [(np.exp(p) * (p - q)).sum(axis=-1, dtype=np.float64) for p, q in zip(wanted, found, strict=True)]
    return float(np.concatenate(rows).mean())


@torch.no_grad()
def _model_scores(
    model: PreTrainedModel, plan: PrefillPlan, ids: list[int], stretches: Sequence[Stretch]
) -> np.ndarray:
    """Return log-probabilities after the prompt, which the stretches cover, and after each later token, [scored, V]."""
    reference, tokens = Reference(model, plan), torch.tensor(ids)
    num_read = stretches[-1].stop - 1  # the prompt's last token goes with those that follow it: all at full depth
    for stretch in stretches:
        if stretch.start < num_read:
            reference.feed(tokens[stretch.start : min(stretch.stop, num_read)], stretch.stage)
    rest = torch.arange(num_read, len(ids))[None]  # [1, scored]
    cache = {cache_argument(model): reference.cache, "use_cache": True}
    arguments = position_arguments(model, rest)
    logits = model(input_ids=tokens[None, num_read:], **arguments, **cache).logits[0]  # [scored, V]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def _bundle_scores(sequence: runtime_sequence.Sequence, ids: list[int], stretches: Sequence[Stretch]) -> np.ndarray:
    """Return the same from the bundle's graphs."""
    after_prompt = [sequence.feed(ids[stretch.start : stretch.stop], stretch.stage) for stretch in stretches][-1]
    rows = [after_prompt, *(sequence.feed([token], "decode") for token in ids[stretches[-1].stop :])]
    logits = torch.from_numpy(np.stack([row for row in rows if row is not None]))
    return torch.log_softmax(logits, dim=-1).numpy()
