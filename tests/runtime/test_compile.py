"""`pop-compile` on the CPU: the same tokens, keys that tell engines apart, refusal of stale ones, no leftovers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import pop_runtime
from pop_runtime.cli import main as run
from pop_runtime.compile import build
from pop_runtime.compile.cli import chosen_shapes, main
from pop_runtime.engine import PROVIDER_VERSION, Facts, find_engine, make_facts, read_record
from pop_runtime.errors import BackendError, GateError, ModelError, UsageError
from pop_runtime.machine import Machine, describe_machine
from pop_runtime.manifest import read_manifest
from pop_runtime.providers import CPU, Shapes
from tests.runtime.tiny_bundle import PROMPT, make_bundle, tiny_weights

MACHINE = Machine("NVIDIA H200, 9.0", "580.65", {"onnxruntime": "1.32.0", "cuda": "13.0", "tensorrt": "101500"})


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A bundle with an engine for the CPU."""
    folder = make_bundle(tmp_path / "bundle")
    assert main([str(folder), "--ep", "cpu"]) == 0
    return folder


def _engine_folders(bundle: Path) -> list[Path]:
    return sorted((bundle / "engines").glob("*"))


def _tokens(folder: Path, **options: Any) -> list[int]:
    return [token.id for token in pop_runtime.load(folder, threads=1, **options).generate(PROMPT, max_new_tokens=16)]


def _edit_record(folder: Path, **changes: Any) -> None:
    place = folder / "engine.json"
    record = json.loads(place.read_text())
    record["facts"] |= changes
    place.write_text(json.dumps(record))


# Building


def test_an_engine_gives_the_same_tokens_from_the_bundle_s_own_weights(compiled: Path) -> None:
    assert _tokens(compiled, engine=True) == _tokens(compiled)
    (folder,) = _engine_folders(compiled)
    assert sorted(path.name for path in folder.iterdir()) == ["build.log", "decode.onnx", "engine.json", "prefill.onnx"]
    assert sum(path.stat().st_size for path in folder.iterdir()) < (compiled / "weights.bin").stat().st_size


def test_the_engine_is_what_runs(compiled: Path) -> None:
    """Another seed's graphs in its place give another answer: the bundle's graphs are not what is run."""
    (folder,) = _engine_folders(compiled)
    shutil.copy(folder / "prefill.onnx", folder / "decode.onnx")
    with pytest.raises(ModelError, match="expected the value 'logits'"):
        pop_runtime.load(compiled, threads=1, verify=False, engine=True)


def test_a_second_build_keeps_what_is_there_and_force_builds_anew(compiled: Path, capsys: Any) -> None:
    (folder,) = _engine_folders(compiled)
    before = (folder / "engine.json").stat().st_mtime_ns
    assert main([str(compiled), "--ep", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["built"] is False and (folder / "engine.json").stat().st_mtime_ns == before
    assert main([str(compiled), "--ep", "cpu", "--force", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["built"] is True and (folder / "engine.json").stat().st_mtime_ns > before
    assert result["bytes"] > 1000 and result["build_seconds"] > 0 and _engine_folders(compiled) == [folder]
    assert set(result["nodes_by_provider"]["decode.onnx"]) == {"CPUExecutionProvider"}


def test_progress_goes_to_stderr_and_the_libraries_words_into_the_log(compiled: Path, capfd: Any) -> None:
    assert main([str(compiled), "--ep", "cpu", "--force"]) == 0
    out, err = capfd.readouterr()
    assert "built in" in out and "MB" in out and "CPUExecutionProvider" in out
    lines = err.splitlines()
    assert len(lines) == 6 and all(line.startswith(("prefill.onnx", "decode.onnx", "a first run")) for line in lines)
    assert "onnxruntime" in (_engine_folders(compiled)[0] / "build.log").read_text(errors="replace")


@pytest.mark.parametrize("problem", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(bundle: Path, tmp_path: Path, monkeypatch: Any, problem: BaseException) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    real, calls = build.open_on, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise problem
        return real(*arguments)

    monkeypatch.setattr(build, "open_on", failing)
    assert main([str(folder), "--ep", "cpu"]) == (130 if isinstance(problem, KeyboardInterrupt) else 4)
    assert len(calls) == 2 and not (folder / "engines").exists()
    assert _tokens(folder) == _tokens(bundle)


def test_a_failed_rebuild_keeps_the_engine_that_was_there(compiled: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(build, "_try", lambda *_: (_ for _ in ()).throw(GateError("no finite numbers")))
    before = _engine_folders(compiled)
    assert main([str(compiled), "--ep", "cpu", "--force"]) == 5
    assert _engine_folders(compiled) == before and _tokens(compiled, engine=True) == _tokens(compiled)


def test_an_old_engine_stays_until_the_new_one_has_its_name(compiled: Path, monkeypatch: Any, capsys: Any) -> None:
    before, real = _engine_folders(compiled), Path.rename

    def refused(path: Path, target: Path) -> Path:
        if ".partial-" in path.name and ".partial-old-" not in path.name:
            raise OSError(5, "Input/output error", str(path))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert main([str(compiled), "--ep", "cpu", "--force"]) == 3
    assert "cannot write the engine: Input/output error; nothing was changed" in capsys.readouterr().err
    assert _engine_folders(compiled) == before and _tokens(compiled, engine=True) == _tokens(compiled)


def test_what_a_killed_build_left_is_removed_by_the_next(compiled: Path) -> None:
    (engine,) = _engine_folders(compiled)
    left = compiled / "engines" / f".{engine.name}.partial-0"
    left.mkdir()
    assert main([str(compiled), "--ep", "cpu", "--force"]) == 0
    assert not left.exists()


def test_an_engine_without_finite_numbers_is_not_kept(tmp_path: Path, capsys: Any) -> None:
    weights = tiny_weights()
    weights["head"][:] = float("nan")
    folder = make_bundle(tmp_path / "bundle", weights=weights)
    assert main([str(folder), "--ep", "cpu"]) == 5
    assert "expected finite logits" in capsys.readouterr().err and not (folder / "engines").exists()


def test_a_folder_that_cannot_be_written_is_one_line(bundle: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    (folder / "engines").write_text("in the way")
    assert main([str(folder), "--ep", "cpu"]) == 3
    assert "cannot write the engine" in capsys.readouterr().err


def test_an_engine_is_not_run_in_low_memory(compiled: Path, capsys: Any) -> None:
    # on segments the flag did nothing, without a word
    assert run([str(compiled), "--ids", "5,9", "--json", "--engine", "--low-memory"]) == 2
    assert "low_memory: expected no engine, found one, which runs as it was built" in capsys.readouterr().err


def test_pop_run_takes_the_engine_and_tells_which_provider_runs_how_many_nodes(compiled: Path, capsys: Any) -> None:
    answers = []
    for flags in ([], ["--engine"], ["--engine", "--ep", "cpu", "--device", "0"]):
        assert run([str(compiled), "--ids", "5,9,200,31", "--max-new-tokens", "6", "--json", *flags]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["new_token_ids"] == answers[1]["new_token_ids"] == answers[2]["new_token_ids"]
    assert all(answer["ep"] == "cpu" and answer["device"] == 0 for answer in answers)
    assert set(answers[1]["nodes_by_provider"]["decode.onnx"]) == {"CPUExecutionProvider"}
    assert run([str(compiled), "--ids", "5,9", "--max-new-tokens", "2", "--json", "--stats"]) == 0
    assert "on CPUExecutionProvider" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--ep", "cuda"], 4, "expected CUDAExecutionProvider"),
        (["--engine"], 4, "run pop-compile"),
        (["--ep", "npu"], 2, "--ep: expected one of cpu, cuda"),
        (["--engine", "--low-memory"], 4, "run pop-compile"),
        (["--device", "3"], 2, "--device: expected 0, found 3"),
    ],
)
def test_pop_run_refuses_what_is_not_there(
    bundle: Path, capsys: Any, flags: list[str], code: int, message: str
) -> None:
    assert run([str(bundle), "--ids", "5,9", "--json", *flags]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


# Finding


def test_without_an_engine_the_way_to_one_is_named(bundle: Path) -> None:
    with pytest.raises(BackendError, match=r"expected an engine for --ep cpu .*, found none; run pop-compile"):
        pop_runtime.load(bundle, engine=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "Another CPU 1234"}, "made for device Another CPU 1234, here is"),
        ({"versions": {"onnxruntime": "1.20.0"}}, "made with onnxruntime 1.20.0, here is 1.32"),
        ({"driver": "500.1"}, "made for driver 500.1, here is None"),
        ({"bundle": {"decode.onnx": "0" * 64}}, "made from other graphs or weights"),
        ({"builder": 0}, f"made for builder 0, here is {PROVIDER_VERSION}"),
    ],
)
def test_a_stale_or_foreign_engine_is_refused_with_what_differs(
    compiled: Path, change: dict[str, Any], message: str
) -> None:
    (folder,) = _engine_folders(compiled)
    _edit_record(folder, **change)
    facts = json.loads((folder / "engine.json").read_text())["facts"]
    renamed = folder.with_name(f"cpu-x-{Facts(**facts).key}")
    folder.rename(renamed)
    with pytest.raises(BackendError, match=f"found only {renamed.name} .{message}"):
        pop_runtime.load(compiled, engine=True)
    assert main([str(compiled), "--ep", "cpu"]) == 0  # builds the right one beside it
    assert _tokens(compiled, engine=True) == _tokens(compiled)


def test_a_new_export_over_the_same_name_does_not_use_the_old_engine(compiled: Path, tmp_path: Path) -> None:
    other = make_bundle(tmp_path / "other", weights=tiny_weights(seed=1))
    shutil.copytree(compiled / "engines", other / "engines")
    with pytest.raises(BackendError, match="made from other graphs or weights"):
        pop_runtime.load(other, engine=True)
    assert main([str(other), "--ep", "cpu"]) == 0
    assert _tokens(other, engine=True) == _tokens(other) != _tokens(compiled)


def test_an_altered_engine_is_refused(compiled: Path) -> None:
    (folder,) = _engine_folders(compiled)
    content = bytearray((folder / "decode.onnx").read_bytes())
    content[-1] ^= 1
    (folder / "decode.onnx").write_bytes(content)
    with pytest.raises(ModelError, match=r"decode.onnx: expected sha256 .* \(altered\); re-run pop-compile --force"):
        pop_runtime.load(compiled, engine=True)


@pytest.mark.parametrize("content", ["{", "{}", '{"facts": 3}', '{"facts": {"shapes": null}, "files": {}}'])
def test_a_damaged_record_is_refused(compiled: Path, content: str) -> None:
    (folder,) = _engine_folders(compiled)
    (folder / "engine.json").write_text(content)
    with pytest.raises(ModelError, match=r"expected the record of an engine, found .*; delete it and run pop-compile"):
        pop_runtime.load(compiled, engine=True)


def test_an_unreadable_record_does_not_hide_the_engine_that_fits(compiled: Path) -> None:
    (folder,) = _engine_folders(compiled)
    for name, edit in (("newer", {"record_version": 2}), ("other", {"facts": {}}), ("empty", None)):
        beside = folder.with_name(f"cpu-{name}")
        beside.mkdir()
        if edit is not None:
            record = json.loads((folder / "engine.json").read_text()) | edit
            (beside / "engine.json").write_text(json.dumps(record))
    assert _tokens(compiled, engine=True) == _tokens(compiled)


def test_a_newer_record_alone_asks_for_a_newer_package(compiled: Path) -> None:
    (folder,) = _engine_folders(compiled)
    record = json.loads((folder / "engine.json").read_text())
    (folder / "engine.json").write_text(json.dumps(record | {"record_version": 2}))
    with pytest.raises(ModelError, match="record_version: expected at most 1, found 2; update the pop-export package"):
        pop_runtime.load(compiled, engine=True)


def test_facts_that_do_not_give_the_folder_s_key_are_refused(compiled: Path) -> None:
    (folder,) = _engine_folders(compiled)
    _edit_record(folder, driver="1.0")
    with pytest.raises(ModelError, match=r"expected the key .* in the folder's name"):
        pop_runtime.load(compiled, engine=True)


def test_of_several_engines_the_one_with_most_room_is_taken(compiled: Path, monkeypatch: Any) -> None:
    """Shapes are of TensorRT alone, so that records stand in for engines here."""
    manifest, (folder,) = read_manifest(compiled), _engine_folders(compiled)
    for room in (32, 64, 48):
        facts = make_facts(manifest, CPU, describe_machine(CPU), None, Shapes((1, 16), room, 1))
        copy = folder.with_name(f"cpu-x-{facts.key}")
        shutil.copytree(folder, copy)
        _edit_record(copy, shapes=dataclasses.asdict(facts.shapes))  # type: ignore[arg-type]
    found = find_engine(compiled, manifest, CPU)
    assert found.facts.shapes == Shapes((1, 16), 64, 1) and read_record(found.folder) == found


# The key


def test_every_fact_changes_the_key(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    files = {**manifest.files, "weights.bin": dataclasses.replace(manifest.files["weights.bin"], sha256="0" * 64)}
    pruned = {**manifest.files, "prefill.onnx": dataclasses.replace(manifest.files["prefill.onnx"], sha256="1" * 64)}
    shapes = Shapes((1, 512), 1024, 1)
    facts = [
        make_facts(manifest, CPU, MACHINE, "fp16", shapes),
        make_facts(dataclasses.replace(manifest, files=files), CPU, MACHINE, "fp16", shapes),
        make_facts(dataclasses.replace(manifest, files=pruned), CPU, MACHINE, "fp16", shapes),
        make_facts(manifest, CPU, MACHINE, "bf16", shapes),
        make_facts(manifest, CPU, MACHINE, "fp16", dataclasses.replace(shapes, max_seq_len=2048)),
        make_facts(manifest, CPU, MACHINE, "fp16", dataclasses.replace(shapes, prompt_lengths=(1, 256))),
        make_facts(manifest, CPU, MACHINE, "fp16", dataclasses.replace(shapes, batch=2)),
        make_facts(manifest, CPU, dataclasses.replace(MACHINE, driver="581"), "fp16", shapes),
        make_facts(manifest, CPU, dataclasses.replace(MACHINE, device="NVIDIA B200, 10.0"), "fp16", shapes),
        make_facts(manifest, CPU, dataclasses.replace(MACHINE, versions={"tensorrt": "101600"}), "fp16", shapes),
    ]
    facts.append(dataclasses.replace(facts[0], ep="tensorrt"))
    assert len({fact.key for fact in facts}) == len(facts)
    assert make_facts(manifest, CPU, MACHINE, "fp16", shapes).key == facts[0].key


# Arguments


def _arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"ep": "tensorrt", "prompt_lengths": None, "max_seq_len": None, "batch": None} | given)


def test_shapes_default_to_what_the_model_takes(bundle: Path) -> None:
    manifest = read_manifest(bundle)  # 64 positions
    assert chosen_shapes(_arguments(), manifest) == Shapes((1, 64), 64, 1)
    roomy = dataclasses.replace(manifest, max_positions=100_000)
    assert chosen_shapes(_arguments(), roomy) == Shapes((1, 512, 4096), 4096, 1)
    asked = _arguments(prompt_lengths="1,8,32", max_seq_len=48, batch=3)
    assert chosen_shapes(asked, manifest) == Shapes((1, 8, 32), 48, 3)
    assert chosen_shapes(_arguments(ep="cpu"), manifest) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_seq_len": 65}, "--max-seq-len: expected 2..64 .* found 65"),
        ({"max_seq_len": 1}, "--max-seq-len: expected 2..64"),
        ({"batch": 0}, "--batch: expected at least 1, found 0"),
        ({"prompt_lengths": "1,x"}, "--prompt-lengths: expected whole numbers"),
        ({"prompt_lengths": "8,1"}, "--prompt-lengths: expected ascending lengths of 1..64"),
        ({"prompt_lengths": "1,40", "max_seq_len": 32}, "--prompt-lengths: expected ascending lengths of 1..32"),
        ({"ep": "cpu", "batch": 2}, "--batch: expected none with --ep cpu"),
        ({"ep": "cuda", "prompt_lengths": "1,8"}, "--prompt-lengths: expected none with --ep cuda"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(bundle: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        chosen_shapes(_arguments(**given), read_manifest(bundle))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ep", "cpu", "--precision", "fp16"], 2, "--precision: expected none: it computes in the bundle's own"),
        (["--ep", "tensorrt", "--precision", "int8"], 2, "--precision: expected one of fp16, bf16"),
        (["--ep", "cpu", "--device", "1"], 2, "--device: expected 0, found 1"),
        (["--ep", "cuda"], 4, "expected CUDAExecutionProvider in onnxruntime"),
        (["--ep", "tensorrt"], 2, "expected a bundle of dialect standard, found ort"),
    ],
)
def test_what_cannot_be_built_is_one_line(
    bundle: Path, capsys: Any, arguments: list[str], code: int, message: str
) -> None:
    assert main([str(bundle), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err and not (bundle / "engines").exists()


@pytest.mark.parametrize("ep", ["tensorrt", "nv-tensorrt-rtx", "openvino"])
def test_a_missing_provider_is_exit_4_with_the_install_line(tmp_path: Path, capsys: Any, ep: str) -> None:
    folder = make_bundle(tmp_path / "bundle", dialect="standard")
    assert main([str(folder), "--ep", ep]) == 4
    assert "pip install" in capsys.readouterr().err and not (folder / "engines").exists()
