"""Fits on tiny models of several families; what the graphs make of them is in test_prefill_graph.py."""

import numpy as np
import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from pop_export.damage import Protocol
from pop_export.full_pass import FullPass, batches
from pop_export.graph.build import kv_layout
from pop_export.layer_stack import LayerStack
from pop_export.plan_lab import PlanLab, TrialSettings
from pop_export.projections import find_kv_projections, linear_modules
from pop_export.refit import fit_prefill, modules_by_layer
from pop_runtime.manifest import Windows
from tests.tiny_models import NUM_LAYERS, TINY, tiny_model

RNG = np.random.default_rng(0)
FITTING = [RNG.integers(0, 250, 40) for _ in range(24)]
HELD_OUT = [RNG.integers(0, 250, 40) for _ in range(6)]
GPT2 = dict(n_embd=64, n_layer=NUM_LAYERS, n_head=4, vocab_size=300, n_positions=256, bos_token_id=1, eos_token_id=1)
NEOX = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "bias": lambda: transformers.Qwen2Config(**TINY),
    "qk norm": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "one plus w norm": lambda: transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8),
    "norm after": lambda: transformers.Olmo2Config(**TINY),
    "fused": lambda: transformers.Phi3Config(**TINY),
    "fused conv1d with bias": lambda: transformers.GPT2Config(**GPT2),
    "interleaved": lambda: transformers.GPTNeoXConfig(**NEOX),
}


def fitted(model, skipped=(1, 3, 4), fitting=FITTING, held_out=HELD_OUT, **settings):
    stack, projections = LayerStack(model), find_kv_projections(model)
    modules = modules_by_layer(projections)
    return fit_prefill(
        stack, projections, FullPass(stack, fitting, modules), FullPass(stack, held_out, modules), skipped, **settings
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_k_and_v_projections_are_found_in_every_family(family):
    model = tiny_model(CONFIGS[family]())
    found = {(p.layer, p.part): p for p in find_kv_projections(model)}
    assert set(found) == {(layer, part) for layer in range(NUM_LAYERS) for part in ("key", "value")}
    for layer in range(NUM_LAYERS):
        key, value = found[layer, "key"], found[layer, "value"]
        if key.module == value.module:
            assert not set(key.columns) & set(value.columns)
        num_kv = (4 if family in ("fused conv1d with bias", "interleaved") else 2) * 16
        assert len(key.columns) == len(value.columns) == num_kv
    if family == "fused":
        assert list(found[0, "key"].columns) == list(range(64, 96))
        assert list(found[0, "value"].columns) == list(range(96, 128))


class SumOfTwo(torch.nn.Module):
    """Two projections of one input, added: not one linear module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.first(x) + self.second(x)


def test_a_part_written_by_two_modules_is_left_out():
    model = tiny_model()
    model.model.layers[2].self_attn.v_proj = SumOfTwo()
    found = {(p.layer, p.part) for p in find_kv_projections(model)}
    assert (2, "key") in found and (2, "value") not in found and (3, "value") in found


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_run_one_at_a_time_make_the_models_own_logits(family):
    model = tiny_model(CONFIGS[family]())
    stack, ids = LayerStack(model), torch.from_numpy(np.stack(FITTING[:2]))
    calls = stack.calls(ids)
    hidden = calls.entered
    for layer in range(len(stack)):
        hidden = stack.run(calls, layer, hidden)
    with torch.no_grad():
        assert torch.equal(stack.logits(hidden), model(ids).logits)


def test_a_layer_without_linear_projections_is_skipped_as_it_is_and_named_by_its_absence():
    model = tiny_model()
    for name in ("k_proj", "v_proj"):
        setattr(model.model.layers[3].self_attn, name, SumOfTwo())
    found = fitted(model)
    assert {record.layer for record in found.records} == {1, 4} and found.plan.skipped_layers == {1, 3, 4}
    assert found.refitted_layers == (4,)


def capture(model, name, ids):
    """Return input and output of a module in a plain forward, both flat over positions."""
    seen = []
    handle = model.get_submodule(name).register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        model(ids)
    handle.remove()
    return [tensor.flatten(0, 1).double().numpy() for tensor in seen[0]]


@pytest.mark.parametrize("family", ["llama", "bias", "fused", "fused conv1d with bias"])
def test_a_refit_equals_a_plain_least_squares_fit(family):
    """The twin: two whole forwards, the skipped layer made an identity, and numpy's least squares with ridge rows."""
    model = tiny_model(CONFIGS[family]())
    found = fitted(model, skipped=(3, 4), surrogate=False)
    ids = torch.from_numpy(np.stack(FITTING))
    for projection in [p for p in find_kv_projections(model) if p.layer == 4]:
        (record,) = [r for r in found.records if (r.layer, r.projection) == (4, projection.part)]
        _, full = capture(model, projection.module, ids)
        skipped = stack_layer(model, 3)
        handle = skipped.register_forward_hook(pass_input_on, with_kwargs=True)
        x, now = capture(model, projection.module, ids)
        handle.remove()
        residual = (full - now)[:, projection.columns]
        module = model.get_submodule(projection.module)
        has_bias = module.bias is not None
        features = np.column_stack([x, np.ones(len(x))]) if has_bias else x
        rows = np.sqrt(record.ridge * (x**2).sum(0).mean()) * np.eye(features.shape[1])
        if has_bias:
            rows[-1] = 0
        target = np.vstack([residual, np.zeros((len(rows), residual.shape[1]))])
        change, *_ = np.linalg.lstsq(np.vstack([features, rows]), target, rcond=None)
        weight = found.plan.weights[f"{projection.module}.weight"].double() - module.weight.detach().double()
        weight = weight.numpy() if isinstance(module, Conv1D) else weight.numpy().T  # [F, N]
        assert np.allclose(weight[:, projection.columns], change[: x.shape[1]], atol=1e-5)
        if has_bias:
            bias = (found.plan.weights[f"{projection.module}.bias"] - module.bias).detach().numpy()
            assert np.allclose(bias[projection.columns], change[-1], atol=1e-5)


def stack_layer(model, layer):
    return LayerStack(model).layers[layer]


def pass_input_on(_module, args, kwargs, output):
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


@pytest.mark.parametrize("family", CONFIGS)
def test_no_fit_is_worse_on_its_own_text_and_a_kept_one_is_better_on_other_text(family):
    found = fitted(tiny_model(CONFIGS[family]()))
    assert [(r.layer, r.projection) for r in found.records] == [
        (1, "key"), (1, "value"), (1, "surrogate"), (3, "key"), (3, "value"), (4, "key"), (4, "value"),
    ]  # fmt: skip
    for record in found.records:
        assert record.error_after <= record.error_before
        assert record.kept == (record.held_out_after < record.held_out_before)
    assert set(found.plan.surrogates) <= {1} and found.plan.skipped_layers == {1, 3, 4}


def test_only_k_and_v_of_a_fused_projection_change():
    model = tiny_model(CONFIGS["fused"]())
    name = "model.layers.4.self_attn.qkv_proj.weight"
    before, after = model.get_parameter(name), fitted(model).plan.weights[name]
    assert torch.equal(after[:64], before[:64]) and not torch.equal(after[64:], before[64:])


def test_the_first_skipped_layer_keeps_its_projections_because_they_are_exact():
    found = fitted(tiny_model())
    first = [r for r in found.records if r.layer == 1 and r.projection != "surrogate"]
    assert [(r.error_before, r.kept) for r in first] == [(0.0, False), (0.0, False)]
    assert found.refitted_layers == (3, 4)


def test_a_fit_that_fails_on_other_text_keeps_the_original_weights():
    """Six tokens fitted by 64 features: perfect on them, and worse than nothing on others."""
    found = fitted(tiny_model(), fitting=[FITTING[0][:6]], skipped=(3, 4))
    refits = [r for r in found.records if r.layer == 4]
    assert all(r.error_after < r.error_before for r in refits)
    for record in refits:
        name = f"model.layers.4.self_attn.{'k' if record.projection == 'key' else 'v'}_proj.weight"
        assert record.kept == (name in found.plan.weights)


def test_a_fit_is_the_same_again():
    model = tiny_model()
    first, second = fitted(model), fitted(model)
    assert first.records == second.records
    assert all(torch.equal(weight, second.plan.weights[name]) for name, weight in first.plan.weights.items())
    assert all(
        torch.equal(s.matrix, second.plan.surrogates[layer].matrix) for layer, s in first.plan.surrogates.items()
    )


def test_the_model_is_unchanged_by_fitting():
    model = tiny_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fitted(model)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_text_kept_in_memory_gives_the_same_fit():
    model = tiny_model()
    stack, projections = LayerStack(model), find_kv_projections(model)
    modules = modules_by_layer(projections)
    kept = [FullPass(stack, text, modules, keep=range(NUM_LAYERS)) for text in (FITTING, HELD_OUT)]
    fit_prefill(stack, projections, *kept, {2, 4})
    again = fit_prefill(stack, projections, *kept, {1, 3, 4})
    assert again.records == fitted(model).records


def test_the_final_fit_uses_all_text_and_computes_what_trials_have_not(monkeypatch):
    model = tiny_model()
    settings = TrialSettings(True, True, Protocol(30, 10, Windows()))
    lab = PlanLab(model, kv_layout(model), FITTING, HELD_OUT, {"a": HELD_OUT[:1]}, settings)
    wanted = fitted(model)
    lab.try_plan({1, 3, 4})
    passed = []
    own = FullPass._state
    monkeypatch.setattr(FullPass, "_state", lambda *args: passed.append(args[1].entered.shape[0]) or own(*args))
    found = lab.fit({1, 3, 4})
    assert sum(passed) == NUM_LAYERS * (len(FITTING) - 4 + len(HELD_OUT) - 3)  # every sixth, every second is there
    assert found.num_tokens == wanted.num_tokens == sum(map(len, FITTING))
    for record, same in zip(found.records, wanted.records, strict=True):
        assert (record.ridge, record.kept) == (same.ridge, same.kept)
        assert record.held_out_after == pytest.approx(same.held_out_after, rel=1e-5)


def test_nothing_skipped_or_nothing_wanted_fits_nothing():
    model = tiny_model()
    assert fitted(model, skipped=()).records == ()
    found = fitted(model, refit=False, surrogate=False)
    assert (found.records, found.plan.weights, found.plan.surrogates) == ((), {}, {})


def test_sinks_are_not_fitted_on():
    """The first position is at full depth: whatever token stands there alone, the fit of a layer is not about it."""
    model = tiny_model()
    found = fitted(model, sink_tokens=4, skipped=(3, 4))
    without = fitted(model, sink_tokens=0, skipped=(3, 4))
    assert found.records != without.records and found.refitted_layers == (4,)


def test_windows_are_batched_by_length_and_never_padded():
    shapes = [tuple(batch.shape) for batch in batches([np.zeros(n, np.int64) for n in (8, 8, 3, 8)], batch_tokens=16)]
    assert shapes == [(2, 8), (1, 8), (1, 3)]


def test_linear_modules_are_those_inside_the_layers():
    assert not any("lm_head" in name for name in linear_modules(tiny_model()))


@pytest.mark.parametrize("family", ["llama", "bias"])
def test_where_no_window_outlasts_the_sink_nothing_is_fitted(family):
    model = tiny_model(CONFIGS[family]())
    found = fitted(model, skipped=(1, 2), sink_tokens=600)
    assert found.records and not any(record.kept for record in found.records)
    assert not found.plan.weights and not found.plan.surrogates
