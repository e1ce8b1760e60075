"""How much faster a pruned prefill can be at most: the work it leaves out, counted in multiplications and additions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptWork:
    """Floating-point operations per prompt token."""

    linear: float  # in matrix products with weights
    attention: float  # per token of the prompt, attended to or not: the CPU kernel computes the whole square


def speedup_limit(full: PromptWork, pruned: PromptWork, num_at_full_depth: int, num_tokens: int) -> float:
    """Return the full model's work on a prompt over that of a turn, some tokens of which run at full depth.

    Args:
        full: of the full model.
        pruned: of the pruned prefill.
        num_at_full_depth: sink and boundary tokens.
        num_tokens: prompt length.
    """
    at_full_depth = min(num_tokens, num_at_full_depth)
    whole, part = (work.linear + work.attention * num_tokens for work in (full, pruned))
    return whole * num_tokens / (whole * at_full_depth + part * (num_tokens - at_full_depth))
