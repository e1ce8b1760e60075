"""Tune fitted K and V projections on what they are for: what the full model predicts after a pruned prompt.

Least squares (`refit.py`) takes every error in K and V for as bad as any other; attention does not. From the fitted
projections a few dozen steps of Adam lower the KL divergence that `damage.py` measures. Prompts end anywhere in the
text and have boundaries of any size, so that no one division of it is learnt. Prefill's own projections change, nothing
else does: kept layers, surrogates and decode are what they were.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pop_export.damage import Damage, kl_divergences
from pop_export.decoder import frozen
from pop_export.progress import progress
from pop_export.reference import PrefillPlan
from pop_export.text_run import TextRun

# Chosen on SmolLM2-135M: docs/experiments.md.
STEP_SIZE = 0.003  # of each weight's root mean square
WARM_UP_STEPS = 5
SCORED_TOKENS = 64  # after each prompt
MIN_TOKENS = 64  # of a window that is tuned on


@dataclass(frozen=True)
class Tuning:
    """What tuning did, measured on text that neither it nor the fits saw."""

    steps: int
    num_windows: int
    seconds: float
    before: Damage
    after: Damage
    kept: bool  # False: no gain there, so the projections stay as they were fitted


def tune(
    plan: PrefillPlan,
    runs: Sequence[TextRun],
    measure: Callable[[PrefillPlan], Damage],
    *,
    steps: int,
    sink_tokens: int,
    boundary_tokens: int,
    seed: int,
) -> tuple[PrefillPlan, Tuning | None]:
    """Return the plan with tuned projections where they do less damage, and how it went.

    Args:
        plan: fitted.
        runs: texts of batch 1 or more; those shorter than `MIN_TOKENS`, or twice the sink, are left out.
        measure: gives the damage of a plan on other text.
        steps: prompts to learn from, one after another.
        sink_tokens: positions at full depth at the start, as the plan was fitted for.
        boundary_tokens: most tokens at full depth at a prompt's end.
        seed: of the prompts' order and ends.

    Returns:
        The plan itself and None where there is nothing to tune or no text for it.
    """
    shortest = max(MIN_TOKENS, 2 * sink_tokens)
    texts = [(run, row) for run in runs if run.ids.shape[1] >= shortest for row in range(len(run.ids))]
    if not (plan.weights and texts and steps):
        return plan, None
    started, before = time.monotonic(), measure(plan)
    random = np.random.default_rng(seed)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in plan.weights.items()}
    tuned = dataclasses.replace(plan, weights=weights)
    optimizer = torch.optim.Adam(
        [{"params": [weight], "lr": STEP_SIZE * _root_mean_square(weight)} for weight in weights.values()],
        betas=(0.9, 0.99),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_step_size(step, steps))
    model = runs[0].stack.model
    with progress("tuning the fitted projections", steps) as advance, frozen(model), torch.enable_grad():
        for step in range(steps):
            if step % len(texts) == 0:
                order = random.permutation(len(texts))
            run, row = texts[order[step % len(texts)]]
            loss = _prompt_damage(run, row, tuned, sink_tokens, boundary_tokens, random)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            advance(1)
    tuned = dataclasses.replace(plan, weights={name: weight.detach() for name, weight in weights.items()})
    after = measure(tuned)
    kept = after.kl_mean_nats < before.kl_mean_nats  # not with NaN
    tuning = Tuning(steps, len(texts), time.monotonic() - started, before, after, kept)
    return tuned if kept else plan, tuning


def _prompt_damage(
    run: TextRun, row: int, plan: PrefillPlan, sink_tokens: int, boundary_tokens: int, random: np.random.Generator
) -> Tensor:
    """Return the mean KL(full || pruned) in nats over some tokens after a prompt that ends somewhere in one text."""
    num_tokens = run.ids.shape[1]
    scored = min(SCORED_TOKENS, num_tokens // 4)
    context = int(random.integers(max(num_tokens // 4, sink_tokens + 2), num_tokens - scored + 1))
    boundary = int(random.integers(1, max(2, min(boundary_tokens + 1, context - sink_tokens))))
    num_pruned, stop = context - boundary, context + scored - 1  # the last token is predicted, never fed
    alone = run.row(row)
    wanted = run.stack.logits(alone.left[:, context - 1 : stop]).float().log_softmax(-1)
    left = alone.after_pruned(plan, sink_tokens, num_pruned, stop)
    found = run.stack.logits(left[:, context - 1 - num_pruned :]).float().log_softmax(-1)
    return kl_divergences(wanted, found).mean()


def _share_of_step_size(step: int, steps: int) -> float:
    """Return a short warm-up followed by half a cosine."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _root_mean_square(weight: Tensor) -> float:
    return float(weight.detach().float().square().mean().sqrt())
