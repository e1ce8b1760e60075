"""Text that a model writes itself: the domain it knows best, where no corpus ships with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from pop_export.calibration.gates import draw
from pop_export.decoder import cache_argument, last_position_head

LENGTH_TOKENS = 128  # longer samples cost more steps and drift further from what people read and write
ROWS_AT_A_TIME = 64  # sampled together: a step costs little more for many rows than for one


def num_steps_of(num_samples: int, length: int) -> int:
    """Return how many steps `self_text` takes for samples of `length` tokens, the first of which takes none."""
    return -(-num_samples // ROWS_AT_A_TIME) * (length - 1)


@torch.no_grad()
def self_text(
    model: Any,
    num_samples: int,
    *,
    bos_token_id: int | None,
    eos_token_ids: Sequence[int],
    seed: int,
    length: int = LENGTH_TOKENS,
    advance: Callable[[int], None] = lambda _count: None,
) -> list[np.ndarray]:
    """Return samples of `length` token ids each, drawn from the model's own distribution at temperature 1.

    A sample begins with the bos token, or with a token drawn evenly from the vocabulary where the model has none; end
    tokens are never drawn, so that none of the text is padding.

    Args:
        model: causal LM in eval mode.
        num_samples: how many.
        bos_token_id: what a text begins with.
        eos_token_ids: what would end it.
        seed: of all draws.
        length: tokens per sample, the first included.
        advance: called with the number of steps done since its last call, `num_steps_of` in all.
    """
    generator = np.random.default_rng([seed, 1])
    samples: list[np.ndarray] = []
    for start in range(0, num_samples, ROWS_AT_A_TIME):
        rows = min(ROWS_AT_A_TIME, num_samples - start)
        first = generator.integers(0, model.get_output_embeddings().weight.shape[0], (rows, 1))
        if bos_token_id is not None:
            first[:] = bos_token_id
        tokens, cache = [torch.from_numpy(first)], DynamicCache(config=model.config)
        with last_position_head(model):
            for _ in range(length - 1):
                logits = model(input_ids=tokens[-1], use_cache=True, **{cache_argument(model): cache}).logits[:, -1]
                logits[:, list(eos_token_ids)] = -torch.inf
                tokens.append(draw(logits.float().softmax(-1), generator)[:, None])
                advance(1)
        samples += list(torch.cat(tokens, dim=1).numpy())
    return samples
