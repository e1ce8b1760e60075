"""Opening the pair: threads, folders, refusals, and what the runtime must not import."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.resources
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pop_runtime
from pop_runtime import kv_cache, open_provider, sessions
from pop_runtime.errors import BackendError, ModelError, UsageError
from pop_runtime.graph_check import check_graph
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import KvLayer, read_manifest
from pop_runtime.sessions import open_pair
from pop_runtime.threads import THREADS_PER_CORE, check_threads, visible_cores
from tests.runtime.tiny_bundle import make_bundle

PROMPT = [5, 9, 200, 31]


def _tokens(folder: Path | str, **options: Any) -> list[int]:
    return [token.id for token in pop_runtime.load(folder, **options).generate(PROMPT, max_new_tokens=8)]


# Threads


def _intra_threads(session: Any) -> int:
    return int(session.get_session_options().intra_op_num_threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_thread_option_reaches_both_sessions(bundle: Path, threads: int) -> None:
    pair = open_pair(bundle, read_manifest(bundle), threads)
    assert [_intra_threads(pair.prefill), _intra_threads(pair.decode), pair.threads] == [threads] * 3


def test_without_the_option_threads_are_the_visible_cores(bundle: Path) -> None:
    pair = open_pair(bundle, read_manifest(bundle), None)
    assert _intra_threads(pair.decode) == visible_cores() == len(os.sched_getaffinity(0))


def test_a_platform_without_affinity_counts_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert visible_cores() == 7


def test_tokens_do_not_depend_on_the_number_of_threads(bundle: Path) -> None:
    assert _tokens(bundle, threads=1) == _tokens(bundle, threads=2)


@pytest.mark.parametrize("threads", [0, -1])
def test_fewer_than_one_thread_is_refused(bundle: Path, threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads: expected at least 1, found {threads}"):
        pop_runtime.load(bundle, threads=threads)


def test_more_threads_than_the_machine_can_start_are_refused(bundle: Path) -> None:
    most = THREADS_PER_CORE * visible_cores()
    check_threads(most)
    for threads in (most + 1, 100_000, 99_999_999_999):
        with pytest.raises(UsageError, match=f"^threads: expected at most {most}, 16 .* found {threads}; lower it"):
            pop_runtime.load(bundle, threads=threads)


def test_a_process_on_one_core_says_nothing_and_uses_one_thread(bundle: Path) -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import sys, pop_runtime; model = pop_runtime.load(sys.argv[1])\n"
        "print(model.sessions.threads, len(list(model.generate([5, 6], max_new_tokens=3, ignore_eos=True))))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bundle)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("1 3\n", "", 0)


# Where the folder is


def test_tokens_are_the_same_wherever_the_folder_lies(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = _tokens(bundle, threads=1)
    moved = tmp_path / "a é 模"
    shutil.copytree(bundle, moved)
    (tmp_path / "link").symlink_to(moved, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for name in (moved, f"{moved}/", "link", "./link/", "link/../a é 模"):
        assert _tokens(name, threads=1) == wanted


def test_a_folder_of_links_into_another_folder_runs(bundle: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for index, path in enumerate(sorted(bundle.iterdir())):
        shutil.copy(path, blobs / f"{index}")
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / f"{index}")
    assert _tokens(snapshot, threads=1) == _tokens(bundle, threads=1)


# Refusals


def test_an_altered_file_is_refused_unless_verification_is_off(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(bundle, folder)
    content = bytearray((folder / "weights.bin").read_bytes())
    content[100] ^= 1
    (folder / "weights.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"weights.bin: expected sha256"):
        pop_runtime.load(folder)
    assert pop_runtime.load(folder, verify=False)


@pytest.mark.parametrize("name", ["prefill.onnx", "decode.onnx"])
def test_a_missing_graph_is_named(bundle: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "short"
    shutil.copytree(bundle, folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"{name}: expected an ONNX graph, found none"):
        pop_runtime.load(folder, verify=False)


@pytest.mark.parametrize("cut", [0, 100])
def test_a_graph_that_onnx_runtime_refuses_is_one_line(bundle: Path, tmp_path: Path, cut: int) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(bundle, folder)
    (folder / "decode.onnx").write_bytes((folder / "decode.onnx").read_bytes()[:cut])
    with pytest.raises(BackendError, match=r"^decode.onnx: expected a graph that ONNX Runtime loads") as caught:
        pop_runtime.load(folder, verify=False)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_one_line(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(bundle, folder)
    (folder / "weights.bin").unlink()
    with pytest.raises(BackendError, match=r"weights\.bin"):
        pop_runtime.load(folder, verify=False)


def test_a_run_that_fails_is_one_line_that_names_the_graph(tmp_path: Path) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, max_positions=200), threads=1)  # the graphs know 64 positions
    with pytest.raises(BackendError, match=r"^prefill.onnx: expected a run over 79 tokens, 79 in all") as caught:
        next(model.generate([5] * 80))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_layers": (KvLayer(4, 16, 16),) * 3}, r"past_key_values.0.key: expected shape \[None, 4, None, 16\]"),
        ({"kv_layers": (KvLayer(2, 16, 8),) * 3}, r"past_key_values.0.value: expected shape"),
        ({"kv_dtype": "float16"}, r"past_key_values.0.key: expected tensor\(float16\).*, found tensor\(float\)"),
        ({"input_ids": "tokens"}, r"expected the value 'tokens' \(manifest.json\), found none"),
        ({"present_key": "now.{layer}.key"}, r"expected the value 'now.0.key'"),
        ({"vocab_size": 301}, r"logits: expected shape \[None, None, 301\]"),
        ({"decode_graph": "prefill.onnx"}, r"expected the value 'logits'"),
        ({"logits": "ids"}, r"expected the value 'ids'"),
    ],
)
def test_graphs_that_are_not_those_of_the_manifest_are_refused(
    bundle: Path, fields: dict[str, Any], message: str
) -> None:
    manifest = dataclasses.replace(read_manifest(bundle), **fields)
    with pytest.raises(ModelError, match=message):
        open_pair(bundle, manifest, 1)


def test_logits_that_are_no_floats_are_refused(model: pop_runtime.Model) -> None:
    outputs = [
        SimpleNamespace(
            name=value.name, shape=value.shape, type="tensor(int8)" if value.name == "logits" else value.type
        )
        for value in model.sessions.decode.get_outputs()
    ]
    session = SimpleNamespace(get_inputs=model.sessions.decode.get_inputs, get_outputs=lambda: outputs)
    with pytest.raises(ModelError, match=r"logits: expected tensor\(float\) or .*, found tensor\(int8\)"):
        check_graph(session, model.manifest, "decode.onnx", has_logits=True)


def test_graphs_as_promised_pass(model: pop_runtime.Model) -> None:
    check_graph(model.sessions.decode, model.manifest, "decode.onnx", has_logits=True)


def test_memory_that_is_not_there_is_named_in_bytes(model: pop_runtime.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(kv_cache.np, "zeros", refuse)
    with pytest.raises(BackendError, match=r"KV cache: expected 15360 bytes for 2 x 10 tokens"):
        allocate_cache(model.manifest, 2, 10)


def test_a_missing_onnxruntime_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "onnxruntime":
            raise ModuleNotFoundError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BackendError, match=r"onnxruntime: expected the package, found none; pip install"):
        importlib.reload(open_provider)


def test_the_runtime_imports_neither_torch_nor_transformers_nor_the_exporter(chat_bundle: Path) -> None:
    code = (
        "import sys, pop_runtime, pop_runtime.cli; model = pop_runtime.load(sys.argv[1], threads=1)\n"
        "model.generate_batch(['hi', 'you'], max_new_tokens=2); list(model.generate('hi', max_new_tokens=2))\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'torch', 'transformers', 'pop_export', 'onnx', 'onnxscript', 'onnx_ir'}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(chat_bundle)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_reading_a_manifest_needs_no_onnxruntime() -> None:
    code = "import sys, pop_runtime.manifest; print('onnxruntime' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("package", ["pop_runtime", "pop_export"])
def test_a_package_says_that_it_has_types(package: str) -> None:
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_public_names_resolve_and_others_do_not() -> None:
    assert all(
        getattr(pop_runtime, name) for name in ("Completion", "Generation", "Model", "Sequence", "Token", "load")
    )
    with pytest.raises(AttributeError, match="no attribute 'run'"):
        pop_runtime.run  # noqa: B018


def test_threads_that_open_sessions_register_one_memory_pool(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def register(*arguments: object) -> None:
        time.sleep(0.05)
        calls.append(arguments)

    sessions._share_memory_pool.cache_clear()
    monkeypatch.setattr(sessions.onnxruntime, "create_and_register_allocator", register)
    with ThreadPoolExecutor(4) as pool:
        pairs = list(pool.map(lambda _: open_pair(bundle, read_manifest(bundle), 1), range(4)))
    assert len(calls) == 1 and len(pairs) == 4
