"""How much faster a pruned prefill can be at most: the work it leaves out, counted in multiplications and additions."""

from __future__ import annotations

from dataclasses import dataclass

from pop_runtime.manifest import Windows
from pop_runtime.schedule import plan_turn


@dataclass(frozen=True)
class PromptWork:
    """Floating-point operations per prompt token."""

    linear: float  # in matrix products with weights
    attention: float  # per token attended to, itself and all before it; sliding windows are not counted

    def of(self, start: int, stop: int) -> float:
        """Return the work of the tokens at positions `start..stop` (half-open)."""
        num_attended_to = (start + 1 + stop) * (stop - start) / 2
        return self.linear * (stop - start) + self.attention * num_attended_to


def speedup_limit(full: PromptWork, pruned: PromptWork, windows: Windows, num_tokens: int) -> float:
    """Return the full model's work on a prompt over that of a turn, some tokens of which run at full depth.

    Args:
        full: of the full model.
        pruned: of the pruned prefill.
        windows: of the turn.
        num_tokens: prompt length, at least 1.
    """
    turn = plan_turn(0, num_tokens, windows, num_tokens)
    done = sum((pruned if part.stage == "prefill" else full).of(part.start, part.stop) for part in turn)
    return full.of(0, num_tokens) / done
