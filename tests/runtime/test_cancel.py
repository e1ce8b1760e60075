"""Leaving an answer at any moment, from any thread."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import pop_runtime
from pop_runtime.cancel import Cancellation, Cancelled
from tests.runtime.conftest import chat_files
from tests.runtime.tiny_bundle import PROMPT, E, ids_of, make_bundle, tiny_weights

LONG = 20_000


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> pop_runtime.Model:
    """A model whose reading of `LONG` tokens at once takes seconds: the attention is quadratic."""
    weights = tiny_weights()
    weights["positions"] = np.zeros((LONG + 100, E), np.float32)
    folder = make_bundle(tmp_path_factory.mktemp("slow"), weights, text_files=chat_files(), max_positions=LONG + 100)
    return pop_runtime.load(folder, threads=1)


def _long_prompt() -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(3, 250, LONG)]


def test_a_run_in_progress_heeds_the_flag(slow_model: pop_runtime.Model) -> None:
    sequence, cancellation = slow_model.sequence(20), Cancellation()
    sequence.append(PROMPT[:6], cancellation=cancellation)
    cancellation.cancel()
    for stage in ("prefill", "decode"):
        with pytest.raises(Cancelled):
            sequence.feed(PROMPT[6:9], stage, cancellation)  # type: ignore[arg-type]
    assert (len(sequence), sequence.num_cached) == (6, 6)
    fresh = slow_model.sequence(20)
    fresh.append(PROMPT[:6])
    np.testing.assert_array_equal(sequence.append(PROMPT[6:9]), fresh.append(PROMPT[6:9]))


def test_reading_is_broken_off_and_undone(slow_model: pop_runtime.Model) -> None:
    conversation = slow_model.conversation()
    conversation.append(PROMPT[:6])
    ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    tokens, provenance = conversation.token_ids, conversation.provenance
    conversation.append(_long_prompt())
    generation = conversation.generate(prefill_chunk_tokens=64, ignore_eos=True)
    timer = threading.Timer(0.3, conversation.cancel)
    timer.start()
    assert list(generation) == []
    timer.join()
    assert generation.stop_reason == "cancelled" and not generation.has_read_prompt
    assert conversation.token_ids == tokens
    assert conversation.provenance[: len(provenance)] == provenance
    conversation.rewind(len(tokens))  # what was to be read is dropped
    conversation.append(PROMPT[6:9])
    found = ids_of(conversation.generate(max_new_tokens=4, ignore_eos=True))
    fresh = slow_model.conversation()
    fresh.append(PROMPT[:6])
    ids_of(fresh.generate(max_new_tokens=3, ignore_eos=True))
    fresh.append(PROMPT[6:9])
    assert found == ids_of(fresh.generate(max_new_tokens=4, ignore_eos=True))


def test_writing_is_broken_off_between_tokens(slow_model: pop_runtime.Model) -> None:
    generation = slow_model.generate(PROMPT[:6], max_new_tokens=LONG, ignore_eos=True)
    handed = [next(generation).id for _ in range(5)]
    thread = threading.Thread(target=generation.cancel)
    thread.start()
    thread.join()
    assert list(generation) == []
    assert generation.stop_reason == "cancelled"
    assert generation.token_ids == handed == generation.sequence.token_ids[6:]


def test_a_cancelled_turn_is_read_by_the_next_answer(slow_model: pop_runtime.Model) -> None:
    wanted = ids_of(slow_model.generate("hi", max_new_tokens=4, ignore_eos=True))
    conversation = slow_model.conversation()
    conversation.append("hi")
    generation = conversation.generate(max_new_tokens=4, ignore_eos=True)
    conversation.cancel()
    assert list(generation) == [] and generation.stop_reason == "cancelled"
    assert ids_of(conversation.generate(max_new_tokens=4, ignore_eos=True)) == wanted


def test_cancelling_after_the_end_changes_nothing(slow_model: pop_runtime.Model) -> None:
    generation = slow_model.generate(PROMPT[:6], max_new_tokens=3, ignore_eos=True)
    handed = ids_of(generation)
    generation.cancel()
    generation.close()
    assert (generation.stop_reason, generation.token_ids) == ("length", handed)
    slow_model.conversation().cancel()  # nothing in progress


def test_leaving_within_a_character_takes_its_tokens_back(chat_model: pop_runtime.Model) -> None:
    for seed in range(100):
        generation = chat_model.generate("hi", max_new_tokens=30, temperature=3.0, seed=seed, ignore_eos=True)
        for token in generation:
            if not token.text and token.id < 256:  # the first byte of a character that came whole
                generation.close()
        if generation.stop_reason == "cancelled":
            break
    assert generation.stop_reason == "cancelled"
    kept = generation.sequence.token_ids[len(generation.request.prompt_token_ids) :]
    assert chat_model.tokenizer is not None
    assert chat_model.tokenizer.decode(kept) == generation.text


def test_an_answer_that_is_dropped_frees_its_cache_without_a_collection(slow_model: pop_runtime.Model) -> None:
    gc.disable()
    try:
        generation = slow_model.generate(PROMPT[:6], ignore_eos=True)
        next(generation)
        buffer = weakref.ref(next(iter(generation.sequence.cache.buffers.values())))
        del generation
        assert buffer() is None
    finally:
        gc.enable()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_thousand_cancelled_answers_leave_no_memory_behind(slow_model: pop_runtime.Model) -> None:
    conversation = slow_model.conversation()
    conversation.append(PROMPT[:6])
    ids_of(conversation.generate(max_new_tokens=2, ignore_eos=True))
    length = len(conversation)
    sizes = []
    for count in range(1100):
        conversation.append(PROMPT * 5)
        generation = conversation.generate(max_new_tokens=50, ignore_eos=True, prefill_chunk_tokens=32)
        for _ in range(count % 4):
            next(generation)
        if count % 2:
            generation.cancel()
            assert list(generation) == []
        else:
            generation.close()
        alone = slow_model.generate(PROMPT, max_new_tokens=50, ignore_eos=True)
        next(alone)
        alone.close()
        conversation.rewind(length)
        if count >= 100:  # warm by then
            sizes.append(_resident_bytes())
    assert max(sizes[-100:]) - max(sizes[:100]) < 4 << 20
