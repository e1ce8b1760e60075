"""Tuning of fitted projections: what it changes, what it leaves alone, and that it lowers what it says it lowers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pop_export import ExportConfig
from pop_export.damage import Damage, DamageMeter, Protocol
from pop_export.decoder import frozen
from pop_export.full_pass import batches
from pop_export.layer_stack import LayerStack
from pop_export.reference import PrefillPlan
from pop_export.text_run import resume_text, run_text
from pop_export.tune import tune
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Windows
from tests.exporter.test_refit import CONFIGS, fitted
from tests.tiny_models import tiny_model

RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(0, 250, 96) for _ in range(6)]
SINK, BOUNDARY = 2, 8
WINDOWS = Windows(SINK, BOUNDARY)


def _runs(stack: LayerStack, texts=TEXTS):
    return [run_text(stack, ids, SINK) for ids in batches(texts)]


def _meter(stack: LayerStack):
    meter = DamageMeter(stack, {"a": TEXTS}, Protocol(72, 24, WINDOWS))
    return lambda plan: meter.measure(plan)["all"]


def _tuned(model, plan, measure=None, steps=12, texts=TEXTS):
    stack = LayerStack(model)
    return tune(plan, _runs(stack, texts), measure or _meter(stack), steps=steps, sink_tokens=SINK,
                boundary_tokens=BOUNDARY, seed=0)  # fmt: skip


def _damage(kl: float) -> Damage:
    return Damage(kl, kl, 0.5, 10)


@pytest.mark.parametrize("family", CONFIGS)
def test_damage_falls_and_only_k_and_v_of_the_plan_change(family):
    model = tiny_model(CONFIGS[family]())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    plan = fitted(model, sink_tokens=SINK).plan
    found, record = _tuned(model, plan)
    assert record is not None and record.kept and record.after.kl_mean_nats < record.before.kl_mean_nats
    assert record.before == _meter(LayerStack(model))(plan) and record.after == _meter(LayerStack(model))(found)
    assert found.weights.keys() == plan.weights.keys() and found.surrogates == plan.surrogates
    assert not any(found.weights[name].equal(weight) for name, weight in plan.weights.items() if "bias" not in name)
    assert not any(weight.requires_grad for weight in found.weights.values())
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_queries_within_a_fused_weight_stay():
    model = tiny_model(CONFIGS["fused"]())
    plan = fitted(model, sink_tokens=SINK).plan
    found, _ = _tuned(model, plan)
    for name, weight in plan.weights.items():
        assert found.weights[name][:64].equal(weight[:64]) and not found.weights[name][64:].equal(weight[64:])


def test_gradients_are_those_of_finite_differences():
    model = tiny_model().double()
    stack = LayerStack(model)
    plan = fitted(model, sink_tokens=SINK).plan
    run = _runs(stack, TEXTS[:1])[0]
    name = next(iter(plan.weights))
    weight = plan.weights[name].clone().requires_grad_()

    def loss(changed):
        left = run.after_pruned(PrefillPlan(plan.skipped_layers, {**plan.weights, name: changed}, plan.surrogates),
                                SINK, 60, 90)  # fmt: skip
        return left.square().sum()

    with frozen(model):
        (gradient,) = torch.autograd.grad(loss(weight), weight)
        step = 0.01 * gradient / gradient.norm()  # norms compute in float32: a smaller one drowns in rounding
        with torch.no_grad():
            slope = (loss(weight + step) - loss(weight - step)) / 0.02
    assert float(gradient.norm()) == pytest.approx(float(slope), rel=0.01)


@pytest.mark.parametrize("sink", [0, 3])
def test_a_text_that_was_read_before_is_resumed(sink):
    model = tiny_model()
    stack = LayerStack(model)
    plan = fitted(model, skipped=(2, 4), sink_tokens=sink).plan
    ids = batches(TEXTS)[0]
    run = run_text(stack, ids, sink)
    resumed = resume_text(stack, ids, sink, 2, run.entered[2], run.left)
    with torch.no_grad():
        wanted, found = (each.after_pruned(plan, sink, 50, 70) for each in (run, resumed))
        alone = resumed.row(1).after_pruned(plan, sink, 50, 70)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(alone, wanted[1:2], rtol=1e-3, atol=1e-4)


def test_projections_stay_where_other_text_does_not_gain():
    model = tiny_model()
    plan = fitted(model, sink_tokens=SINK).plan
    for after in (0.3, 0.2, float("nan")):
        damages = iter([_damage(0.2), _damage(after)])
        found, record = _tuned(model, plan, measure=lambda _, damages=damages: next(damages), steps=2)
        assert found is plan and record is not None and not record.kept


def test_the_same_seed_gives_the_same_weights():
    model = tiny_model()
    plan = fitted(model, sink_tokens=SINK).plan
    first, second = (_tuned(model, plan, steps=4)[0] for _ in range(2))
    assert all(first.weights[name].equal(second.weights[name]) for name in plan.weights)


@pytest.mark.parametrize(("steps", "texts"), [(0, TEXTS), (5, [text[:63] for text in TEXTS])])
def test_no_steps_or_no_text_long_enough_changes_nothing(steps, texts):
    model = tiny_model()
    plan = fitted(model, sink_tokens=SINK).plan
    assert _tuned(model, plan, steps=steps, texts=texts) == (plan, None)


@pytest.mark.parametrize(("sink", "is_tuned"), [(47, True), (49, False)])
def test_a_sink_may_be_half_of_the_text(sink, is_tuned):
    model = tiny_model()
    stack, plan = LayerStack(model), fitted(model).plan
    runs = [run_text(stack, ids, sink) for ids in batches(TEXTS)]
    damages = iter([_damage(0.2), _damage(0.1)])
    _, record = tune(plan, runs, lambda _: next(damages), steps=20, sink_tokens=sink, boundary_tokens=64, seed=0)
    assert (record is not None) == is_tuned


def test_a_plan_without_weights_of_its_own_has_nothing_to_tune():
    plan = PrefillPlan(frozenset({1}))
    assert _tuned(tiny_model(), plan) == (plan, None)


def test_fewer_steps_than_none_are_refused():
    with pytest.raises(UsageError, match="--tune-steps: expected at least 0, found -1"):
        ExportConfig(model="m", out=Path("out"), tune_steps=-1)


def test_without_steps_an_export_says_that_nothing_was_tuned(quick_export):
    assert quick_export(tune_steps=0, prune_layers="1,3").report["refit"]["tuning"] is None
