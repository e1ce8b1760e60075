"""Decode steps from buffers that keep their place: the same tokens, and what CUDA needs to record them.

A CPU records nothing. What it shows: that steps with a mask as wide as the cache are the same steps, and that sessions
and runs are told what ONNX Runtime's CUDA provider goes by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pop_runtime
from pop_runtime import device_buffer, kv_cache, sessions
from pop_runtime.cancel import Cancellation, Cancelled
from pop_runtime.errors import UsageError
from pop_runtime.fixed_step import FixedStep
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import read_manifest
from pop_runtime.providers import PROVIDERS, Target
from pop_runtime.sequence import Sequence
from tests.runtime.tiny_bundle import PROMPT, make_bundle


@pytest.fixture
def recorded_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Let the CPU pass for a provider that records runs; gives the recording's number of every run, by graph."""
    monkeypatch.setitem(PROVIDERS, "cpu", dataclasses.replace(PROVIDERS["cpu"], records_runs="enable_cuda_graph"))
    runs: list[tuple[str, str]] = []

    def run(self: Any, binding: Any, options: Any = None) -> None:
        kind = "decode" if any(value.name == "logits" for value in self.get_outputs()) else "prefill"
        runs.append((kind, "none" if options is None else options.get_run_config_entry("gpu_graph_id")))
        own(self, binding, options)

    own = sessions.onnxruntime.InferenceSession.run_with_iobinding
    monkeypatch.setattr(sessions.onnxruntime.InferenceSession, "run_with_iobinding", run)
    yield runs


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fixed_steps_give_the_same_tokens(tmp_path: Path, recorded_cpu: list[tuple[str, str]], dtype: str) -> None:
    folder = make_bundle(tmp_path / "bundle", dtype=dtype)
    plain, fixed = (pop_runtime.load(folder, threads=1, cuda_graphs=graphs) for graphs in (False, True))
    options: Any = {"max_new_tokens": 12, "ignore_eos": True, "seed": 5, "temperature": 0.7}
    wanted, found = (list(model.generate(PROMPT, **options)) for model in (plain, fixed))
    assert [token.id for token in found] == [token.id for token in wanted]
    prompts = [PROMPT[:3], PROMPT, PROMPT[:11]]
    wanted_rows, found_rows = (model.generate_batch(prompts, **options) for model in (plain, fixed))
    assert [row.token_ids for row in found_rows] == [row.token_ids for row in wanted_rows]


def test_logits_of_fixed_steps_are_those_of_the_pair_also_after_the_cache_has_grown(
    bundle: Path, recorded_cpu: list[tuple[str, str]]
) -> None:
    models = [pop_runtime.load(bundle, threads=1, cuda_graphs=graphs) for graphs in (False, True)]
    plain, fixed = (model.sequence(44) for model in models)
    for sequence in (plain, fixed):
        sequence.append(PROMPT)
    for token in (5, 17, 250, 3, 9, 8):
        for sequence in (plain, fixed):
            sequence.reserve(len(sequence) + 1)
            sequence.accept(token)
        np.testing.assert_allclose(fixed.step(), plain.step(), atol=1e-4)
    assert fixed.capacity > 44


def test_each_binding_has_a_recording_of_its_own_and_prompts_have_none(
    bundle: Path, recorded_cpu: list[tuple[str, str]]
) -> None:
    model = pop_runtime.load(bundle, threads=1, cuda_graphs=True)
    numbers = []
    for _ in range(2):
        recorded_cpu.clear()
        list(model.generate(PROMPT, max_new_tokens=4, ignore_eos=True, boundary_tokens=2))
        assert {number for kind, number in recorded_cpu if kind == "prefill"} == {"-1"}
        steps = [number for kind, number in recorded_cpu if kind == "decode"]
        assert steps[0] == "-1" and len(set(steps[1:])) == 1 and len(steps) == 4  # the boundary, then three steps
        numbers.append(int(steps[-1]))
    assert numbers[1] > numbers[0] > 0


def test_only_the_decode_session_is_opened_to_be_recorded(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []
    own = sessions.open_on

    def note(target: Target, graph: Any, options: Any, provider_options: dict[str, str]) -> Any:
        given.append(provider_options)
        return own(Target(), graph, options, {})

    monkeypatch.setitem(PROVIDERS, "cuda", dataclasses.replace(PROVIDERS["cuda"], memory="cpu"))
    monkeypatch.setattr(sessions, "open_on", note)
    manifest = read_manifest(bundle)
    for graphs in (False, True):
        sessions.open_graphs(bundle, manifest, 1, target=Target("cuda", 0, graphs))
    recorded = [options.get("enable_cuda_graph") for options in given]
    assert recorded == [None, None, None, "1"]


def test_a_device_s_buffers_are_written_where_they_lie(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory outside of numpy's reach, as a device's is: addresses stay, contents follow."""
    made: list[device_buffer.DeviceBuffer] = []

    def zeros(shape: tuple[int, ...], dtype: Any, place: Any) -> Any:
        made.append(device_buffer.to_device(np.zeros(shape, dtype), place))
        return made[-1]

    manifest = read_manifest(bundle)
    pair = sessions.open_graphs(bundle, manifest, 1)
    plain = Sequence(pair, allocate_cache(manifest, 1, 48))
    wanted = [plain.append(PROMPT), *(_step(plain, token) for token in (7, 12, 300 - 1))]
    monkeypatch.setattr(kv_cache, "zeros", zeros)
    monkeypatch.setattr("pop_runtime.fixed_step.zeros", zeros)
    cache = allocate_cache(manifest, 1, 48)
    sequence = Sequence(pair, cache)
    found = [sequence.append(PROMPT)]
    step = FixedStep(pair.decode, cache, (np.float32, 1))
    addresses = [buffer.owner.data_ptr() for buffer in made]
    for index, token in enumerate((7, 12, 300 - 1)):
        length = np.array([len(PROMPT) + index + 1])
        found.append(step.run(np.array([[token]]), length)[0, 0].copy())
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert [buffer.owner.data_ptr() for buffer in made] == addresses


def _step(sequence: Sequence, token: int) -> np.ndarray:
    sequence.accept(token)
    return sequence.step()


def test_a_cancelled_step_leaves_the_sequence_as_it_was(bundle: Path, recorded_cpu: list[tuple[str, str]]) -> None:
    sequence = pop_runtime.load(bundle, threads=1, cuda_graphs=True).sequence(48)
    sequence.append(PROMPT)
    sequence.accept(7)
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(Cancelled):
        sequence.step(cancellation)
    assert sequence.num_cached == len(PROMPT) and len(sequence) == len(PROMPT) + 1
    assert np.isfinite(sequence.step()).all()


@pytest.mark.parametrize("ep", [ep for ep in PROVIDERS if ep != "cuda"])
def test_other_providers_record_nothing_and_say_so(ep: str) -> None:
    with pytest.raises(UsageError, match=f"--cuda-graphs: expected --ep cuda, found {ep}; leave it out"):
        Target(ep, 0, cuda_graphs=True)
