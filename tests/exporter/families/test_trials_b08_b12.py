"""Trials B08 (prefill against one token at a time) and B12 (sizes 0, 1 and 2; nothing frozen at export)."""

import numpy as np
import pytest

from pop_runtime.errors import UsageError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.schedule import Stretch
from pop_runtime.sequence import Sequence
from tests.exporter.families import proof


def fed(exported, ids, feeds):
    sequence = Sequence(exported.sessions, allocate_cache(exported.manifest, 1, 24))
    logits = [sequence.feed(ids[feed.start : feed.stop], feed.stage) for feed in feeds][-1]
    return sequence, logits


def single_tokens(num_tokens):
    return [Stretch(at, at + 1, "decode") for at in range(num_tokens)]


def largest(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_a_prompt_fed_at_once_leaves_what_single_tokens_leave(export_of, num_tokens):
    exported, ids = export_of("llama"), proof.prompt_ids(num_tokens)
    whole, whole_logits = fed(exported, ids, [Stretch(0, num_tokens, "decode")])
    singly, single_logits = fed(exported, ids, single_tokens(num_tokens))
    assert whole.num_cached == singly.num_cached == num_tokens
    assert largest(whole_logits, single_logits) <= 1e-4
    for name, buffer in whole.cache.buffers.items():
        assert largest(buffer[:, :, :num_tokens], singly.cache.buffers[name][:, :, :num_tokens]) <= 1e-4
        assert not buffer[:, :, num_tokens:].any()


@pytest.mark.parametrize("num_tokens", range(2, 18))
def test_pruned_prefill_leaves_the_layers_before_the_first_skipped_one_as_they_are(export_of, num_tokens):
    exported, ids = export_of("llama"), proof.prompt_ids(num_tokens)
    last = Stretch(num_tokens - 1, num_tokens, "decode")
    pruned, _ = fed(exported, ids, [Stretch(0, num_tokens - 1, "prefill"), last])
    singly, _ = fed(exported, ids, single_tokens(num_tokens))
    for layer in (0, 1):  # K and V of layer 1, the first skipped one, still come from a whole layer 0
        for part in ("key", "value"):
            name = f"past_key_values.{layer}.{part}"
            found, wanted = pruned.cache.buffers[name], singly.cache.buffers[name]
            assert largest(found[:, :, : num_tokens - 1], wanted[:, :, : num_tokens - 1]) <= 1e-4
    assert pruned.num_cached == num_tokens


def test_no_token_is_an_error_and_one_or_two_are_not(export_of):
    exported, ids = export_of("llama"), proof.prompt_ids(2)
    with pytest.raises(UsageError, match="at least one token"):
        Sequence(exported.sessions, allocate_cache(exported.manifest, 1, 8)).append([])
    for num_tokens in (1, 2):
        truth = proof.true_logits(exported.model, ids[:num_tokens], num_tokens)[0]
        full = Sequence(exported.sessions, allocate_cache(exported.manifest, 1, 8)).append(ids[:num_tokens], "full")
        assert largest(full, truth) <= proof.TOLERANCE
    pruned = Sequence(exported.sessions, allocate_cache(exported.manifest, 1, 8)).append(ids[:1], "pop")
    assert largest(pruned, proof.true_logits(exported.model, ids[:1], 1)[0]) <= proof.TOLERANCE


@pytest.mark.parametrize("lengths", [(5,), (5, 1), (7, 1, 2)])
def test_one_export_serves_batches_of_one_to_three_rows(export_of, lengths):
    assert proof.prove_batch(export_of("llama"), proof.prompt_ids(), lengths) <= proof.TOLERANCE


def test_batch_sequence_and_capacity_are_symbolic_in_both_graphs(export_of):
    exported = export_of("llama")
    for session in (exported.sessions.prefill, exported.sessions.decode):
        for value in session.get_inputs():
            axes = (0, 2) if value.name.startswith("past_key_values.") else (0, 1)
            assert all(isinstance(value.shape[axis], str) for axis in axes), (value.name, value.shape)
