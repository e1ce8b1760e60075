"""Tokens, text and limits of single prompts and of turns, against the numpy twin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

import pop_runtime
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Windows
from pop_runtime.sequence import Sequence
from tests.runtime.tiny_bundle import (
    ATOL,
    END,
    MAX_POSITIONS,
    PROMPT,
    Twin,
    ids_of,
    make_bundle,
    tiny_weights,
    with_generation_config,
)


@pytest.mark.parametrize("length", [1, 2, 3, 40])
@pytest.mark.parametrize("prefill", ["pop", "full"])
def test_greedy_tokens_are_those_of_the_twin(model: pop_runtime.Model, length: int, prefill: Any) -> None:
    prompt = PROMPT[:length]
    pruned = None if prefill == "pop" else [False] * length
    wanted = Twin(tiny_weights()).greedy(prompt, 16, pruned)
    assert ids_of(model.generate(prompt, max_new_tokens=16, prefill=prefill, ignore_eos=True)) == wanted


def test_the_twin_can_see_what_pruning_changes() -> None:
    pruned, full = Twin(tiny_weights()), Twin(tiny_weights())
    for index, token in enumerate(PROMPT):
        logits = pruned.feed(token, index < len(PROMPT) - 1), full.feed(token, pruned=False)
    assert np.abs(logits[0] - logits[1]).max() > 100 * ATOL


@pytest.mark.parametrize(("sink", "boundary"), [(0, 1), (3, 1), (0, 8), (5, 9), (20, 20), (0, 100)])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_windows_and_chunks_decide_which_tokens_are_pruned(
    model: pop_runtime.Model, sink: int, boundary: int, chunk: int
) -> None:
    sequence = Sequence(model.sessions, allocate_cache(model.manifest, 1, 50))
    logits = sequence.append(PROMPT, windows=Windows(sink, boundary), chunk_tokens=chunk)
    twin, end = Twin(tiny_weights()), len(PROMPT) - boundary
    wanted = [twin.feed(token, sink <= index < end) for index, token in enumerate(PROMPT)][-1]
    np.testing.assert_allclose(logits, wanted, atol=ATOL)
    assert sequence.num_pruned() == max(end - sink, 0)


def test_the_manifests_windows_hold_unless_an_argument_says_otherwise(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path, windows=Windows(2, 5))
    model = pop_runtime.load(folder, threads=1)
    generation = model.generate(PROMPT, max_new_tokens=1)
    ids_of(generation)
    assert generation.stats.num_pruned_tokens == 33
    generation = model.generate(PROMPT, max_new_tokens=1, sink_tokens=0, boundary_tokens=1)
    ids_of(generation)
    assert generation.stats.num_pruned_tokens == 39
    assert generation.stats.settings["sink_tokens"] == 0


def test_skipping_nothing_is_the_full_model(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, skipped=()), threads=1)
    assert ids_of(model.generate(PROMPT, max_new_tokens=8)) == ids_of(
        model.generate(PROMPT, max_new_tokens=8, prefill="full")
    )


def test_half_precision_runs_over_half_precision_buffers(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, dtype="float16"), threads=1)
    sequence = model.sequence(40)
    logits = sequence.append(PROMPT)
    assert next(iter(sequence.cache.buffers.values())).dtype == np.float16
    twin = Twin(tiny_weights())
    wanted = [twin.feed(token, index < len(PROMPT) - 1) for index, token in enumerate(PROMPT)][-1]
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, wanted, atol=0.2)  # 11 bits of mantissa, logits of about 13, weights rounded too


def test_bfloat16_buffers_hold_two_bytes_a_number(model: pop_runtime.Model) -> None:
    cache = allocate_cache(dataclasses.replace(model.manifest, kv_dtype="bfloat16"), 2, 8)
    assert {buffer.dtype.itemsize for buffer in cache.buffers.values()} == {2}
    binding = Mock()
    cache.bind(binding)
    _, _, _, onnx_type, shape, _ = binding.bind_input.call_args.args
    assert (onnx_type, shape) == (onnx.TensorProto.BFLOAT16, [2, 2, 8, 16])


# End tokens


@pytest.mark.parametrize("ends", [(END, 5), (5, END), (5,)])
def test_any_of_several_end_tokens_ends_the_text_and_is_not_part_of_it(tmp_path: Path, ends: tuple[int, ...]) -> None:
    free = Twin(tiny_weights()).greedy(PROMPT[:6], 10)
    end = free[5]
    stop = free.index(end)
    model = pop_runtime.load(make_bundle(tmp_path, eos_token_ids=tuple(end if x == 5 else x for x in ends)), threads=1)
    generation = model.generate(PROMPT[:6], max_new_tokens=10)
    assert ids_of(generation) == free[:stop] == generation.token_ids
    assert generation.stop_reason == "end"


def test_without_an_end_token_the_reason_is_length(model: pop_runtime.Model) -> None:
    generation = model.generate(PROMPT[:6], max_new_tokens=10, ignore_eos=True)
    assert generation.stop_reason is None
    assert len(ids_of(generation)) == 10
    assert generation.stop_reason == "length"


def test_an_end_token_outside_the_vocabulary_does_no_harm(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, eos_token_ids=(100_000,)), threads=1)
    assert len(ids_of(model.generate(PROMPT[:6], max_new_tokens=4))) == 4


# Limits


def test_total_never_exceeds_the_positions(model: pop_runtime.Model) -> None:
    prompt = (PROMPT * 2)[: MAX_POSITIONS - 1]
    generation = model.generate(prompt, max_new_tokens=8, ignore_eos=True)
    assert len(ids_of(generation)) == 1
    assert generation.stop_reason == "length"


@pytest.mark.parametrize("length", [MAX_POSITIONS, MAX_POSITIONS + 1, 200])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(model: pop_runtime.Model, length: int) -> None:
    with pytest.raises(UsageError, match=f"expected fewer than {MAX_POSITIONS} tokens.*, found {length}"):
        model.generate((PROMPT * 5)[:length])
    assert len(ids_of(model.generate(PROMPT[:3], max_new_tokens=2, ignore_eos=True))) == 2


def test_buffers_are_sized_by_the_request_not_by_the_model(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, max_positions=1 << 20), threads=1)
    generation = model.generate(PROMPT[:10])
    assert generation.sequence.capacity == 10 + 256


@pytest.mark.parametrize("token", [-1, 300, 5.5, "x", None])
def test_an_id_without_embedding_is_refused_before_any_run(model: pop_runtime.Model, token: Any) -> None:
    with pytest.raises(UsageError, match=r"prompt, token 1: expected an id of 0..299"):
        model.generate([5, token])
    with pytest.raises(UsageError, match=r"prompt, token 1: expected an id"):
        model.sequence(5).append([5, token])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, found 0"),
        ({"prefill": "half"}, "prefill: expected 'pop' or 'full', found 'half'"),
        ({"sink_tokens": -1}, "sink_tokens: expected at least 0, found -1"),
        ({"boundary_tokens": 0}, "boundary_tokens: expected at least 1"),
        ({"temperature": -1}, "temperature: expected"),
        ({"top_p": 2}, "top_p: expected"),
    ],
)
def test_an_option_out_of_range_is_refused(model: pop_runtime.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate([5, 6], **options)
    with pytest.raises(UsageError, match=message):
        model.generate_batch([[5, 6]], **options)


def test_an_unknown_prefill_is_refused_by_a_sequence_too(model: pop_runtime.Model) -> None:
    with pytest.raises(UsageError, match="prefill: expected"):
        model.sequence(5).append([5], prefill="half")  # type: ignore[arg-type]


def test_a_prefill_of_none_is_the_default(model: pop_runtime.Model) -> None:
    assert model.generate([5, 6], prefill=None).request.prefill == "pop"  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), [True, False], None, 5, [[5]]])
def test_what_is_no_prompt_is_refused(model: pop_runtime.Model, prompt: Any) -> None:
    for take in (model.generate, model.sequence(8).append, model.conversation().append):
        with pytest.raises(UsageError, match="prompt"):
            take(prompt)


@pytest.mark.parametrize("value", ["5", 1.5, True, None])
def test_a_size_that_is_no_whole_number_is_refused(model: pop_runtime.Model, value: Any) -> None:
    with pytest.raises(UsageError, match="capacity: expected"):
        model.sequence(value)
    with pytest.raises(UsageError, match="rewind: expected"):
        model.sequence(8).rewind(value)
    with pytest.raises(UsageError, match="rewind: expected"):
        model.conversation().rewind(value)
    with pytest.raises(UsageError, match="--device: expected"):
        pop_runtime.load(model.folder, device=value)
    if value is not None:  # the visible cores
        with pytest.raises(UsageError, match="threads: expected"):
            pop_runtime.load(model.folder, threads=value)


def test_a_batch_is_a_list(model: pop_runtime.Model) -> None:
    with pytest.raises(UsageError, match="prompts: expected a list"):
        model.generate_batch(iter([[5, 6]]))  # type: ignore[arg-type]


def test_numpy_ids_are_ids(model: pop_runtime.Model) -> None:
    generation = model.generate(np.array(PROMPT[:5]), max_new_tokens=2)  # type: ignore[arg-type]
    assert generation.request.prompt_token_ids == tuple(PROMPT[:5])


def test_one_message_is_a_prompt_as_a_list_of_it_is(chat_model: pop_runtime.Model) -> None:
    message = {"role": "user", "content": "hi"}
    assert chat_model.encode_prompt(message) == chat_model.encode_prompt([message])
    assert ids_of(chat_model.generate(message, max_new_tokens=2)) == ids_of(chat_model.generate("hi", max_new_tokens=2))
    with pytest.raises(UsageError, match="prompt, message 0: expected role and content"):
        chat_model.generate({"role": "user"})


def test_a_damaged_tokenizer_is_named_by_an_answer_and_does_not_keep_a_sequence_from_reading(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, text_files={"tokenizer.json": "{}"}), threads=1)
    assert len(model.sequence(5).append([5, 6])) == model.manifest.vocab_size
    with pytest.raises(ModelError, match=r"tokenizer\.json: expected a tokenizer, found"):
        model.generate([5, 6])


# Text and settings


def test_pieces_joined_are_the_text_and_every_token_comes_once(chat_model: pop_runtime.Model) -> None:
    generation = chat_model.generate("hi", max_new_tokens=20, temperature=3.0, seed=5, ignore_eos=True)
    tokens = list(generation)
    assert [token.id for token in tokens] == generation.token_ids
    assert len(tokens) == 20
    assert "".join(token.text for token in tokens) == generation.text


def test_ids_beyond_the_tokenizer_give_empty_text(tmp_path: Path) -> None:
    from tests.runtime.conftest import chat_files

    weights = tiny_weights(vocab_size=320)
    weights["head"][:, 260:] *= 50
    model = pop_runtime.load(make_bundle(tmp_path, weights, text_files=chat_files()), threads=1)
    tokens = list(model.generate("hi", max_new_tokens=20))
    assert len(tokens) == 20
    assert {token.text for token in tokens if token.id >= 260} == {""}
    assert any(token.id >= 260 for token in tokens)
    with pytest.raises(UsageError, match=r"expected an id of 0..319, found 320"):
        model.generate([320, -1])


def test_the_generation_config_rules_and_a_seed_repeats_the_text(tmp_path: Path) -> None:
    files = with_generation_config(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.3)
    model = pop_runtime.load(make_bundle(tmp_path, text_files=files), threads=1)

    def text(**options: Any) -> tuple[int, ...]:
        return tuple(ids_of(model.generate(PROMPT[:5], max_new_tokens=8, **options)))

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(1, 21)}) > 1
    greedy = text(temperature=0, repetition_penalty=1)
    assert greedy == text(temperature=0, repetition_penalty=1, prefill="pop", seed=9)
    assert greedy == tuple(Twin(tiny_weights()).greedy(PROMPT[:5], 8))
    generation = model.generate(PROMPT[:5])
    assert text(seed=generation.stats.settings["seed"]) == tuple(ids_of(generation))[:8]
    assert generation.stats.settings["top_k"] == 20


def test_the_penalty_counts_the_prompt(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path), threads=1)
    tokens = ids_of(model.generate(PROMPT[:8], max_new_tokens=12, repetition_penalty=1e6, ignore_eos=True))
    assert not set(tokens) & set(PROMPT[:8])
    assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("text", ["", "{,}", "[1]"])
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str) -> None:
    folder = make_bundle(tmp_path, text_files={"generation_config.json": text})
    with pytest.raises(ModelError, match=r"generation_config.json: expected"):
        pop_runtime.load(folder, threads=1)


def test_stats_count_tokens_and_time(model: pop_runtime.Model) -> None:
    generation = model.generate(PROMPT[:6], max_new_tokens=3, ignore_eos=True)
    assert generation.stats.time_to_first_token_ms is None
    next(generation)
    assert generation.stats.tokens_per_second is None
    list(generation)
    stats = generation.stats
    assert (stats.num_prompt_tokens, stats.num_past_tokens, stats.num_pruned_tokens, stats.num_new_tokens) == (
        6,
        0,
        5,
        3,
    )
    assert stats.time_to_first_token_ms is not None and stats.time_to_first_token_ms > 0
    assert stats.tokens_per_second is not None and stats.tokens_per_second > 0
    assert stats.settings["threads"] == 1
