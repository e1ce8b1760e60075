import numpy as np
import pytest
import torch

from pop_export.damage import DamageMeter, Protocol
from pop_export.layer_stack import LayerStack
from pop_export.reference import PrefillPlan, Reference
from pop_runtime.manifest import Windows
from pop_runtime.schedule import plan_turn
from tests.exporter.test_refit import CONFIGS, fitted
from tests.tiny_models import tiny_model

RNG = np.random.default_rng(5)
TEXTS = {"a": [RNG.integers(0, 250, 40) for _ in range(2)], "b": [RNG.integers(0, 250, 40)]}
CONTEXT, CONTINUATION = 30, 10


def meter(model, windows=None, texts=TEXTS):
    return DamageMeter(LayerStack(model), texts, Protocol(CONTEXT, CONTINUATION, windows or Windows()))


def reference_damage(model, plan, windows, text):
    """Return KL and agreement per position by the plain twin, fed as the runtime's schedule says."""
    ids = torch.from_numpy(text)

    def predictions(windows):
        reference = Reference(model, plan)
        rows = [reference.feed_stretches(ids[:CONTEXT], plan_turn(0, CONTEXT, windows, 512))]
        rows += [reference.feed(ids[at : at + 1], "decode") for at in range(CONTEXT, CONTEXT + CONTINUATION - 1)]
        return torch.stack(rows).double().log_softmax(-1)

    full, pruned = predictions(None), predictions(windows)
    return (full.exp() * (full - pruned)).sum(-1).numpy(), (full.argmax(-1) == pruned.argmax(-1)).numpy()


@pytest.mark.parametrize("family", ["llama", "bias", "one plus w norm", "fused", "fused conv1d with bias"])
@pytest.mark.parametrize("windows", [Windows(), Windows(3, 5)])
def test_damage_equals_that_of_the_plain_twin(family, windows):
    model = tiny_model(CONFIGS[family]())
    plan = fitted(model, sink_tokens=windows.sink_tokens).plan
    found = meter(model, windows).measure(plan)
    for source, texts in TEXTS.items():
        pairs = [reference_damage(model, plan, windows, text) for text in texts]
        kl, same = (np.concatenate(part) for part in zip(*pairs, strict=True))
        assert found[source].kl_mean_nats == pytest.approx(kl.mean(), rel=1e-3)
        assert found[source].kl_p95_nats == pytest.approx(np.quantile(kl, 0.95), rel=1e-3)
        assert (found[source].top1_agreement, found[source].num_positions) == (same.mean(), len(kl))
    by_window = meter(model, windows).kl_by_window(plan)
    assert (by_window[:2].mean(), by_window[2]) == pytest.approx([found[name].kl_mean_nats for name in ("a", "b")])
    assert found["all"].kl_mean_nats == pytest.approx((2 * found["a"].kl_mean_nats + found["b"].kl_mean_nats) / 3)


def test_skipping_nothing_or_only_the_last_layer_does_no_damage():
    measure = meter(tiny_model())
    assert measure.kl_by_window(PrefillPlan(frozenset())).mean() == 0
    assert measure.kl_by_window(PrefillPlan(frozenset({4}))).max() < 1e-9


@pytest.mark.parametrize("windows", [Windows(CONTEXT, 1), Windows(0, CONTEXT), Windows(20, 15), Windows(500, 500)])
def test_windows_that_cover_the_prompt_leave_no_damage(windows):
    measure = meter(tiny_model(), windows)
    assert measure.measure(PrefillPlan(frozenset({0, 1, 2})))["all"].kl_mean_nats == 0


def test_windows_help():
    model, plan = tiny_model(), PrefillPlan(frozenset({1, 3}))
    windowed, bare = (meter(model, windows).kl_by_window(plan) for windows in (Windows(4, 16), None))
    assert windowed.shape == (3,) and windowed.mean() < bare.mean()


def test_measuring_leaves_the_model_as_it_was():
    model = tiny_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    meter(model).measure(fitted(model).plan)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
