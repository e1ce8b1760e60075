"""Which weights keep more bits: found on a model in which one projection writes nearly all of the residual stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pop_export.quantized_matrix import Scheme
from pop_export.sensitive_weights import SENSITIVE_SHARE, _within, sensitive_weights
from tests.tiny_models import tiny_model

TEXT = [np.random.default_rng(index).integers(0, 250, 40) for index in range(4)]
LOUD_LAYER = "model.layers.2.mlp."


def test_the_weights_that_write_most_of_the_residual_stream_are_found():
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter(f"{LOUD_LAYER}down_proj.weight").mul_(30)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = [name for name in before if ".mlp." in name]
    found = sensitive_weights(model, weights, Scheme(4, 32, "gptq", symmetric=False), TEXT, {})
    assert found and all(name.startswith(LOUD_LAYER) for name in found)
    sizes = {name: model.get_parameter(name).numel() for name in weights}
    assert sum(sizes[name] for name in found) <= SENSITIVE_SHARE * sum(sizes.values())
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("budget", "names"), [(10, {"small"}), (40, {"small", "large"}), (100, {"small", "large", "last"})]
)
def test_weights_are_taken_by_what_they_change_for_their_size(budget, names):
    changes, sizes = {"large": 2.0, "small": 1.5, "last": 0.1}, {"large": 30, "small": 10, "last": 30}
    assert _within(changes, sizes, budget) == names
