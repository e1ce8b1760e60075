"""The ablation benchmark: its variants against the exporter's reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from benchmarks import ablation
from benchmarks.ablation import (
    VARIANTS,
    Variant,
    compared,
    continuation_logits,
    markdown,
    measure_others,
    measure_plans,
)
from pop_export.evaluation.scores import kl_divergence, log_softmax
from pop_export.layer_stack import LayerStack
from pop_export.reference import PrefillPlan, Reference
from pop_runtime.manifest import Windows
from pop_runtime.schedule import plan_turn
from tests.tiny_models import TINY, tiny_model

CONTEXT, CONTINUATION = 24, 6
PLAN = PrefillPlan(frozenset({1, 3}))
GEMMA = {**TINY, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
         "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma"])
def model(request):
    if request.param == "llama":
        return tiny_model()
    return tiny_model(transformers.Gemma3TextConfig(**GEMMA), norm_offset=0.0)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 250, (CONTEXT + CONTINUATION,), generator=torch.Generator().manual_seed(0))


def _reference(model, ids, plan, windows):
    reference = Reference(model, plan)
    rows = [reference.feed_stretches(ids[:CONTEXT], plan_turn(0, CONTEXT, windows, 512))]
    rows += [reference.feed(ids[at : at + 1], "decode") for at in range(CONTEXT, len(ids) - 1)]
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("windows", [Windows(0, 1), Windows(3, 5)])
def test_the_published_method_and_its_windows_are_the_reference(model, ids, windows):
    variant = Variant("", sink_tokens=windows.sink_tokens, boundary_tokens=windows.boundary_tokens)
    found = continuation_logits(model, ids, CONTEXT, PLAN, variant)
    assert np.abs(found - _reference(model, ids, PLAN, windows)).max() < 1e-4


def test_no_layers_are_the_full_model_whatever_the_variant(model, ids):
    full = _reference(model, ids, PrefillPlan(frozenset()), None)
    for variant in VARIANTS:
        found = continuation_logits(model, ids, CONTEXT, PrefillPlan(frozenset()), variant)
        assert np.abs(found - full).max() < 1e-4, variant.name


def test_without_a_boundary_the_first_token_comes_from_the_pruned_pass(model, ids):
    found = continuation_logits(model, ids, CONTEXT, PLAN, Variant("", boundary_tokens=0))
    reference = Reference(model, PLAN)
    first = reference.feed(ids[:CONTEXT], "prefill")
    second = reference.feed(ids[CONTEXT : CONTEXT + 1], "decode")
    assert np.abs(found[:2] - torch.stack([first, second]).numpy()).max() < 1e-4


def test_skipping_in_both_stages_is_the_smaller_model(ids):
    model = tiny_model()
    found = continuation_logits(model, ids, CONTEXT, PLAN, Variant("", both_stages=True))
    model.model.layers = torch.nn.ModuleList([layer for at, layer in enumerate(model.model.layers) if at not in (1, 3)])
    with torch.no_grad():
        wanted = model(input_ids=ids[None], use_cache=False).logits[0, CONTEXT - 1 : -1].numpy()
    assert np.abs(found - wanted).max() < 1e-4


def test_without_kv_what_skipped_layers_wrote_for_the_prompt_does_not_matter(model, ids):
    weights = {
        name: torch.randn_like(value) for name, value in model.named_parameters() if "layers.3.self_attn.k_proj" in name
    }
    other = PrefillPlan(PLAN.skipped_layers, weights)
    hidden = Variant("", has_kv=False)
    found, changed = (continuation_logits(model, ids, CONTEXT, plan, hidden) for plan in (PLAN, other))
    assert np.abs(found - changed).max() < 1e-5
    seen = [continuation_logits(model, ids, CONTEXT, plan, Variant("")) for plan in (PLAN, other)]
    assert np.abs(seen[0] - seen[1]).max() > 1e-2


def test_the_table_has_a_column_per_ratio():
    name = VARIANTS[0].name
    rows = [
        {"ratio": ratio, "variant": name, "kl_mean_nats": 0.1234, "top1_agreement": 0.9} for ratio in (1 / 6, 1 / 2)
    ]
    assert markdown(rows) == f"| variant | 17% | 50% |\n|---|---|---|\n| {name} | 0.123 (90.0%) | 0.123 (90.0%) |"


def test_the_fast_measurement_and_the_forward_pass_agree(model, monkeypatch):
    variants = [
        Variant(f"{sink}/{boundary}", False, sink, boundary) for sink, boundary in ((0, 1), (4, 1), (3, 9), (4, 64))
    ]
    monkeypatch.setattr(ablation, "VARIANTS", variants)
    ids = torch.randint(0, 250, (50,), generator=torch.Generator().manual_seed(1))
    found = measure_plans(LayerStack(model), {"a": ids.numpy()[None]}, 40, {(0.4, False, None): PLAN})
    rows = {row["variant"]: row for row in found}
    full = continuation_logits(model, ids, 40, PrefillPlan(frozenset()), VARIANTS[0])
    for variant in variants:
        divergence, agreement = compared(full, continuation_logits(model, ids, 40, PLAN, variant))
        assert rows[variant.name]["kl_mean_nats"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
        assert rows[variant.name]["top1_agreement"] == agreement
    assert rows["4/64"]["kl_mean_nats"] < 1e-6 < rows["0/1"]["kl_mean_nats"]


def test_every_other_variant_has_a_row_per_ratio(ids):
    texts, plans = {"a": ids.numpy()[None]}, {(0.2, False, None): PrefillPlan(frozenset({4})), (0.4, False, None): PLAN}
    rows = measure_others(tiny_model(), texts, CONTEXT, plans)
    assert {(row["ratio"], row["variant"]) for row in rows} == {
        (ratio, variant.name) for ratio in (0.2, 0.4) for variant in VARIANTS if not variant.is_plan
    }
    assert all(row["kl_mean_nats"] > 0 and set(row["kl_by_file"]) == {"a"} for row in rows)


def test_the_comparison_is_that_of_pop_eval(ids):
    full, other = (continuation_logits(tiny_model(), ids, CONTEXT, PLAN, variant) for variant in VARIANTS[:2])
    divergence, agreement = compared(full, other)
    assert divergence == pytest.approx(kl_divergence(log_softmax(full), log_softmax(other)).mean(), abs=1e-6)
    assert agreement == np.mean(full.argmax(axis=1) == other.argmax(axis=1))
