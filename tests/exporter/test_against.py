"""The full side in PyTorch: rows together, and back to where the prompts end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from pop_export.evaluation.against import CheckpointSide
from tests.exporter.test_ablation import GEMMA
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_steps_after_rewinding_are_those_of_the_whole_text(family):
    config = None if family == "llama" else transformers.Gemma3TextConfig(**GEMMA)  # windows of 8 tokens
    model = tiny_model(config, norm_offset=1.0 if config is None else 0.0)
    ids = np.random.default_rng(0).integers(0, 250, (3, 30))
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()
    side = CheckpointSide(model)
    assert np.abs(side.start(ids[:, :20], 10) - wanted[:, 19]).max() < 1e-4
    for _ in range(15):
        side.step(np.array([7, 8, 9]))
    side.rewind()
    for at in range(20, 30):
        assert np.abs(side.step(ids[:, at]) - wanted[:, at]).max() < 1e-4
    side.rewind()
    assert np.abs(side.step(ids[:, 20]) - wanted[:, 20]).max() < 1e-4
