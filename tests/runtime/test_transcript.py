"""What a longer rendering adds to a cache, in text and in tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pop_runtime.errors import UsageError
from pop_runtime.text import Token
from pop_runtime.transcript import Transcript
from tests.runtime.conftest import byte_tokenizer_json


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(byte_tokenizer_json())


def _read(transcript: Transcript, rendering: str, tokenizer: Tokenizer) -> tuple[int, list[int]]:
    turn = transcript.plan(rendering, tokenizer)
    transcript.read(turn)
    assert len(transcript.ends) == turn.keep + len(turn.ids) or not turn.ids
    return turn.keep, turn.ids


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_longer_rendering_is_read_from_where_the_cache_ends(tokenizer: Tokenizer) -> None:
    transcript = Transcript()
    assert _read(transcript, "<turn>u:hé", tokenizer) == (0, _ids(tokenizer, "<turn>u:hé"))
    transcript.extend([Token(1, "o"), Token(2, "k")])
    assert _read(transcript, "<turn>u:héok<eos>x", tokenizer) == (8, _ids(tokenizer, "<eos>x"))


def test_a_rendering_that_is_there_already_needs_nothing(tokenizer: Tokenizer) -> None:
    transcript = Transcript()
    _read(transcript, "abc", tokenizer)
    assert _read(transcript, "abc", tokenizer) == (3, [])
    transcript.extend([Token(1, "d")])
    assert _read(transcript, "abc", tokenizer) == (4, [])  # an answer that goes on


def test_a_rendering_that_differs_keeps_what_agrees(tokenizer: Tokenizer) -> None:
    transcript = Transcript()
    _read(transcript, "ab", tokenizer)
    transcript.extend([Token(1, "c "), Token(2, " "), Token(3, "\n")])
    assert _read(transcript, "abc<eos>d", tokenizer) == (2, _ids(tokenizer, "c<eos>d"))


def test_no_border_lies_within_a_character(tokenizer: Tokenizer) -> None:
    transcript = Transcript()
    _read(transcript, "a€", tokenizer)
    transcript.extend([Token(1, ""), Token(2, ""), Token(3, "€"), Token(259, "")])
    assert transcript.ends == [1, 2, 2, 2, 3, 3, 3, 3]
    assert [transcript.border(length) for length in range(9)] == [0, 1, 1, 1, 4, 4, 4, 4, 8]
    assert _read(transcript, "a€x", tokenizer) == (4, _ids(tokenizer, "x"))
    assert _read(transcript, "a₭", tokenizer) == (1, _ids(tokenizer, "₭"))


def _merging() -> Tokenizer:
    """A tokenizer that joins "b" and "c" whatever comes first."""
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "d": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return tokenizer


def test_a_cached_end_within_a_token_stays_and_the_rest_is_encoded_alone() -> None:
    transcript = Transcript()
    assert _read(transcript, "ab", _merging()) == (0, [0, 1])
    assert _read(transcript, "abcd", _merging()) == (2, [2, 4])
    assert transcript.ends == [1, 2, 3, 4]


def test_a_difference_within_a_token_goes_back_to_a_border_of_both() -> None:
    transcript = Transcript()
    _read(transcript, "ab", _merging())
    transcript.extend([Token(4, "d")])
    assert _read(transcript, "abc", _merging()) == (1, [3])  # "b" is cached, but the rendering has "bc"


def test_a_rendering_that_is_not_utf_8_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"prompt: expected UTF-8 text, found '\\udc80' at 1"):
        Transcript().plan("a\udc80", tokenizer)


def test_random_edits_always_leave_the_renderings_text(tokenizer: Tokenizer) -> None:
    alphabet = ["a", "€", "é", "<turn>", "<eos>", " ", "日"]
    for seed in range(100):
        draw, transcript, cache = random.Random(seed), Transcript(), list[int]()
        text = ""
        for _ in range(6):
            cut = draw.randrange(len(text) + 1) if draw.random() < 0.4 else len(text)
            text = text[:cut] + "".join(draw.choices(alphabet, k=5))
            turn = transcript.plan(text, tokenizer)
            if turn.ids:
                cache = [*cache[: turn.keep], *turn.ids]
                assert transcript.text[: len(text)] != text
            transcript.read(turn)
            assert len(cache) == len(transcript.ends)
            assert tokenizer.decode(cache, skip_special_tokens=False).startswith(text)
