"""Verification: the bundle's graphs against PyTorch, and that a fault does not pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
import torch

from pop_export.bundle import save_graphs
from pop_export.graph.build import kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.reference import PrefillPlan, Reference
from pop_export.verify import NUM_STEPS, Check, prompt_length, require_passed, uneven_pieces, verify, verify_last_layer
from pop_runtime.errors import GateError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest, Plan, Windows
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import open_pair

IDS = np.random.default_rng(3).integers(3, 250, 96 + NUM_STEPS).tolist()


def _manifest(llama, skipped) -> Manifest:
    return Manifest(
        model={}, vocab_size=300, max_positions=256, plan=Plan(5, tuple(skipped), "user"), windows=Windows(),
        kv_dtype="float32", kv_layers=kv_layout(llama), precision="fp32", eos_token_ids=(), bos_token_id=None,
        pad_token_id=None, tokenizer=None, chat_template=None, generation_config=None,
    )  # fmt: skip


def _written(folder, llama, decode: ir.Model, skipped) -> Manifest:
    manifest = _manifest(llama, skipped)
    graphs = {"prefill.onnx": cut_prefill_graph(decode, PrefillPlan(frozenset(skipped))), "decode.onnx": decode.clone()}
    save_graphs(folder, graphs, "weights.bin")
    return manifest


@pytest.mark.parametrize("skipped", [(), (4,), (0,), (1, 3), (2, 3, 4), (0, 1, 2, 3)])
def test_any_plan_equals_its_pytorch_twin_whole_and_in_pieces(tmp_path, llama, llama_decode, skipped):
    manifest = _written(tmp_path, llama, llama_decode, skipped)
    found = verify(open_pair(tmp_path, manifest, 1), manifest, llama, PrefillPlan(frozenset(skipped)), IDS)
    assert [check.name for check in found.checks] == [
        "decode graph, prompt whole",
        "decode graph, prompt in uneven pieces",
        "pair, prompt whole",
        "pair, prompt in uneven pieces",
    ]
    assert max(check.largest_difference for check in found.checks) < 1e-3
    require_passed(found.checks)


def test_a_pair_that_skips_another_layer_than_planned_is_refused(tmp_path, llama, llama_decode):
    manifest = _written(tmp_path, llama, llama_decode, (2,))
    found = verify(open_pair(tmp_path, manifest, 1), manifest, llama, PrefillPlan(frozenset({1})), IDS)
    with pytest.raises(GateError, match="pair, prompt whole: expected logits within"):
        require_passed(found.checks)


def test_a_decode_graph_with_one_altered_weight_is_refused(tmp_path, llama, llama_decode):
    altered = llama_decode.clone()
    bias = altered.graph.initializers["model.layers.2.input_layernorm.weight"]
    bias.const_value = ir.tensor(bias.const_value.numpy() * 1.01, name=bias.name)
    manifest = _written(tmp_path, llama, altered, (1,))
    found = verify(open_pair(tmp_path, manifest, 1), manifest, llama, PrefillPlan(frozenset({1})), IDS)
    with pytest.raises(GateError, match="decode graph, prompt whole"):
        require_passed(found.checks)


def test_skipping_only_the_last_layer_loses_nothing_whatever_the_plan(tmp_path, llama, llama_decode):
    manifest = _written(tmp_path, llama, llama_decode, (1, 2))
    sessions = open_pair(tmp_path, manifest, 1)
    check = verify_last_layer(tmp_path, sessions, manifest, llama_decode, llama, IDS)
    assert check.passed and check.largest_difference < 1e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.onnx", "prefill.onnx", "weights.bin"]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_short_prompts_follow_the_boundary_rule(tmp_path, llama, llama_decode, num_tokens):
    """With one token there is nothing to prune; with more, the last one runs at full depth."""
    ids, skipped = IDS[:num_tokens], (1, 3)
    manifest = _written(tmp_path, llama, llama_decode, skipped)
    sequence = Sequence(open_pair(tmp_path, manifest, 1), allocate_cache(manifest, 1, 8))
    logits = sequence.append(ids)
    assert sequence.num_pruned() == num_tokens - 1
    reference = Reference(llama, PrefillPlan(frozenset(skipped)))
    if num_tokens > 1:
        reference.feed(torch.tensor(ids[:-1]), "prefill")
    np.testing.assert_allclose(logits, reference.feed(torch.tensor(ids[-1:]), "decode").numpy(), atol=1e-3)


def test_uneven_pieces_cover_every_token_once_and_hold_a_single_one():
    for num_tokens in (1, 2, 3, 40, 95):
        pieces = uneven_pieces(num_tokens, "prefill")
        assert [at for piece in pieces for at in range(piece.start, piece.stop)] == list(range(num_tokens))
    assert 1 in [piece.stop - piece.start for piece in uneven_pieces(40, "prefill")]


def test_the_verification_prompt_reaches_beyond_an_attention_window(llama):
    assert prompt_length(llama) == 96
    windowed = dataclasses.make_dataclass("Windowed", ["config"])(
        type(
            "Config", (),
            {"sliding_window": 512, "max_position_embeddings": 4096, "get_text_config": lambda self, **_: self},
        )()
    )  # fmt: skip
    assert prompt_length(windowed) == 701


def test_a_difference_that_is_no_number_does_not_pass():
    check = Check("pair", float("nan"), 1.0, 1e-3)
    assert not check.passed
    with pytest.raises(GateError, match="found nan; no bundle was written"):
        require_passed([check])
