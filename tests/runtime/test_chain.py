"""Chains of sessions on graphs of a few nodes, and how a bundle's segments are chosen and checked."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from pop_runtime import sessions
from pop_runtime.chain import ChainedSession, Link
from pop_runtime.errors import ModelError
from pop_runtime.graph_check import check_hidden_states
from pop_runtime.manifest import Manifest, Segment, check_manifest, read_manifest
from pop_runtime.memory import memory_text, peak_bytes, proportional_bytes
from pop_runtime.sessions import SessionPair, open_pair
from tests.runtime.tiny_bundle import make_bundle

E = 3


def _session(inputs: dict[str, str], outputs: list[str], nodes: list[onnx.NodeProto]) -> onnxruntime.InferenceSession:
    kinds = {"ids": (TensorProto.INT64, ["B", "S"]), "hidden": (TensorProto.FLOAT, ["B", "S", E])}
    taken = [helper.make_tensor_value_info(name, *kinds[kind]) for name, kind in inputs.items()]
    made = [helper.make_tensor_value_info(name, *kinds["hidden"]) for name in outputs]
    table = helper.make_tensor("table", TensorProto.FLOAT, [4, E], np.arange(4 * E, dtype=np.float32))
    graph = helper.make_graph(nodes, "part", taken, made, [table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _chain() -> ChainedSession:
    """Return a chain: the ids' rows of a table, their negative beside, and twice them."""
    first = _session({"ids": "ids"}, ["h0"], [helper.make_node("Gather", ["table", "ids"], ["h0"])])
    aside = _session({"h0": "hidden"}, ["beside"], [helper.make_node("Neg", ["h0"], ["beside"])])
    last = _session({"h0": "hidden"}, ["logits"], [helper.make_node("Add", ["h0", "h0"], ["logits"])])
    return ChainedSession((Link(first, None, "h0"), Link(aside, "h0", None), Link(last, "h0", None)), "ids")


def test_a_chain_looks_like_one_session():
    chain = _chain()
    assert [value.name for value in chain.get_inputs()] == ["ids"]
    assert [value.name for value in chain.get_outputs()] == ["beside", "logits"]


def test_hidden_states_go_from_link_to_link_and_follow_the_size_of_the_ids():
    chain = _chain()
    binding = chain.io_binding()
    for ids in ([[1, 2]], [[3]], [[0]], [[2, 1, 0]]):
        given, found = np.array(ids), {}
        for name in ("beside", "logits"):
            found[name] = np.zeros((*given.shape, E), np.float32)
            value = onnxruntime.OrtValue.ortvalue_from_numpy(found[name])
            binding.bind_ortvalue_output(name, value)
        binding.bind_cpu_input("ids", given)
        chain.run_with_iobinding(binding)
        rows = np.arange(4 * E, dtype=np.float32).reshape(4, E)[given]
        np.testing.assert_array_equal(found["beside"], -rows)
        np.testing.assert_array_equal(found["logits"], 2 * rows)


@pytest.mark.parametrize(
    ("precision", "low_memory", "opened"),
    [
        ("fp32", False, "segments"), ("fp32", True, "graphs"), ("fp16", False, "segments"),
        ("int8-block32-symmetric", False, "segments"), ("int8-block32-symmetric", True, "segments"),
        ("int4-block32-gptq", False, "segments"), ("int4-block32-gptq", True, "segments"),
    ],
)  # fmt: skip
def test_segments_are_used_unless_weights_stay_as_they_lie_in_the_file(
    bundle, monkeypatch, precision, low_memory, opened
):
    segment = Segment("s.onnx", ("prefill", "decode"), None, None)
    manifest = dataclasses.replace(read_manifest(bundle), precision=precision, segments=(segment,))
    asked: list[str] = []

    def answer(name: str) -> SessionPair:
        asked.append(name)
        return SessionPair(None, None, 1)

    monkeypatch.setattr(sessions, "check_graph", lambda *_, **__: None)
    monkeypatch.setattr(sessions, "open_segments", lambda *_: answer("segments"))
    monkeypatch.setattr(sessions, "open_graphs", lambda *_: answer("graphs"))
    open_pair(bundle, manifest, 1, low_memory)
    assert asked == [opened]


def test_a_bundle_without_segments_opens_its_two_graphs(bundle):
    pair = open_pair(bundle, read_manifest(bundle), 1)
    assert isinstance(pair.prefill, onnxruntime.InferenceSession)
    assert pair.sharing == "nothing"
    assert open_pair(bundle, read_manifest(bundle), 1, low_memory=True).sharing == "all weights, as in the file"


@pytest.mark.parametrize(
    "segments",
    [
        (Segment("decode.onnx", ("prefill", "decode"), "h", None),),
        (Segment("decode.onnx", ("decode",), None, None),),
        (Segment("decode.onnx", ("prefill", "decode"), None, "h"), Segment("prefill.onnx", ("decode",), None, None)),
        (Segment("decode.onnx", ("prefill", "verify"), None, None),),
    ],
)
def test_segments_that_are_no_chain_are_refused(bundle: Path, segments):
    manifest = dataclasses.replace(read_manifest(bundle), segments=segments)
    with pytest.raises(ModelError, match="segments: expected one that reads ids first in each stage"):
        check_manifest(manifest, "manifest.json")


def _edited(folder: Path, index: int, **fields: str | None) -> Manifest:
    manifest = read_manifest(folder)
    segments = list(manifest.segments)
    segments[index] = dataclasses.replace(segments[index], **fields)
    return dataclasses.replace(manifest, segments=tuple(segments))


@pytest.mark.parametrize(
    ("index", "fields", "message"),
    [
        (0, {"hidden_out": "other"}, "segment-0-kept.onnx: expected the value 'other' (manifest.json), found none"),
        (2, {"hidden_in": "other"}, "segment-1-full.onnx: expected the value 'other' (manifest.json), found none"),
        (0, {"hidden_out": None}, "segment-1-skipped.onnx, hidden_1: expected hidden states of the segment before"),
        (2, {"hidden_out": "present.1.key"}, "segment-1-full.onnx, present.1.key: expected shape [None, None, None]"),
        (2, {"hidden_in": "attention_mask"}, "segment-1-full.onnx, attention_mask: expected tensor(float) "),
    ],
)
def test_hidden_states_that_do_not_fit_are_refused(tmp_path: Path, index: int, fields: dict[str, str], message: str):
    # a wrong name ended in a KeyError when the first turn was read
    make_bundle(tmp_path, segmented=True)
    with pytest.raises(ModelError, match=re.escape(message)):
        open_pair(tmp_path, _edited(tmp_path, index, **fields), 1)


@pytest.mark.parametrize(
    ("made", "read", "message"),
    [
        (["B", "S", None], ["B", "S", None], "b/first.onnx, h: expected hidden states of a fixed size, found"),
        (["B", "S", 0], ["B", "S", 0], "b/first.onnx, h: expected hidden states of a fixed size, found"),
        (["B", "S", E], ["B", "S", E + 1], f"b/second.onnx, h: expected shape [None, None, {E}]"),
    ],
)
def test_hidden_states_of_an_open_or_of_another_size_are_refused(made, read, message: str):
    def session(*values: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(get_inputs=lambda: values, get_outputs=lambda: values)

    first = session(SimpleNamespace(name="h", type="tensor(float)", shape=made))
    second = session(SimpleNamespace(name="h", type="tensor(float)", shape=read))
    chain = ChainedSession((Link(first, None, "h", "first.onnx"), Link(second, "h", None, "second.onnx")), "ids")
    with pytest.raises(ModelError, match=re.escape(message)):
        check_hidden_states(chain, Path("b"))


def test_a_segment_that_is_not_in_the_list_of_files_is_refused(bundle: Path):
    segments = (Segment("gone.onnx", ("prefill", "decode"), None, None),)
    manifest = dataclasses.replace(read_manifest(bundle), segments=segments)
    with pytest.raises(ModelError, match=r"found no entry for gone\.onnx"):
        check_manifest(manifest, "manifest.json")


def test_memory_is_what_the_system_says_and_stats_say_what_is_shared():
    assert 1e6 < proportional_bytes() <= peak_bytes()
    assert memory_text("the kept layers").endswith(" MB; prefill and decode hold once: the kept layers")


def test_memory_that_the_system_does_not_tell_is_said_to_be_unknown(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    assert "not known on this system" in memory_text("nothing")
