import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pop_runtime.errors import ModelError, UsageError
from pop_runtime.text import TextStream, Token, decode, encode, open_tokenizer
from tests.runtime.conftest import byte_tokenizer_json


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(byte_tokenizer_json())


def _stream(tokenizer: Tokenizer | None, ids: list[int]) -> list[list[Token]]:
    """Return what each push, and last the flush, hands out."""
    stream = TextStream(tokenizer)
    return [*(list(stream.push(Token(token, ""))) for token in ids), list(stream.flush())]


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "a€b", add_special_tokens=False)
    assert len(ids) == 5
    handed = [[token.text for token in tokens] for tokens in _stream(tokenizer, ids)]
    assert handed == [["a"], [], [], ["", "", "€"], ["b"], []]


def test_an_unfinished_character_is_handed_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "a€", add_special_tokens=False)[:-1]
    handed = [token for tokens in _stream(tokenizer, ids) for token in tokens]
    assert [token.id for token in handed] == ids
    assert "".join(token.text for token in handed) == "a\ufffd"


def test_special_and_unknown_ids_give_empty_text_at_once(tokenizer: Tokenizer) -> None:
    ids = [*encode(tokenizer, "x", False), 259, 299, 5000, *encode(tokenizer, "y", False)]
    assert [tokens[0].text for tokens in _stream(tokenizer, ids)[:-1]] == ["x", "", "", "", "y"]


def test_without_tokenizer_texts_are_empty() -> None:
    assert _stream(None, [1, 2]) == [[Token(1, "")], [Token(2, "")], []]


def test_random_bytes_joined_are_the_text_of_all_of_them(tokenizer: Tokenizer) -> None:
    for seed in range(30):
        ids = [random.Random(seed * 1000 + step).randrange(262) for step in range(60)]
        handed = [token for tokens in _stream(tokenizer, ids) for token in tokens]
        assert [token.id for token in handed] == ids
        assert "".join(token.text for token in handed) == decode(tokenizer, ids)


def test_a_decoder_that_strips_the_first_space_keeps_the_others() -> None:
    vocab = {"▁": 0, "▁Hello": 1, "▁world": 2, "!": 3, "<s>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    ids = [4, 1, 2, 4, 2, 3]
    handed = [token.text for tokens in _stream(tokenizer, ids) for token in tokens]
    assert handed == ["", "Hello", " world", "", " world", "!"]
    assert "".join(handed) == decode(tokenizer, ids)


def test_byte_fallback_tokens_come_as_whole_characters() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "<unk>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = [256, *"€é".encode(), 256]
    handed = [token.text for tokens in _stream(tokenizer, ids) for token in tokens]
    assert handed == ["a", "", "", "€", "", "é", "a"]


def test_padding_and_truncation_of_the_file_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(2)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    assert len(encode(open_tokenizer(tmp_path / "tokenizer.json"), "abc", True)) == 3


def test_a_tokenizer_in_a_folder_with_any_name_opens(tmp_path: Path) -> None:
    folder = tmp_path / "a é 模"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    assert encode(open_tokenizer(folder / "tokenizer.json"), "abc", True)


@pytest.mark.parametrize("text", [None, "", "{}", "not json"])
def test_a_missing_or_damaged_tokenizer_is_named_in_one_line(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer.json: expected a tokenizer, found") as caught:
        open_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf_8_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"prompt: expected UTF-8 text, found '\\udc80' at 1"):
        encode(tokenizer, "a\udc80", False)
