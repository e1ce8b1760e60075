"""The table of providers: options, profiles, and that nothing falls back to another provider in silence."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pop_runtime
from pop_runtime import machine, open_provider
from pop_runtime.device_buffer import DeviceBuffer, address, copy_positions, to_device, zeros
from pop_runtime.errors import BackendError, ModelError, UsageError
from pop_runtime.kv_cache import KvCache, allocate_cache
from pop_runtime.manifest import Segment, read_manifest
from pop_runtime.open_provider import check_nodes, open_on, require_provider
from pop_runtime.providers import PROVIDERS, Place, Shapes, Target, shape_profiles
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import session_options
from tests.runtime.tiny_bundle import H_KV, PROMPT, D, L

SHAPES = Shapes((1, 16, 40), 64, 2)
GPU = [ep for ep in PROVIDERS if PROVIDERS[ep].memory == "cuda"]


def _subgraph(ep_name: str, *kinds: str) -> Any:
    return SimpleNamespace(ep_name=ep_name, get_nodes=lambda: [SimpleNamespace(op_type=kind) for kind in kinds])


# Targets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("metal", 0), "--ep: expected one of cpu, cuda, tensorrt, nv-tensorrt-rtx, openvino, found metal"),
        (("cuda", -1), "--device: expected 0 or more, found -1"),
        (("cpu", 1), "--device: expected 0, found 1"),
    ],
)
def test_a_target_that_is_not_in_the_table_is_refused(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Target(*arguments)


@pytest.mark.parametrize("ep", [ep for ep in PROVIDERS if ep != "cpu"])
def test_a_provider_that_is_not_installed_ends_with_exit_4_and_the_way_to_get_it(ep: str) -> None:
    if PROVIDERS[ep].ort_name in open_provider.onnxruntime.get_available_providers():
        pytest.skip("it is installed here")
    with pytest.raises(BackendError, match=f"--ep {ep} --device 0: expected {PROVIDERS[ep].ort_name} .* pip install"):
        require_provider(Target(ep))


def test_loading_for_a_missing_provider_never_runs_on_the_cpu_instead(bundle: Path) -> None:
    with pytest.raises(BackendError, match=r"expected CUDAExecutionProvider in onnxruntime .* pip install"):
        pop_runtime.load(bundle, ep="cuda")


def test_a_bundle_of_the_other_dialect_is_refused_with_the_flag_to_export_it_with(bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"--ep tensorrt: expected .* dialect standard, found ort; .*--dialect"):
        pop_runtime.load(bundle, ep="tensorrt")


def test_a_plugin_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, str]] = []
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", SimpleNamespace(get_library_path=lambda: "plugin.so"))
    monkeypatch.setattr(
        open_provider.onnxruntime, "register_execution_provider_library", lambda *args: registered.append(args)
    )
    with pytest.raises(BackendError, match=r"--ep openvino --device 0: .* found 0 devices that it can use"):
        require_provider(Target("openvino"))
    assert registered == [("OpenVINOExecutionProvider", "plugin.so")]


def test_a_plugin_that_does_not_load_is_refused_with_the_library_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVIDIA's plugin needs the driver's libcuda.so.1."""
    plugin = SimpleNamespace(get_library_path=lambda: "/no/such/plugin.so")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_nv_tensorrt_rtx", plugin)
    with pytest.raises(
        BackendError, match=r"--ep nv-tensorrt-rtx --device 0: .* found .*/no/such/plugin.so.*pip install"
    ):
        require_provider(Target("nv-tensorrt-rtx"))


def test_a_provider_whose_libraries_do_not_load_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime warns and opens the graph on the CPU."""
    monkeypatch.setattr(open_provider, "require_provider", lambda _: [])
    real = open_provider.onnxruntime.InferenceSession

    def on_the_cpu(graph: str, options: Any, providers: Any, **_: Any) -> Any:
        assert providers[0][0] == "CUDAExecutionProvider"
        return real(graph, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(open_provider.onnxruntime, "InferenceSession", on_the_cpu)
    with pytest.raises(BackendError, match="found CPUExecutionProvider once a graph was opened; pip install"):
        open_on(Target("cuda"), str(bundle / "decode.onnx"), session_options(1, {}), {})


@pytest.mark.parametrize("ep", ["tensorrt", "nv-tensorrt-rtx", "openvino"])
def test_not_one_node_may_fall_back(ep: str) -> None:
    own = PROVIDERS[ep].ort_name
    check_nodes(Target(ep), [_subgraph(own, "MatMul", "Attention")])
    with pytest.raises(BackendError, match=f"expected every node on {own}, found 2 x Shape on CPUExecutionProvider"):
        check_nodes(Target(ep), [_subgraph(own, "MatMul"), _subgraph("CPUExecutionProvider", "Shape", "Shape")])


def test_on_cuda_only_arithmetic_of_sizes_may_run_on_the_cpu() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    check_nodes(Target("cuda"), [_subgraph(cuda, "MatMul"), _subgraph(cpu, "Shape", "Concat")])
    with pytest.raises(BackendError, match="found 1 x GroupQueryAttention on CPUExecutionProvider"):
        check_nodes(Target("cuda"), [_subgraph(cuda, "MatMul"), _subgraph(cpu, "Shape", "GroupQueryAttention")])


def test_a_session_tells_how_many_nodes_each_provider_runs(model: pop_runtime.Model) -> None:
    nodes = model.sessions.nodes_by_provider
    assert set(nodes) == {"prefill.onnx", "decode.onnx"}
    assert all(set(counts) == {"CPUExecutionProvider"} and min(counts.values()) > 10 for counts in nodes.values())
    assert nodes["prefill.onnx"]["CPUExecutionProvider"] < nodes["decode.onnx"]["CPUExecutionProvider"]


# Options and profiles


def test_tensorrt_gets_one_range_for_prefill_and_one_more_for_single_tokens_in_decode(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    prefill = PROVIDERS["tensorrt"].options(1, "fp16", shape_profiles(manifest, SHAPES, "prefill.onnx"))
    decode = PROVIDERS["tensorrt"].options(1, "fp16", shape_profiles(manifest, SHAPES, "decode.onnx"))
    assert prefill["device_id"] == "1" and prefill["trt_fp16_enable"] == "1" and "trt_bf16_enable" not in prefill
    assert prefill["trt_profile_min_shapes"].startswith("input_ids:1x1,attention_mask:1x1,past_key_values.0.key:")
    assert prefill["trt_profile_opt_shapes"].startswith("input_ids:2x16,attention_mask:2x32,")
    assert prefill["trt_profile_max_shapes"].startswith("input_ids:2x40,attention_mask:2x64,")
    assert decode["trt_profile_max_shapes"].startswith("input_ids:2x1,input_ids:2x40,attention_mask:2x64,")
    buffers = [part for part in prefill["trt_profile_max_shapes"].split(",") if part.startswith("past")]
    assert len(buffers) == 2 * L and set(part.partition(":")[2] for part in buffers) == {f"2x{H_KV}x64x{D}"}


def test_every_profile_is_ordered_and_kv_buffers_have_one_length(bundle: Path) -> None:
    for graph in ("prefill.onnx", "decode.onnx"):
        for name, profile in shape_profiles(read_manifest(bundle), SHAPES, graph).items():
            for least, usual, most in profile:
                assert all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True)), name
                assert "past" not in name or least[2] == usual[2] == most[2] == SHAPES.max_seq_len


def test_a_segment_gets_the_profiles_of_its_own_layers_and_of_hidden_states(bundle: Path) -> None:
    kept = Segment("kept.onnx", ("prefill", "decode"), None, "h", (0,), 32)
    skipped = Segment("skipped.onnx", ("prefill",), "h", None, (1, 2), 32)
    manifest = dataclasses.replace(read_manifest(bundle), segments=(kept, skipped))
    profiles = shape_profiles(manifest, SHAPES, "skipped.onnx")
    buffers = {f"past_key_values.{layer}.{part}" for layer in (1, 2) for part in ("key", "value")}
    assert set(profiles) == {"input_ids", "attention_mask", "h", *buffers}
    assert profiles["h"] == (((1, 1, 32), (2, 16, 32), (2, 40, 32)),)  # prefill alone: one range
    both = shape_profiles(manifest, SHAPES, "kept.onnx")
    assert "h" not in both and both["input_ids"] == (((1, 1), (2, 1), (2, 1)), ((1, 1), (2, 16), (2, 40)))


def test_a_segment_of_unknown_layers_gets_no_profile(bundle: Path) -> None:
    segment = Segment("s.onnx", ("decode",), "h", None)
    manifest = dataclasses.replace(read_manifest(bundle), segments=(segment,))
    with pytest.raises(ModelError, match=r"s\.onnx: expected its layers and hidden size, found none"):
        shape_profiles(manifest, SHAPES, "s.onnx")


def test_tensorrt_rtx_uses_its_own_words_and_several_ranges_only_where_there_are(bundle: Path) -> None:
    options = PROVIDERS["nv-tensorrt-rtx"].options
    one, two = (
        options(0, None, shape_profiles(read_manifest(bundle), SHAPES, graph))
        for graph in ("prefill.onnx", "decode.onnx")
    )
    assert {"nv_profile_min_shapes", "nv_profile_opt_shapes", "nv_profile_max_shapes"} <= one.keys()
    assert "nv_multi_profile_enable" not in one and two["nv_multi_profile_enable"] == "1"
    assert not any(name.startswith("trt_") for name in two)


def test_cuda_computes_fp32_in_fp32() -> None:
    assert PROVIDERS["cuda"].options(2, None, {}) == {
        "device_id": "2", "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested",
    }  # fmt: skip


def test_openvino_device_0_is_the_cpu_and_the_others_are_gpus() -> None:
    options = PROVIDERS["openvino"].options
    assert [options(device, None, {})["device_type"] for device in (0, 1, 2)] == ["CPU", "GPU.0", "GPU.1"]
    assert options(0, "fp16", {})["precision"] == "FP16"


# Where the KV buffers lie


def test_buffers_outside_of_numpy_give_the_same_tokens(model: pop_runtime.Model) -> None:
    """The path of a device's memory, with ONNX Runtime's own allocation on the CPU in the place of a device."""
    tokens = []
    for on_device in (False, True):
        cache = allocate_cache(model.manifest, 2, 60)
        if on_device:
            buffers = {name: to_device(buffer, Place()) for name, buffer in cache.buffers.items()}
            cache = KvCache(model.manifest, buffers, cache.depth)
        sequence = Sequence(model.sessions, cache.row(1))
        token, answer = int(sequence.append(PROMPT).argmax()), []
        for _ in range(8):
            sequence.accept(token)
            token = int(sequence.step().argmax())
            answer.append(token)
        tokens.append(answer)
        first = next(iter(cache.buffers.values()))
        values = first.owner.numpy() if isinstance(first, DeviceBuffer) else first
        assert not values[0].any() and values[1].any()  # the other row was left alone
    assert tokens[0] == tokens[1]


def test_a_row_of_a_device_buffer_starts_where_it_should() -> None:
    values = np.arange(24, dtype=np.float32).reshape(3, 2, 2, 2)
    buffer = to_device(values, Place())
    row = buffer[1:2]
    assert row.shape == (1, 2, 2, 2) and address(row) - address(buffer) == values[0].nbytes
    assert address(values[1:2]) - address(values) == values[0].nbytes


def test_positions_are_copied_into_a_longer_buffer() -> None:
    old = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)
    for buffer in (old, to_device(old, Place())):
        longer = {"k": zeros((1, 2, 8, 4), np.float32, Place())}
        if isinstance(buffer, DeviceBuffer):
            longer = {"k": to_device(np.zeros((1, 2, 8, 4), np.float32), Place())}
        copy_positions(longer, {"k": buffer}, 2, Place())
        found = longer["k"].owner.numpy() if isinstance(longer["k"], DeviceBuffer) else longer["k"]
        assert (found[:, :, :2] == old[:, :, :2]).all() and not found[:, :, 2:].any()


def test_a_device_that_is_not_there_is_named_with_the_bytes_asked_for() -> None:
    with pytest.raises(BackendError, match="buffers: expected 64 bytes on cuda 3, found "):
        to_device(np.zeros((1, 16), np.float32), Place("cuda", 3))


def test_an_engine_prescribes_capacity_and_rows(model: pop_runtime.Model) -> None:
    place = Place(shapes=SHAPES)
    assert allocate_cache(model.manifest, 2, 10, place).capacity == 64 and place.longest_run == 40
    with pytest.raises(UsageError, match="engine: expected at most 2 rows, found 3"):
        allocate_cache(model.manifest, 3, 10, place)
    with pytest.raises(UsageError, match="engine: expected at most 64 tokens, found 65"):
        allocate_cache(model.manifest, 1, 65, place)


def test_a_turn_is_fed_in_runs_that_an_engine_takes(model: pop_runtime.Model, monkeypatch: Any) -> None:
    place, fed = Place(shapes=dataclasses.replace(SHAPES, prompt_lengths=(1, 7))), []
    sequence = Sequence(model.sessions, allocate_cache(model.manifest, 1, 64, place))
    feed = sequence.feed
    monkeypatch.setattr(sequence, "feed", lambda ids, *rest: fed.append(len(ids)) or feed(ids, *rest))
    logits = sequence.append(PROMPT)
    assert max(fed) == 7 and sum(fed) == len(PROMPT)
    whole = Sequence(model.sessions, allocate_cache(model.manifest, 1, 64)).append(PROMPT)
    np.testing.assert_allclose(logits, whole, atol=1e-3)


# The machine


def test_a_cpu_is_told_by_name_and_instruction_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = []
    for flags in ("sse avx2", "avx2 sse", "avx2 sse avx512f"):
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor\t: 0\nmodel name\t: Some CPU (R) 9\nflags\t\t: {flags}\n")
        monkeypatch.setattr(machine, "CPU_INFO", info)
        names.append(machine.describe_machine(Target()))
    assert names[0] == names[1] != names[2] and names[0].device.startswith("Some CPU (R) 9 ")
    assert names[0].slug.startswith("some-cpu-r-9-") and names[0].driver is None


@pytest.mark.parametrize("ep", GPU)
def test_a_gpu_is_told_by_what_its_driver_says(ep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def query(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="NVIDIA H200, 9.0, 580.65.06\n")

    monkeypatch.setattr(machine.subprocess, "run", query)
    monkeypatch.setattr(machine, "require_provider", lambda _: [])
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: SimpleNamespace(getInferLibVersion=lambda: 101500))
    found = machine.describe_machine(Target(ep, 1))
    assert (found.device, found.driver, found.slug) == ("NVIDIA H200, 9.0", "580.65.06", "nvidia-h200-9-0")
    assert asked[0][-1] == "--id=1" and (found.versions.get("tensorrt") == "101500") == (ep == "tensorrt")


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "require_provider", lambda _: [])
    monkeypatch.setattr(machine, "NVIDIA_QUERY", ("no-such-program",))
    with pytest.raises(BackendError, match=r"--ep cuda --device 0: .* found no GPU of that number .*pip install"):
        machine.describe_machine(Target("cuda"))
