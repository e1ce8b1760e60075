import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pop_runtime import manifest as module
from pop_runtime.errors import ModelError
from pop_runtime.manifest import (
    FileEntry,
    KvLayer,
    Manifest,
    Plan,
    Windows,
    describe_files,
    read_manifest,
    verify_files,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three files and their manifest; the graphs are not graphs."""
    for name in ("prefill.onnx", "decode.onnx", "weights.bin"):
        (tmp_path / name).write_bytes(name.encode())
    write_manifest(tmp_path, _manifest(tmp_path))
    return tmp_path


def _manifest(folder: Path, **fields: Any) -> Manifest:
    manifest = Manifest(
        model={"name": "x", "revision": None}, vocab_size=10, max_positions=8, plan=Plan(3, (1, 2), "gates", (2,)),
        windows=Windows(2, 3), kv_dtype="float16", kv_layers=(KvLayer(2, 16, 8),) * 3, precision="float16",
        eos_token_ids=(7, 9), bos_token_id=None, pad_token_id=0, tokenizer=None, chat_template=None,
        generation_config=None, tools={"torch": "2"},
        files=describe_files(folder, ["weights.bin", "prefill.onnx", "decode.onnx"]),
    )  # fmt: skip
    return dataclasses.replace(manifest, **fields)


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_manifest_is_read_back_as_it_was_written(folder: Path) -> None:
    assert read_manifest(folder) == _manifest(folder)


def test_the_same_manifest_gives_the_same_bytes_and_leaves_no_temporary_file(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    write_manifest(folder, _manifest(folder))
    assert (folder / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [
        "decode.onnx", "manifest.json", "prefill.onnx", "weights.bin",
    ]  # fmt: skip


def test_a_write_that_fails_leaves_the_old_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "manifest.json").read_bytes()

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(folder, _manifest(folder, vocab_size=11))
    assert (folder / "manifest.json").read_bytes() == before
    assert not list(folder.glob(".manifest*"))


def test_a_manifest_that_contradicts_itself_is_not_written(folder: Path) -> None:
    with pytest.raises(ModelError, match="kv_layers: expected 3 layers, found 1"):
        write_manifest(folder, _manifest(folder, kv_layers=(KvLayer(1, 1, 1),)))


def test_format_and_version_stand_on_top(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    assert list(content)[:2] == ["format", "format_version"]


def test_unknown_keys_are_let_through(folder: Path) -> None:
    _edit(folder, lambda content: content.update(later=1) or content["plan"].update(later=[]))
    assert read_manifest(folder) == _manifest(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: expected a bundle folder, found none"):
        read_manifest(tmp_path / "nowhere")


def test_a_folder_without_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"manifest.json: expected a bundle's manifest, found none"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", '{"format": "pop-bundle",}', "{", "[" * 100_000, "\xff"])
def test_a_manifest_that_is_not_json_is_refused_in_one_line(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="expected JSON") as caught:
        read_manifest(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "1", '{"format": "other"}', "{}"])
def test_another_format_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match="format: expected 'pop-bundle'"):
        read_manifest(folder)


def test_a_newer_format_is_refused_whatever_else_it_holds(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": "pop-bundle", "format_version": 2}')
    with pytest.raises(ModelError, match="format_version: expected at most 1, found 2; update"):
        read_manifest(folder)


@pytest.mark.parametrize("key", ["vocab_size", "plan", "kv_layers", "eos_token_ids", "tokenizer"])
def test_a_missing_key_is_named(folder: Path, key: str) -> None:
    _edit(folder, lambda content: content.pop(key))
    with pytest.raises(ModelError, match=f"expected the key '{key}', found none"):
        read_manifest(folder)


def test_a_missing_key_inside_is_named_with_its_place(folder: Path) -> None:
    _edit(folder, lambda content: content["kv_layers"][1].pop("num_heads"))
    with pytest.raises(ModelError, match=r"kv_layers\[1\]: expected the key 'num_heads'"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", "1", "format_version: expected an integer, found 1"),
        ("vocab_size", "10", "vocab_size: expected an integer, found 10"),
        ("vocab_size", 10.0, "vocab_size: expected an integer"),
        ("vocab_size", True, "vocab_size: expected an integer, found True"),
        ("kv_dtype", 16, "kv_dtype: expected a string"),
        ("plan", [], "plan: expected an object"),
        ("eos_token_ids", 7, "eos_token_ids: expected a list"),
        ("eos_token_ids", [7, None], r"eos_token_ids\[1\]: expected an integer"),
        ("tokenizer", 1, "tokenizer: expected a string"),
        ("files", {"weights.bin": "x"}, "files, weights.bin: expected an object"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place(folder: Path, key: str, value: Any, message: str) -> None:
    _edit(folder, lambda content: content.update({key: value}))
    with pytest.raises(ModelError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dialect": "caffe"}, "dialect: expected one of ort, standard, found caffe"),
        ({"kv_dtype": "int8"}, "kv_dtype: expected one of float32, float16, bfloat16, found int8"),
        ({"kv_layers": (KvLayer(0, 1, 1),) * 3}, "kv_layers: expected sizes of at least 1"),
        ({"plan": Plan(3, (2, 1), "user")}, r"plan.skipped_layers: expected ascending layers of 0..2, found \[2, 1\]"),
        ({"plan": Plan(3, (3,), "user")}, "plan.skipped_layers"),
        ({"windows": Windows(0, 0)}, "windows.boundary_tokens: expected at least 1, found 0"),
        ({"windows": Windows(-1, 1)}, "windows.sink_tokens: expected at least 0"),
        ({"vocab_size": 0}, "vocab_size: expected at least 1"),
        ({"max_positions": 1}, "max_positions: expected at least 2"),
        ({"tokenizer": "tokenizer.json"}, "files: expected every file the manifest names.*tokenizer.json"),
    ],
)
def test_values_that_cannot_be_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        write_manifest(folder, _manifest(folder, **fields))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../weights.bin", "a/../../b", "C:\\x", "..\\x", "\\\\host\\x", "", "."]
)
def test_a_path_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    _edit(folder, lambda content: content["files"].update({name: {"bytes": 1, "sha256": "00"}}))
    with pytest.raises(ModelError, match="files: expected paths inside the folder"):
        read_manifest(folder)


def test_a_graph_outside_the_listed_files_is_refused(folder: Path) -> None:
    _edit(folder, lambda content: content.update(decode_graph="../decode.onnx"))
    with pytest.raises(ModelError, match="files: expected every file the manifest names"):
        read_manifest(folder)


def test_a_path_in_a_folder_of_the_bundle_is_accepted(folder: Path) -> None:
    (folder / "engines").mkdir()
    (folder / "engines" / "a").write_bytes(b"1")
    files = describe_files(folder, ["weights.bin", "prefill.onnx", "decode.onnx", "engines/a"])
    write_manifest(folder, _manifest(folder, files=files))
    verify_files(folder, read_manifest(folder))


def test_whole_files_are_verified(folder: Path) -> None:
    verify_files(folder, read_manifest(folder))


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "decode.onnx").unlink()
    with pytest.raises(ModelError, match=r"decode.onnx: expected a file of 11 bytes, found none"):
        verify_files(folder, read_manifest(folder))


def test_a_file_that_lost_one_byte_is_named_with_both_sizes(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"weights.bi")
    with pytest.raises(ModelError, match=r"weights.bin: expected 11 bytes, found 10"):
        verify_files(folder, read_manifest(folder))


def test_two_files_of_equal_size_that_changed_places_are_noticed(folder: Path) -> None:
    content = (folder / "decode.onnx").read_bytes(), (folder / "weights.bin").read_bytes()
    (folder / "weights.bin").write_bytes(content[0])
    (folder / "decode.onnx").write_bytes(content[1])
    with pytest.raises(ModelError, match=r"decode.onnx: expected sha256 .* \(altered\)"):
        verify_files(folder, read_manifest(folder))


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(module, "sha256_of", refuse)
    with pytest.raises(ModelError, match=r"decode.onnx: expected a readable file, found Permission denied"):
        verify_files(folder, read_manifest(folder))


def test_files_are_described_sorted_by_name(folder: Path) -> None:
    described = describe_files(folder, ["weights.bin", "decode.onnx"])
    assert list(described) == ["decode.onnx", "weights.bin"]
    assert described["weights.bin"] == FileEntry(11, "8a8b09bd4837c5a5078957ae41ebf4ab4231783eb2111f475aed343d8cc6641d")


@pytest.mark.parametrize("name", ["past.key", "{layer}.{layer}", "{layer}.{other}", "{layer", "{layer.__class__}"])
def test_a_name_that_str_format_could_stumble_over_is_refused(folder: Path, name: str) -> None:
    """`"{lay"` once raised KeyError out of the session's checks."""
    _edit(folder, lambda content: content.update(past_key=name))
    with pytest.raises(ModelError, match=r"past_key, present_key, ...: expected names with \{layer\} once"):
        read_manifest(folder)


def test_a_file_name_too_long_for_any_file_is_refused(folder: Path) -> None:
    _edit(folder, lambda content: content["files"].update({"x" * 5000: {"bytes": 1, "sha256": ""}}))
    with pytest.raises(ModelError, match=r"expected a file, found File name too long"):
        verify_files(folder, read_manifest(folder))
