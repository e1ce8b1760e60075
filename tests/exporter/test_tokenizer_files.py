"""What save_tokenizer writes: enough for the runtime to work with the source folder gone."""

import dataclasses
import json
import shutil

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pop_export.checkpoint import load_checkpoint, save_tokenizer
from pop_runtime.errors import ModelError
from tests.tiny_models import CHAT_TEMPLATE, byte_tokenizer, save_checkpoint

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "日本?"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint whose folder is gone."""
    folder = save_checkpoint(tmp_path_factory.mktemp("source") / "tiny")
    loaded = load_checkpoint(str(folder))
    shutil.rmtree(folder)
    return loaded


def generation_config(folder):
    return json.loads((folder / "generation_config.json").read_text())


def test_the_written_tokenizer_gives_the_same_ids_without_the_source(checkpoint, tmp_path):
    files = save_tokenizer(checkpoint, tmp_path / "new" / "模型 é")
    folder = tmp_path / "new" / "模型 é"
    assert (files.tokenizer, files.chat_template, files.generation_config) == (
        "tokenizer.json", "chat_template.jinja", "generation_config.json"
    )  # fmt: skip
    text = "Hello <turn> wörld"
    assert Tokenizer.from_file(str(folder / files.tokenizer)).encode(text).ids == checkpoint.tokenizer(text).input_ids
    again = AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert (
        again["input_ids"]
        == checkpoint.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    )


# B13: the template lies in tokenizer_config.json, or in chat_template.jinja, or nowhere
def test_a_template_inside_tokenizer_config_is_written_as_its_own_file(tmp_path):
    save_checkpoint(tmp_path / "tiny", tokenizer=byte_tokenizer(None))
    config = json.loads((tmp_path / "tiny" / "tokenizer_config.json").read_text())
    (tmp_path / "tiny" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
    files = save_tokenizer(load_checkpoint(str(tmp_path / "tiny")), tmp_path / "out")
    assert (tmp_path / "out" / files.chat_template).read_text() == CHAT_TEMPLATE


def test_without_a_template_no_template_file_is_named(tmp_path):
    save_checkpoint(tmp_path / "tiny", tokenizer=byte_tokenizer(None))
    files = save_tokenizer(load_checkpoint(str(tmp_path / "tiny")), tmp_path / "out")
    assert files.chat_template is None and not (tmp_path / "out" / "chat_template.jinja").exists()


def test_nothing_written_says_where_it_was_made(tmp_path):
    save_checkpoint(tmp_path / "tiny")
    save_tokenizer(load_checkpoint(str(tmp_path / "tiny")), tmp_path / "out")
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path) not in file.read_text()
        assert "is_local" not in file.read_text()


# B14
def test_greedy_with_a_temperature_does_not_stop_the_export(tmp_path):
    save_checkpoint(tmp_path / "tiny")
    source = {"do_sample": False, "temperature": 0.9, "eos_token_id": 257}
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps(source))
    save_tokenizer(load_checkpoint(str(tmp_path / "tiny")), tmp_path / "out")
    written = generation_config(tmp_path / "out")
    assert written["temperature"] == 0.9 and not written.get("do_sample")


def test_sampling_settings_and_all_end_ids_are_kept(tmp_path):
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}
    save_checkpoint(tmp_path / "tiny", **settings)
    source = json.loads((tmp_path / "tiny" / "generation_config.json").read_text())
    (tmp_path / "tiny" / "generation_config.json").write_text(json.dumps({**source, "eos_token_id": [70, 257, 999]}))
    save_tokenizer(load_checkpoint(str(tmp_path / "tiny")), tmp_path / "out")
    written = generation_config(tmp_path / "out")
    assert settings.items() <= written.items()
    assert written["eos_token_id"] == [70, 257] and written["pad_token_id"] == 258


def test_a_checkpoint_without_bos_and_pad_writes_none(checkpoint, tmp_path):
    save_tokenizer(dataclasses.replace(checkpoint, bos_token_id=None, pad_token_id=None), tmp_path)
    assert not {"bos_token_id", "pad_token_id"} & set(generation_config(tmp_path))


class _Broken:
    """Stands for a tokenizer that fails to save, or saves without tokenizer.json."""

    def __init__(self, error=None):
        self.error = error

    def save_pretrained(self, _folder):
        if self.error:
            raise self.error


def test_a_tokenizer_that_cannot_be_saved_is_one_line(checkpoint, tmp_path):
    with pytest.raises(ModelError, match=r"the tokenizer cannot be written: no vocabulary$"):
        save_tokenizer(dataclasses.replace(checkpoint, tokenizer=_Broken(ValueError("no vocabulary\nmore"))), tmp_path)
    with pytest.raises(ModelError, match=r"did not write tokenizer\.json"):
        save_tokenizer(dataclasses.replace(checkpoint, tokenizer=_Broken()), tmp_path)
