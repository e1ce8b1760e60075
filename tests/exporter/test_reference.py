"""The plain PyTorch twin, held against what a skipped layer should do, written out by hand for Llama."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pop_export.reference import PrefillPlan, Reference
from pop_runtime.schedule import Stretch

IDS = torch.randint(3, 250, (24,), generator=torch.Generator().manual_seed(5))


def _full_logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids[None]).logits[0, -1]


def test_nothing_skipped_is_the_full_model(llama):
    reference = Reference(llama, PrefillPlan(frozenset()))
    reference.feed(IDS[:-1], "prefill")
    torch.testing.assert_close(reference.feed(IDS[-1:], "decode"), _full_logits(llama), atol=1e-4, rtol=0)


def test_skipping_only_the_last_layer_changes_nothing(llama):
    reference = Reference(llama, PrefillPlan(frozenset({4})))
    reference.feed(IDS[:-1], "prefill")
    torch.testing.assert_close(reference.feed(IDS[-1:], "decode"), _full_logits(llama), atol=1e-4, rtol=0)


def test_skipping_a_middle_layer_changes_the_logits(llama):
    reference = Reference(llama, PrefillPlan(frozenset({2})))
    reference.feed(IDS[:-1], "prefill")
    assert (reference.feed(IDS[-1:], "decode") - _full_logits(llama)).abs().max() > 0.1


def test_a_skipped_layer_writes_k_and_v_of_the_hidden_state_that_reached_it(llama):
    skipped = 2
    with torch.no_grad():
        hidden = llama.model(IDS[None], output_hidden_states=True).hidden_states[skipped]  # enters layer 2
        layer = llama.model.layers[skipped]
        normed = layer.input_layernorm(hidden)
        shape = (1, len(IDS), 2, 16)
        key = layer.self_attn.k_proj(normed).view(shape).transpose(1, 2)
        value = layer.self_attn.v_proj(normed).view(shape).transpose(1, 2)
        cos, sin = llama.model.rotary_emb(normed, position_ids=torch.arange(len(IDS))[None])
        _, key = apply_rotary_pos_emb(key, key, cos, sin)
    reference = Reference(llama, PrefillPlan(frozenset({skipped})))
    reference.feed(IDS, "prefill")
    torch.testing.assert_close(reference.cache.layers[skipped].keys, key)
    torch.testing.assert_close(reference.cache.layers[skipped].values, value)
    # The next layer sees that hidden state unchanged: its keys are those of a model without layer 2.
    with torch.no_grad():
        after = llama.model.layers[3]
        expected = after.self_attn.v_proj(after.input_layernorm(hidden)).view(shape).transpose(1, 2)
    torch.testing.assert_close(reference.cache.layers[3].values, expected)


@pytest.mark.parametrize("cuts", [(0, 23), (0, 1, 23), (0, 7, 8, 20, 23)])
def test_pieces_change_nothing(llama, cuts):
    whole = Reference(llama, PrefillPlan(frozenset({1, 3})))
    whole.feed(IDS[:23], "prefill")
    pieces = Reference(llama, PrefillPlan(frozenset({1, 3})))
    stretches = [Stretch(a, z, "prefill") for a, z in pairwise(cuts)]
    found = pieces.feed_stretches(IDS, [*stretches, Stretch(23, 24, "decode")])
    torch.testing.assert_close(found, whole.feed(IDS[23:], "decode"), atol=1e-4, rtol=0)


def test_replaced_weights_act_in_prefill_alone_and_are_put_back(llama):
    name = "model.layers.1.self_attn.v_proj.weight"
    original = llama.state_dict()[name].clone()
    plan = PrefillPlan(frozenset({1}), weights={name: torch.zeros_like(original)})
    reference = Reference(llama, plan)
    reference.feed(IDS[:-1], "prefill")
    assert reference.cache.layers[1].values.abs().max() == 0
    reference.feed(IDS[-1:], "decode")
    assert reference.cache.layers[1].values[:, :, -1].abs().max() > 0
    assert torch.equal(llama.state_dict()[name], original)


def test_replaced_weights_are_put_back_after_an_error(llama):
    name = "model.layers.1.self_attn.v_proj.weight"
    original = llama.state_dict()[name].clone()
    reference = Reference(llama, PrefillPlan(frozenset({1}), weights={name: torch.zeros_like(original)}))
    with pytest.raises(IndexError):
        reference.feed(torch.tensor([10_000]), "prefill")  # outside the embedding
    assert torch.equal(llama.state_dict()[name], original)
