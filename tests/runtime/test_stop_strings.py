"""Stop strings over tokens of any cut, alone and in answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import pop_runtime
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.stop_strings import StopStrings
from pop_runtime.text import Token
from tests.runtime.conftest import chat_files
from tests.runtime.tiny_bundle import MAX_POSITIONS, make_bundle, with_generation_config


def _pieces(strings: list[str], pieces: list[str]) -> tuple[list[list[str]], StopStrings]:
    """Return the texts that each push, and last the flush, hands out."""
    stops, handed = StopStrings(strings), []
    for index, piece in enumerate(pieces):
        handed.append([token.text for token in stops.push(Token(index, piece))])
        if stops.matched is not None:
            return handed, stops
    return [*handed, [token.text for token in stops.flush()]], stops


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    handed, stops = _pieces(["STOP"], ["ab", "cS", "T", "OPde", "never"])
    assert handed == [["ab"], [], [], ["c", "", ""]]
    assert (stops.matched, stops.num_cut_tokens) == ("STOP", 3)


def test_what_only_began_like_one_is_handed_out_as_soon_as_that_is_clear() -> None:
    handed, stops = _pieces(["aab"], ["xa", "a", "a", "c", "a"])
    assert handed == [[], [], ["xa"], ["a", "a", "c"], [], ["a"]]
    assert stops.matched is None and stops.num_cut_tokens == 0


def test_the_earliest_match_counts_and_the_first_in_the_list_among_equals() -> None:
    assert _pieces(["cd", "bc"], ["abcd"])[1].matched == "bc"
    assert _pieces(["ab", "abc"], ["abc"])[1].matched == "ab"
    assert _pieces(["abc", "ab"], ["abc"])[1].matched == "abc"


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert _pieces([], ["a", "", "b"])[0] == [["a"], [""], ["b"], []]


def test_any_cut_into_tokens_gives_the_same_text() -> None:
    text, stop = "one two three two", "two t"
    for seed in range(200):
        draw = random.Random(seed)
        cuts = sorted(draw.sample(range(1, len(text)), draw.randrange(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        handed, stops = _pieces([stop], pieces)
        assert "".join(piece for group in handed for piece in group) == "one "
        assert stops.matched == stop
        assert sum(len(group) for group in handed) <= len(pieces)


@pytest.fixture(scope="module")
def free(chat_model: pop_runtime.Model) -> list[pop_runtime.Token]:
    """An answer of single printable characters to cut."""
    generation = chat_model.generate("hi", raw=True, max_new_tokens=30, ignore_eos=True, temperature=2, seed=3)
    return list(generation)


def _some_stop(free: list[pop_runtime.Token]) -> str:
    """Return two characters or more, from three tokens within the answer, that occur nowhere before."""
    texts = [token.text for token in free]
    for start in range(4, len(texts) - 3):
        stop = "".join(texts[start : start + 3])
        before = "".join(texts[:start])
        if len(stop) >= 2 and before and "".join(texts).index(stop) == len(before):
            return stop
    raise AssertionError(f"no stop string in {texts}")


def _start(model: pop_runtime.Model, stop: Any, **options: Any) -> pop_runtime.Generation:
    chosen: Any = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 2, "seed": 3, **options}
    return model.generate("hi", raw=True, sequence=model.sequence(MAX_POSITIONS), stop=stop, **chosen)


def _stopped(model: pop_runtime.Model, stop: Any, **options: Any) -> pop_runtime.Generation:
    generation = _start(model, stop, **options)
    list(generation)
    return generation


def test_an_answer_ends_before_the_stop_string(chat_model: pop_runtime.Model, free: list[pop_runtime.Token]) -> None:
    texts = [token.text for token in free]
    whole, stop = "".join(texts), _some_stop(free)
    generation = _stopped(chat_model, ["unheard", stop])
    assert generation.stop_reason == "stop" and generation.stop_string == stop
    assert generation.text == whole[: whole.index(stop)]
    assert [token.id for token in generation.tokens] == generation.token_ids
    assert generation.token_ids == [token.id for token in free][: len(generation.token_ids)]
    kept = generation.sequence.token_ids[2:]  # after the prompt: no token that reaches into the stop string
    assert chat_model.tokenizer is not None
    assert chat_model.tokenizer.decode(kept) == generation.text
    assert _stopped(chat_model, stop).text == generation.text  # one string need not be a list


def test_an_answer_left_within_its_stop_string_keeps_no_token_that_reaches_into_it(
    chat_model: pop_runtime.Model, free: list[pop_runtime.Token]
) -> None:
    texts = [token.text for token in free]
    start = next(at for at in range(4, len(texts) - 3) if all(len(text) == 1 for text in texts[at : at + 3]))
    generation = _start(chat_model, "".join(texts[start : start + 3]))
    while len(generation.tokens) <= start:
        next(generation)
    generation.close()  # handed out: the token with which the stop string begins, without its text
    assert (generation.stop_reason, generation.stop_string) == ("cancelled", None)
    assert generation.sequence.token_ids[2:] == [token.id for token in free[:start]]


def test_an_answer_left_within_a_character_keeps_no_part_of_it(chat_model: pop_runtime.Model) -> None:
    generation = chat_model.generate("hi", sequence=chat_model.sequence(MAX_POSITIONS), raw=True, stop="never")
    generation.sequence.append([1, 2])
    first, last = (pop_runtime.Token(byte, text) for byte, text in ((0xC3, ""), (0xA9, "n")))  # "n" may begin "never"
    generation._has_begun, generation._num_past = True, 0
    for token in (first, last):
        generation._answer.token_ids.append(token.id)
        generation._settled.extend(generation._answer._stops.push(token))
        generation.sequence.append([token.id])
    assert next(generation) == first
    generation.close()
    assert generation.sequence.token_ids == [1, 2]


def test_a_batch_stops_each_row_where_it_would_alone(
    chat_model: pop_runtime.Model, free: list[pop_runtime.Token]
) -> None:
    stop = _some_stop(free)
    options: Any = {"raw": True, "max_new_tokens": 30, "ignore_eos": True, "temperature": 2, "seed": 3, "stop": stop}
    prompts = ["hi", "something longer"]
    alone = [chat_model.generate(prompt, **options) for prompt in prompts]
    for generation in alone:
        list(generation)
    answers = chat_model.generate_batch(prompts, **options)
    assert [(answer.text, answer.stop_reason) for answer in answers] == [
        (generation.text, generation.stop_reason) for generation in alone
    ]
    assert answers[0].stop_reason == "stop"


def test_the_limit_shows_what_was_held_back(chat_model: pop_runtime.Model, free: list[pop_runtime.Token]) -> None:
    texts = [token.text for token in free]
    end = next(index for index, text in enumerate(texts) if index > 3 and text)
    generation = _stopped(chat_model, texts[end] + "\x00never", max_new_tokens=end + 1)
    assert generation.stop_reason == "length"
    assert generation.text == "".join(texts[: end + 1])


def test_stop_strings_of_the_generation_config_hold(tmp_path: Any, free: list[pop_runtime.Token]) -> None:
    stop = _some_stop(free)
    files = chat_files() | with_generation_config(stop_strings=[stop])
    model = pop_runtime.load(make_bundle(tmp_path / "a", text_files=files), threads=1)
    assert model.ignored_settings == []
    assert _stopped(model, None).stop_string == stop
    assert _stopped(model, []).stop_reason == "length"
    bare = pop_runtime.load(
        make_bundle(tmp_path / "b", text_files=with_generation_config(stop_strings=stop)), threads=1
    )
    assert bare.ignored_settings == ["stop_strings"]


@pytest.mark.parametrize("stop", ["", ["a", ""], [3], 3])
def test_a_stop_string_has_to_be_text(chat_model: pop_runtime.Model, stop: Any) -> None:
    with pytest.raises(UsageError, match="stop: expected text that is not empty"):
        chat_model.generate("hi", stop=stop)


def test_without_a_tokenizer_there_is_no_text_to_match(model: pop_runtime.Model) -> None:
    with pytest.raises(UsageError, match="stop: expected a tokenizer to match text with, found none"):
        model.generate([5], stop="x")
    assert list(model.generate([5], stop=[], max_new_tokens=1))  # asks for none


def test_a_stop_string_that_is_not_utf_8_could_never_match(chat_model: pop_runtime.Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"stop: expected UTF-8 text, found '\\ud800' at 1"):
        chat_model.generate("hi", stop=["a", "a\ud800"])
    files = chat_files() | with_generation_config(stop_strings="\ud800")
    model = pop_runtime.load(make_bundle(tmp_path, text_files=files), threads=1)
    with pytest.raises(ModelError, match=r"generation_config.json, stop_strings: expected UTF-8 text"):
        model.generate("hi")
