"""Turns on one sequence: what is fed where, and what the cache remembers."""

import numpy as np
import pytest

import pop_runtime
from pop_runtime.errors import UsageError
from pop_runtime.kv_cache import FULL, PRUNED
from pop_runtime.manifest import Windows
from tests.runtime.tiny_bundle import ATOL, MAX_POSITIONS, PROMPT, Twin, ids_of, tiny_weights


def test_later_turns_append_and_generated_tokens_stay_full(model: pop_runtime.Model) -> None:
    sequence, twin = model.sequence(MAX_POSITIONS), Twin(tiny_weights())
    first = ids_of(model.generate(PROMPT[:9], sequence=sequence, max_new_tokens=4, ignore_eos=True))
    assert first == (wanted := twin.greedy(PROMPT[:9], 4))
    second = ids_of(model.generate(PROMPT[9:20], sequence=sequence, max_new_tokens=5, ignore_eos=True))
    assert second == twin.greedy(PROMPT[9:20], 5)
    assert sequence.token_ids == [*PROMPT[:9], *wanted, *PROMPT[9:20], *second]
    assert sequence.num_cached == len(sequence) - 1  # the last token is fed by the next turn
    assert sequence.depth.tolist() == [PRUNED] * 8 + [FULL] * 5 + [PRUNED] * 10 + [FULL] * 5


def test_the_sink_of_a_later_turn_is_over(model: pop_runtime.Model) -> None:
    sequence, windows = model.sequence(30), Windows(4, 2)
    sequence.append(PROMPT[:3], windows=windows)
    sequence.append(PROMPT[3:12], windows=windows)
    sequence.append(PROMPT[12:20], windows=windows)
    assert sequence.depth.tolist() == [FULL] * 4 + [PRUNED] * 6 + [FULL] * 2 + [PRUNED] * 6 + [FULL] * 2


def test_turns_may_mix_pruned_and_full(model: pop_runtime.Model) -> None:
    sequence, twin = model.sequence(30), Twin(tiny_weights())
    sequence.append(PROMPT[:6], prefill="full")
    logits = sequence.append(PROMPT[6:12])
    wanted = [twin.feed(token, 6 <= index < 11) for index, token in enumerate(PROMPT[:12])][-1]
    np.testing.assert_allclose(logits, wanted, atol=ATOL)


def test_logits_are_the_callers_own(model: pop_runtime.Model) -> None:
    sequence = model.sequence(30)
    logits = sequence.append(PROMPT[:6])
    before = logits.copy()
    sequence.append(PROMPT[6:9])
    np.testing.assert_array_equal(logits, before)


def test_a_later_turn_takes_raw_text_but_no_template(chat_model: pop_runtime.Model) -> None:
    sequence = chat_model.sequence(MAX_POSITIONS)
    ids_of(chat_model.generate("hi", sequence=sequence, max_new_tokens=2))
    with pytest.raises(UsageError, match="expected raw text or token ids for a later turn"):
        chat_model.generate("hi", sequence=sequence)
    assert ids_of(chat_model.generate("hi", sequence=sequence, raw=True, max_new_tokens=2, ignore_eos=True))


def test_generation_goes_no_further_than_the_sequence(model: pop_runtime.Model) -> None:
    sequence = model.sequence(12)
    assert len(ids_of(model.generate(PROMPT[:10], sequence=sequence, ignore_eos=True))) == 2
    with pytest.raises(UsageError, match="expected fewer than 12 tokens, so that one more fits, found 13"):
        model.generate(PROMPT[:1], sequence=sequence)


def test_a_failed_turn_leaves_the_sequence_as_it_was(model: pop_runtime.Model) -> None:
    sequence = model.sequence(12)
    sequence.append(PROMPT[:6])
    with pytest.raises(UsageError, match="expected at most 12 tokens, found 13"):
        sequence.append(PROMPT[:7])
    sequence.accept(PROMPT[6])
    twin = Twin(tiny_weights())
    wanted = [twin.feed(token, index < 5) for index, token in enumerate(PROMPT[:7])][-1]
    np.testing.assert_allclose(sequence.step(), wanted, atol=ATOL)


def test_a_full_sequence_accepts_no_token(model: pop_runtime.Model) -> None:
    sequence = model.sequence(6)
    sequence.append(PROMPT[:6])
    with pytest.raises(UsageError, match="expected at most 6 tokens, found 7"):
        sequence.accept(1)


@pytest.mark.parametrize("capacity", [0, -1, MAX_POSITIONS + 1])
def test_a_sequence_beyond_the_models_positions_is_refused(model: pop_runtime.Model, capacity: int) -> None:
    with pytest.raises(UsageError, match=f"capacity: expected 1..{MAX_POSITIONS} tokens, found {capacity}"):
        model.sequence(capacity)
