"""Layers quantised one after another, each fitted to what the quantised ones before it hand on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers

from pop_export.layer_stack import LayerStack
from pop_export.quantize_layers import quantize_layers
from pop_export.quantized_matrix import QuantizedMatrix, Scheme, quantize_matrix
from pop_export.stored_weights import stored_weights
from tests.tiny_models import tiny_model

NUM_LAYERS = 5


def _text(num: int, seed: int) -> list[np.ndarray]:
    return [np.random.default_rng([seed, index]).integers(0, 256, 48) for index in range(num)]


def _schemes(model: Any, method: str = "gptq") -> dict[str, Scheme]:
    return {
        name: Scheme(4, 32, method, symmetric=False)  # type: ignore[arg-type]
        for name, weight in model.named_parameters()
        if ".layers." in name and weight.ndim == 2
    }


def _error_after_first_layer(model: Any, matrices: Mapping[str, QuantizedMatrix], text: list[np.ndarray]) -> float:
    """Return the squared error of what the first layer gives."""
    stack, ids = LayerStack(model), torch.from_numpy(np.stack(text))
    calls = stack.calls(ids)
    whole = stack.run(calls, 0, calls.entered)
    with stored_weights(model, matrices):
        return float((stack.run(calls, 0, calls.entered) - whole).detach().square().mean())


def test_every_linear_weight_of_the_layers_is_quantised_and_the_model_is_unchanged(llama):
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    found = quantize_layers(llama, _schemes(llama), _text(8, 0), {}, {})
    assert len(found) == NUM_LAYERS * 7
    assert all(weight.equal(before[name]) for name, weight in llama.state_dict().items())


def test_a_layer_is_closer_to_the_original_than_with_weights_rounded_to_nearest(llama):
    text = _text(64, 0)
    found = quantize_layers(llama, _schemes(llama), text, {}, {})
    parameters = dict(llama.named_parameters())
    nearest = {
        name: quantize_matrix(parameters[name].detach().numpy(), scheme) for name, scheme in _schemes(llama).items()
    }
    fitted, rounded = (_error_after_first_layer(llama, matrices, text) for matrices in (found, nearest))
    assert fitted < 0.9 * rounded


def test_fitting_sees_the_embedding_as_it_is_stored(llama):
    table = {"model.embed_tokens.weight": quantize_matrix(llama.lm_head.weight.detach().numpy(), Scheme(4, 128))}
    first = "model.layers.0.self_attn.q_proj.weight"
    plain, seen = (
        quantize_layers(llama, _schemes(llama), _text(8, 0), matrices, {})[first] for matrices in ({}, table)
    )
    assert not np.array_equal(plain.dequantized(), seen.dequantized())


def test_weights_kept_the_other_way_round_are_fitted_too():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=64, bos_token_id=256, eos_token_id=257
    )
    model = tiny_model(config)
    schemes = {
        name: Scheme(8, 32, "gptq") for name, weight in model.named_parameters() if ".h." in name and weight.ndim == 2
    }
    found = quantize_layers(model, schemes, _text(4, 0), {}, {})
    assert set(found) == set(schemes)
    for name, matrix in found.items():
        weight = dict(model.named_parameters())[name].detach().T.numpy()
        assert np.abs(matrix.dequantized() - weight).max() < 0.2 * np.abs(weight).max()


def test_only_so_much_text_is_used_and_it_is_spread_over_all(llama, monkeypatch):
    monkeypatch.setattr("pop_export.quantize_layers.MAX_TOKENS", 3 * 48)
    text = _text(8, 0)
    few, alike = (
        quantize_layers(llama, _schemes(llama), windows, {}, {}) for windows in (text, [text[0], text[3], text[7]])
    )
    for name in few:
        np.testing.assert_array_equal(few[name].packed, alike[name].packed)
