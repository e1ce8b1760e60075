"""Bundles that many tests of the runtime only read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import pop_runtime
from tests.runtime.tiny_bundle import make_bundle

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<turn>' + m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>assistant:' }}{% endif %}"
)


def byte_tokenizer_json() -> str:
    """Return a tokenizer of 256 bytes plus <bos> 256, <eos> 257, <pad> 258 and <turn> 259, as `tokenizer.json`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>", "<turn>"])
    return tokenizer.to_str()


def chat_files(template: str | None = CHAT_TEMPLATE) -> dict[str, str]:
    """Return the text files of a bundle that can chat."""
    files = {
        "tokenizer.json": byte_tokenizer_json(),
        "tokenizer_config.json": json.dumps({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}),
    }
    return files if template is None else {**files, "chat_template.jinja": template}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without tokenizer; do not alter it."""
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def model(bundle: Path) -> pop_runtime.Model:
    return pop_runtime.load(bundle, threads=1)


@pytest.fixture(scope="session")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with tokenizer and chat template; do not alter it."""
    return make_bundle(tmp_path_factory.mktemp("chat"), text_files=chat_files())


@pytest.fixture(scope="session")
def chat_model(chat_bundle: Path) -> pop_runtime.Model:
    return pop_runtime.load(chat_bundle, threads=1)
