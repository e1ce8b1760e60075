"""Weights uploaded once for both sessions: the same calls on the computer's own memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from pop_runtime import sessions
from pop_runtime.compile.cli import main as compile_bundle
from pop_runtime.device_weights import upload_shared
from pop_runtime.errors import BackendError, ModelError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import read_manifest
from pop_runtime.providers import HOST, PROVIDERS, Place, Target
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair, open_graphs, open_session
from tests.runtime.tiny_bundle import PROMPT, make_bundle, tiny_weights


def _graphs(folder: Path) -> list[Path]:
    return [folder / "prefill.onnx", folder / "decode.onnx"]


def _logits(pair: SessionPair, folder: Path) -> np.ndarray:
    manifest = read_manifest(folder)
    return Sequence(pair, allocate_cache(manifest, 1, 48)).append(PROMPT)


def _erase(folder: Path, names: Any) -> None:
    """Overwrite some weights in the file."""
    content = bytearray((folder / "weights.bin").read_bytes())
    for tensor in onnx.load(folder / "decode.onnx", load_external_data=False).graph.initializer:
        if tensor.name in names:
            place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
            content[place["offset"] : place["offset"] + place["length"]] = bytes(place["length"])
    (folder / "weights.bin").unlink()  # not within the file that was mapped
    (folder / "weights.bin").write_bytes(content)


def test_both_sessions_compute_with_the_uploaded_weights_and_not_with_the_file_s(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle")
    wanted = _logits(open_graphs(folder, read_manifest(folder), 1), folder)
    weights = upload_shared(_graphs(folder), folder / "weights.bin", HOST)
    _erase(folder, weights)
    prefill, decode = (open_session(graph, 1, {}, weights=weights) for graph in _graphs(folder))
    np.testing.assert_array_equal(_logits(SessionPair(prefill, decode, 1), folder), wanted)
    without = _logits(open_graphs(folder, read_manifest(folder), 1), folder)
    assert not np.allclose(without, wanted, atol=1)


def test_16_bits_are_uploaded_as_they_are(tmp_path: Path) -> None:
    """The CPU computes with copies in 32 bits, made from the file, so here the values alone can be compared."""
    weights = tiny_weights()
    folder = make_bundle(tmp_path / "bundle", weights, dtype="float16")
    shared = upload_shared(_graphs(folder), folder / "weights.bin", HOST)
    for name in ("embed", "0.q", "2.v"):
        np.testing.assert_array_equal(shared[name].numpy(), weights[name].astype(np.float16))


def test_what_only_one_graph_reads_is_left_to_it(bundle: Path) -> None:
    shared = upload_shared(_graphs(bundle), bundle / "weights.bin", HOST)
    assert "0.q" in shared and "1.k" in shared
    assert not {"head", "1.q", "2.up"} & set(shared)  # the head and what skipped layers leave out: decode alone


def test_the_graphs_of_an_engine_read_the_same_file(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle")
    assert compile_bundle([str(folder), "--ep", "cpu"]) == 0
    (engine,) = (folder / "engines").glob("*")
    own, of_engine = (upload_shared(_graphs(place), folder / "weights.bin", HOST) for place in (folder, engine))
    assert {"0.q", "0.up"} <= set(of_engine) <= set(own)


def test_a_device_s_pair_is_opened_with_one_copy(bundle: Path, monkeypatch: Any) -> None:
    """With memory that only says it is a device's: the sessions get the same values, and say so."""
    given: list[Any] = []
    monkeypatch.setitem(PROVIDERS, "cuda", dataclasses.replace(PROVIDERS["cpu"], memory="cuda"))
    monkeypatch.setattr(sessions, "upload_shared", lambda graphs, weights, _: upload_shared(graphs, weights, HOST))
    own = sessions.open_on
    monkeypatch.setattr(sessions, "open_on", lambda target, *rest: given.append(target) or own(Target(), *rest))
    pair = open_graphs(bundle, read_manifest(bundle), 1, target=Target("cuda"))
    assert len(given) == 2 and len(pair.weights) > 10
    assert pair.sharing == f"what both read, {len(pair.weights)} tensors on cuda 0"
    assert pair.place == Place("cuda", 0)


@pytest.mark.parametrize(("field", "value"), [("offset", 10**9), ("offset", -8), ("length", 3), ("location", "../x")])
def test_bytes_outside_of_the_weights_file_are_refused(tmp_path: Path, field: str, value: int | str) -> None:
    folder = make_bundle(tmp_path / "bundle")
    graph = onnx.load(folder / "decode.onnx", load_external_data=False)
    tensor = next(tensor for tensor in graph.graph.initializer if tensor.external_data)
    next(entry for entry in tensor.external_data if entry.key == field).value = str(value)
    (folder / "decode.onnx").write_bytes(graph.SerializeToString())
    with pytest.raises(ModelError, match=f"{tensor.name}: expected .* bytes within weights.bin"):
        upload_shared(_graphs(folder), folder / "weights.bin", HOST)


def test_memory_that_a_device_refuses_is_said(bundle: Path) -> None:
    with pytest.raises(BackendError, match=r"weights: expected \d+ bytes on cuda 7, found"):
        upload_shared(_graphs(bundle), bundle / "weights.bin", Place("cuda", 7))
