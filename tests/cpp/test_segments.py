"""Bundles with segments in C++: the tokens of Python on what the exporter cuts, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from pop_runtime import errors
from pop_runtime.manifest import Manifest, Windows, describe_files, write_manifest
from pop_runtime.model import Model
from pop_runtime.sessions import open_pair
from tests.cpp.conftest import PopRun
from tests.cpp.test_same_tokens import compare
from tests.exporter.test_joined_turns import exported, llama
from tests.runtime.tiny_bundle import PROMPT, make_bundle

__all__ = ["exported", "llama"]  # fixtures
pytestmark = pytest.mark.cpp


@pytest.mark.parametrize("chunk", [7, 512])
def test_segments_of_an_export_give_the_same_tokens(
    exported: tuple[Path, Manifest], pop_run: PopRun, chunk: int
) -> None:
    folder, manifest = exported
    names = ["prefill.onnx", "decode.onnx", "weights.bin", *(segment.graph for segment in manifest.segments)]
    manifest = dataclasses.replace(manifest, files=describe_files(folder, names), windows=Windows(2, 3))
    write_manifest(folder, manifest)
    model = Model(folder, manifest, open_pair(folder, manifest, threads=1))
    must_differ = bool(manifest.plan.skipped_layers)
    compare(
        pop_run, model, PROMPT, 100, must_differ=must_differ, repetition_penalty=1.5, prefill_chunk_tokens=chunk
    )  # fmt: skip


@pytest.fixture
def segmented(tmp_path: Path) -> Path:
    """A bundle with segments to alter."""
    return make_bundle(tmp_path, segmented=True)


def _edit_segment(folder: Path, index: int, **fields: Any) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["segments"][index] |= fields
    path.write_text(json.dumps(content))


def _refusal(folder: Path, pop_run: PopRun, error: type[errors.PopError]) -> str:
    done = pop_run(folder, "--ids", "5,6,7", "--no-verify")
    assert (done.code, done.out, done.err.count("\n")) == (error.exit_code, "", 1)
    return done.err


def test_a_segment_that_is_missing_is_a_bundle_error(segmented: Path, pop_run: PopRun) -> None:
    (segmented / "segment-1-full.onnx").unlink()
    message = "segment-1-full.onnx: expected an ONNX graph, found none; re-run pop-export"
    assert message in _refusal(segmented, pop_run, errors.ModelError)
    assert pop_run(segmented, "--ids", "5,6,7", "--no-verify", "--low-memory").code == 0  # opens the whole graphs


def test_an_altered_segment_is_refused(segmented: Path, pop_run: PopRun) -> None:
    path = segmented / "segment-2-full.onnx"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    done = pop_run(segmented, "--ids", "5,6,7")
    assert done.code == errors.ModelError.exit_code
    assert "segment-2-full.onnx: expected sha256" in done.err


def test_a_segment_whose_weights_lie_elsewhere_is_refused(segmented: Path, pop_run: PopRun) -> None:
    path = segmented / "segment-0-kept.onnx"
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "/etc/passwd" if entry.key == "location" else entry.value
    path.write_bytes(model.SerializeToString())
    assert "expected data in weights.bin, found /etc/passwd" in _refusal(segmented, pop_run, errors.ModelError)


def test_a_segment_that_does_not_load_is_a_backend_error(segmented: Path, pop_run: PopRun) -> None:
    path = segmented / "segment-2-skipped.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[-1].op_type = "NoSuchOperator"
    path.write_bytes(model.SerializeToString())
    message = _refusal(segmented, pop_run, errors.BackendError)
    assert "segment-2-skipped.onnx: expected a graph that ONNX Runtime loads, found" in message


@pytest.mark.parametrize(
    ("index", "fields", "message"),
    [
        (0, {"hidden_out": "other"}, "segment-0-kept.onnx: expected the value 'other' (manifest.json), found none"),
        (2, {"hidden_in": "other"}, "segment-1-full.onnx: expected the value 'other' (manifest.json), found none"),
        (0, {"hidden_out": None}, "segment-1-full.onnx, hidden_1: expected hidden states of the segment before"),
        (2, {"hidden_out": "present.1.key"}, "segment-1-full.onnx, present.1.key: expected shape [any, any, any]"),
        (2, {"hidden_in": "attention_mask"}, "segment-1-full.onnx, attention_mask: expected float32"),
    ],
)
def test_hidden_states_that_do_not_fit_are_refused(
    segmented: Path, pop_run: PopRun, index: int, fields: dict[str, Any], message: str
) -> None:
    _edit_segment(segmented, index, **fields)
    assert message in _refusal(segmented, pop_run, errors.ModelError)


def test_a_value_that_no_segment_has_is_missing_in_its_graph(segmented: Path, pop_run: PopRun) -> None:
    path = segmented / "manifest.json"
    path.write_text(path.read_text().replace('"logits": "logits"', '"logits": "scores"'))
    assert "decode.onnx: expected the value 'scores'" in _refusal(segmented, pop_run, errors.ModelError)
