"""Text from C++ is the text of Python: special tokens, unfinished characters, stop strings, streaming."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

import pop_runtime
from tests.cpp.conftest import PROGRAM, PopRun, ids_text
from tests.runtime.conftest import byte_tokenizer_json
from tests.runtime.tiny_bundle import make_bundle, with_generation_config

pytestmark = pytest.mark.cpp

TEXT = "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f469 \u0627\u0644 \n\t x\u0301"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a byte-level tokenizer; do not alter it."""
    return make_bundle(tmp_path_factory.mktemp("text"), text_files={"tokenizer.json": byte_tokenizer_json()})


@pytest.mark.parametrize("seed", range(8))
def test_sampled_bytes_decode_to_the_same_text(folder: Path, pop_run: PopRun, seed: int) -> None:
    # hot: nearly uniform over bytes and special tokens, so that broken characters of every kind occur
    model = pop_runtime.load(folder, threads=1)
    ids = model.encode_prompt(TEXT[seed : seed + 12])
    generation = model.generate(ids, max_new_tokens=40, temperature=5.0, seed=seed, ignore_eos=True)
    pieces = list(generation)
    flags = (folder, "--ids", ids_text(ids), "--max-new-tokens", 40, "--temperature", 5, "--seed", seed, "--ignore-eos")
    found = pop_run(*flags, "--json").json
    assert found["new_token_ids"] == [token.id for token in pieces]
    assert found["text"] == generation.text != ""
    assert pop_run(*flags).out == generation.text + "\n"


def test_stop_strings_end_where_python_ends(folder: Path, pop_run: PopRun) -> None:
    model = pop_runtime.load(folder, threads=1)
    options = {"max_new_tokens": 40, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    generation = model.generate([5, 6, 7], **options)
    list(generation)
    draw, whole, reasons = random.Random(1), generation.text, set()
    for _ in range(12):
        start = draw.randrange(len(whole) - 3)
        stop = [whole[start : start + draw.randint(1, 3)], whole[start + 1 :][:2], "never \u00e9"]
        wanted = model.generate([5, 6, 7], stop=stop, **options)
        list(wanted)
        flags = [part for text in stop for part in ("--stop", text)]
        found = pop_run(
            folder, "--ids", "5,6,7", "--json", "--max-new-tokens", 40, "--temperature", 1.5, "--seed", 3,
            "--ignore-eos", *flags,
        ).json  # fmt: skip
        assert found["text"] == wanted.text
        assert found["new_token_ids"] == wanted.token_ids
        assert (found["stop_reason"], found["stop_string"]) == (wanted.stop_reason, wanted.stop_string)
        reasons.add(wanted.stop_reason)
    assert reasons == {"stop"}


def test_stop_strings_of_generation_config_count(tmp_path: Path, pop_run: PopRun) -> None:
    files = {"tokenizer.json": byte_tokenizer_json(), **with_generation_config(stop_strings=["a", "b"])}
    folder = make_bundle(tmp_path, text_files=files)
    assert pop_run(folder, "--ids", "5,6", "--json").json["settings"]["stop"] == ["a", "b"]
    assert pop_run(folder, "--ids", "5,6", "--json", "--stop", "c").json["settings"]["stop"] == ["c"]


@pytest.mark.parametrize("stop", [["{}"], ["%%"], ["[a,b]"], ["{}", "%%"], ["[]", "x"]])
def test_a_stop_string_is_taken_as_it_is_written(folder: Path, pop_run: PopRun, stop: list[str]) -> None:
    # {} came with a second one, %%: CLI11 writes an empty list as these two
    flags = [part for text in stop for part in ("--stop", text)]
    found = pop_run(folder, "--ids", "5", "--json", "--max-new-tokens", 1, *flags).json
    assert found["settings"]["stop"] == stop


@pytest.mark.parametrize("stop", ["", b"\xff"])
def test_a_stop_string_that_is_no_text_is_refused(folder: Path, stop: str | bytes) -> None:
    done = subprocess.run([PROGRAM, folder, "--ids", "5", "--json", "--stop", stop], capture_output=True, text=True)
    assert done.returncode == 2 and "stop: expected" in done.stderr


def test_a_tokenizer_of_another_kind_gives_ids_without_text(tmp_path: Path, pop_run: PopRun) -> None:
    text = byte_tokenizer_json().replace('"decoder":{"type":"ByteLevel"', '"decoder":{"type":"WordPiece"')
    assert "WordPiece" in text
    folder = make_bundle(tmp_path, text_files={"tokenizer.json": text})
    assert pop_run(folder, "--ids", "5,6", "--json").json["text"] is None
    assert pop_run(folder, "--ids", "5,6", "--stop", "x").code == 2


@pytest.mark.parametrize(
    ("stored", "ignored"), [(["x"], ["stop_strings"]), ("x", ["stop_strings"]), ([], []), ("", [])]
)
@pytest.mark.parametrize("kind", [None, "WordPiece"])
def test_stop_strings_that_cannot_be_matched_are_said_to_be_ignored(
    tmp_path: Path, pop_run: PopRun, stored: list[str] | str, ignored: list[str], kind: str | None
) -> None:
    # they were dropped without a word
    files = with_generation_config(stop_strings=stored)
    if kind is not None:
        files["tokenizer.json"] = byte_tokenizer_json().replace(
            '"decoder":{"type":"ByteLevel"', f'"decoder":{{"type":"{kind}"'
        )
    folder = make_bundle(tmp_path, text_files=files)
    done = pop_run(folder, "--ids", "5,6", "--json")
    assert done.json["ignored_settings"] == ignored
    assert ("note: generation_config.json sets stop_strings, which pop_run does not apply" in done.err) == bool(ignored)
    if kind is None:
        assert pop_runtime.load(folder, threads=1).ignored_settings == ignored


def test_a_tokenizer_that_is_none_is_a_bundle_error(tmp_path: Path, pop_run: PopRun) -> None:
    for text in ("[]", '{"decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": {"a": "b"}}}'):
        folder = make_bundle(tmp_path, text_files={"tokenizer.json": text})
        done = pop_run(folder, "--ids", "5,6")
        assert done.code == 3 and "tokenizer.json" in done.err
