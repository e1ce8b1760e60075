"""Random damage to a bundle's files: an error in one line or a working model, never a crash, nothing read outside."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pop_runtime
from pop_runtime.errors import ModelError, PopError
from tests.runtime.conftest import chat_files
from tests.runtime.tiny_bundle import make_bundle, with_generation_config

FILES = ("prefill.onnx", "decode.onnx", "weights.bin", "tokenizer.json", "chat_template.jinja")
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "x", "{", "{}", "{layer}", "{0}", "{layer.__class__}",
    "../outside", "/etc/passwd", "a/../../outside", "C:\\outside", "\ud800", "\x00", "é" * 300, "x" * 5000,
    "weights.bin", "decode.onnx", "manifest.json", [], [1], ["x"], {}, {"x": 1}, [[[]]],
)  # fmt: skip

opened: list[str] = []
watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event == "open":
        opened.append(str(arguments[0]))


sys.addaudithook(_watch)  # there is no way to remove one


def _bytes(draw: random.Random, content: bytes) -> bytes:
    """Return a file's content with one kind of damage."""
    at, size = draw.randrange(len(content)), draw.choice([1, 2, 16, 4096])
    kinds: list[Callable[[], bytes]] = [
        lambda: content[:at],
        lambda: content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :],
        lambda: content[:at] + draw.randbytes(size) + content[at:],
        lambda: content[:at] + draw.randbytes(size) + content[at + size :],
        lambda: content[:at] + content[at + size :],
        lambda: content[:at] + bytes(len(content) - at),
        lambda: content + content[:at],
        lambda: draw.randbytes(size),
        lambda: b"",
    ]
    return draw.choice(kinds)()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _values(draw: random.Random, content: bytes) -> bytes:
    """Return a manifest, still JSON, with one to three values replaced, removed or renamed."""
    document = copy.deepcopy(json.loads(content))
    for _ in range(draw.randrange(1, 4)):
        place = draw.choice(list(_places(document)))
        owner = document
        for key in place[:-1]:
            owner = owner[key]
        kind = draw.randrange(4)
        if kind == 0:
            del owner[place[-1]]
        elif kind == 1 and isinstance(owner, dict):
            owner[str(draw.choice(STRANGE))] = owner.pop(place[-1])
        elif kind == 2 and isinstance(owner[place[-1]], int):
            owner[place[-1]] += draw.choice([-1, 1, 7, 100])
        else:
            owner[place[-1]] = draw.choice(STRANGE)
    return json.dumps(document).encode()


def _damage(folder: Path, seed: int) -> None:
    """Damage one file, try to use the bundle, and mend it."""
    global watching
    draw = random.Random(seed)
    files = [*FILES, *(path.name for path in sorted(folder.glob("segment-*.onnx")))]
    name = "manifest.json" if draw.random() < 0.7 else draw.choice(files)
    path = folder / name
    content = path.read_bytes()
    damaged = (_values if name == "manifest.json" and draw.random() < 0.7 else _bytes)(draw, content)
    path.write_bytes(damaged)
    opened.clear()
    watching = True
    try:
        model = pop_runtime.load(folder, threads=1)
        assert name == "manifest.json" or damaged == content, f"{name} was altered and loaded"
        conversation = model.conversation()
        conversation.append([5, 6, 7, 8])
        list(conversation.generate(max_new_tokens=2))
        if model.tokenizer is not None:
            list(model.generate("hi", max_new_tokens=2))
    except PopError as error:
        assert "\n" not in str(error) and "expected" in str(error)
        assert name == "manifest.json" or isinstance(error, ModelError)
    finally:
        watching = False
        path.write_bytes(content)
    packages = (".py", ".pyc")  # modules that are imported late
    outside = [found for found in opened if not Path(found).is_relative_to(folder) and not found.endswith(packages)]
    assert outside == []


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "segments"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to damage, beside a file that must stay unread."""
    files = chat_files() | with_generation_config(do_sample=False, temperature=0.7)
    place = tmp_path_factory.mktemp("damage")
    (place / "outside").write_text("not for reading")
    folder = make_bundle(place / "bundle", text_files=files, segmented=request.param)
    list(pop_runtime.load(folder, threads=1).generate("hi", max_new_tokens=2))  # every module is imported now
    return folder


def _sweep(folder: Path, seeds: range) -> None:
    for seed in seeds:
        try:
            _damage(folder, seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def test_damaged_files_give_one_line_or_a_working_model(folder: Path) -> None:
    _sweep(folder, range(400))


@pytest.mark.slow
def test_ten_thousand_damaged_files_do_too(folder: Path) -> None:
    _sweep(folder, range(400, 10_400))


def test_the_watch_sees_what_is_opened(folder: Path) -> None:
    global watching
    opened.clear()
    watching = True
    (folder.parent / "outside").read_text()
    watching = False
    assert opened == [str(folder.parent / "outside")]


def test_a_graph_swapped_for_the_other_is_named(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "swapped"
    shutil.copytree(folder, copied)
    (copied / "decode.onnx").write_bytes((copied / "prefill.onnx").read_bytes())
    with pytest.raises(ModelError, match=r"decode.onnx: expected"):
        pop_runtime.load(copied, threads=1)
