"""`pop-eval`: what goes to stdout, to stderr and into the exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from pop_export.eval_cli import main
from pop_runtime.errors import ModelError
from tests.runtime.conftest import chat_files
from tests.runtime.tiny_bundle import make_bundle

TEXT = " ".join(f"In the year {year} the harbour was dug {year % 7} feet deeper." for year in range(1700, 1760))
SHORT = ("--context", "20", "--continuation", "8", "--windows", "2", "--threads", "1")
FIGURES = (
    "kl_mean_nats", "kl_p95_nats", "top1_agreement", "perplexity_full", "perplexity_pruned", "common_greedy_tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundle"), text_files=chat_files())


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def _refused(capsys, *arguments, code=2):
    assert main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("pop-eval: error: ") and captured.err.count("\n") == 1
    return captured.err


def test_json_holds_the_figures_overall_and_by_file(bundle, data, tmp_path, capsys):
    other = tmp_path / "b.txt"
    other.write_text(TEXT.swapcase(), encoding="utf-8")
    assert main([str(bundle), "--data", str(data), str(other), *SHORT, "--no-retrieval", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["files"]) == {str(data), str(other)}
    for name in FIGURES:
        assert found[name] == found["overall"][name]
        assert all(name in of_file for of_file in found["files"].values())
    assert found["settings"]["context"] == 20 and found["settings"]["data"] == [str(data), str(other)]
    assert found["windows"] == {"sink_tokens": 0, "boundary_tokens": 1} and found["num_pruned_tokens"] == 19
    assert found["retrieval"] is None


def test_people_get_a_table_with_a_line_per_file(bundle, data, capsys):
    assert main([str(bundle), "--data", str(data), *SHORT, "--no-retrieval"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["a.txt", "overall"]


def test_the_provider_is_the_one_asked_for_or_none(bundle, data, capsys):
    assert main([str(bundle), "--data", str(data), *SHORT, "--no-retrieval", "--json", "--ep", "cpu"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["ep"], settings["device"]) == ("cpu", 0)
    assert {name for counts in settings["nodes_by_provider"].values() for name in counts} == {"CPUExecutionProvider"}
    error = _refused(capsys, bundle, "--data", data, *SHORT, "--ep", "cuda", "--device", "1", code=4)
    assert "--ep cuda --device 1: expected CUDAExecutionProvider" in error and "pip install 'pop-export[gpu]'" in error
    assert "--ep: expected one of cpu, cuda" in _refused(capsys, bundle, "--data", data, *SHORT, "--ep", "npu")
    assert "dialect standard, found ort" in _refused(capsys, bundle, "--data", data, *SHORT, "--ep", "tensorrt")
    assert "expected an engine for" in _refused(capsys, bundle, "--data", data, *SHORT, "--engine", code=4)


def test_windows_over_the_whole_prompt_are_said_to_prune_nothing(bundle, data, capsys):
    assert main([str(bundle), "--data", str(data), *SHORT, "--no-retrieval", "--boundary-tokens", "20"]) == 0
    assert "no prompt token went through the pruned graph" in capsys.readouterr().err


def test_retrieval_is_measured_at_every_depth(exported_bundle, data, capsys):
    arguments = [*SHORT, "--retrieval-keys", "1", "--json"]
    assert main([str(exported_bundle), "--data", str(data), *arguments]) == 0
    retrieval = json.loads(capsys.readouterr().out)["retrieval"]
    assert [depth["depth"] for depth in retrieval["depths"]] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert retrieval["format"] == "chat" and retrieval["length_tokens"] == 240
    assert main([str(exported_bundle), "--data", str(data), *arguments[:-1]]) == 0
    assert "retrieval of a key in 240 tokens (chat)" in capsys.readouterr().out


def test_against_the_checkpoint_a_full_prefill_in_fp32_differs_by_rounding_alone(
    exported_bundle, llama_folder, data, capsys
):
    common = ["--data", str(data), *SHORT, "--no-retrieval", "--json"]
    assert main([str(exported_bundle), *common, "--against", str(llama_folder), "--prefill", "full"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert exact["kl_mean_nats"] < 1e-6 and exact["common_greedy_tokens"] == 8
    assert exact["perplexity_full"] == pytest.approx(exact["perplexity_pruned"], rel=1e-3)
    assert main([str(exported_bundle), *common, "--against", str(llama_folder)]) == 0
    against = json.loads(capsys.readouterr().out)
    assert main([str(exported_bundle), *common]) == 0
    own = json.loads(capsys.readouterr().out)
    assert against["kl_mean_nats"] > 1e-3
    for name in FIGURES:
        assert against[name] == pytest.approx(own[name], rel=1e-2)


def test_a_checkpoint_of_another_vocabulary_is_refused(bundle, data, tmp_path, capsys):
    import transformers

    from tests.tiny_models import TINY, save_checkpoint, tiny_model

    config = transformers.LlamaConfig(**{**TINY, "vocab_size": 310})
    folder = save_checkpoint(tmp_path / "other", tiny_model(config))
    capsys.readouterr()
    error = _refused(capsys, bundle, "--data", data, *SHORT, "--against", folder)
    assert "expected 300 tokens in the vocabulary (manifest.json), found 310" in error


def test_bad_data_is_one_line_and_exit_2(bundle, tmp_path, capsys):
    missing, empty, short, binary = (tmp_path / name for name in ("missing.txt", "empty.txt", "short.txt", "x.bin"))
    empty.write_text(" \n")
    short.write_text("too short")
    binary.write_bytes(b"abc\xff\xfe")
    assert "missing.txt: expected a text file, found none" in _refused(capsys, bundle, "--data", missing)
    assert "expected text, found an empty file" in _refused(capsys, bundle, "--data", empty)
    assert "expected UTF-8, found byte 0xff at offset 3" in _refused(capsys, bundle, "--data", binary)
    assert "cannot be read (Is a directory)" in _refused(capsys, bundle, "--data", tmp_path)
    assert "for one window, found 9" in _refused(capsys, bundle, "--data", short, *SHORT)


def test_other_errors_have_their_exit_codes(bundle, data, tmp_path, capsys):
    assert "expected a bundle" in _refused(capsys, tmp_path, "--data", data, *SHORT, code=3)
    _refused(capsys, bundle, "--data", data, *SHORT, "--against", tmp_path / "nothing.gguf", code=3)
    assert "--windows: expected at least 1" in _refused(capsys, bundle, "--data", data, "--windows", "0")
    bare = make_bundle(tmp_path / "bare")
    assert "expected a tokenizer to read text, found none" in _refused(capsys, bare, "--data", data, *SHORT)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "pop-eval out/smollm2 --data notes.txt" in capsys.readouterr().out


def test_another_checkpoint_than_the_bundles_is_told(exported_bundle, llama_folder, data, tmp_path, caplog):
    common = ("--data", str(data), *SHORT, "--no-retrieval", "--against", str(llama_folder))
    assert main([str(exported_bundle), *common]) == 0
    assert not caplog.records
    folder = shutil.copytree(exported_bundle, tmp_path / "bundle")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["model"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert main([str(folder), *common]) == 0
    (record,) = caplog.records
    assert "its weights have sha256" in record.message and f"the bundle's had {'0' * 64}" in record.message


def test_against_takes_what_an_export_was_allowed(bundle, data, monkeypatch):
    asked = {}

    def load_checkpoint(model, **how):
        asked.update(how, model=model)
        raise ModelError("seen enough")

    monkeypatch.setattr("pop_export.evaluation.against.load_checkpoint", load_checkpoint)
    flags = ("--against", "some/model", "--revision", "v2", "--trust-remote-code", "--allow-pickle", "--offline")
    assert main([str(bundle), "--data", str(data), *SHORT, *flags]) == 3
    assert asked == {
        "model": "some/model", "revision": "v2", "trust_remote_code": True, "allow_pickle": True, "offline": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--retrieval-keys", "3", "--no-retrieval"), "--retrieval-keys and --no-retrieval: the one has no effect"),
        (
            ("--retrieval-length", "64", "--no-retrieval"),
            "--retrieval-length and --no-retrieval: the one has no effect",
        ),
        (("--revision", "v2"), "--revision: expected --against with it"),
        (("--offline",), "--offline: expected --against with it"),
        (("--prefill", "full"), "--prefill full: expected --against, or the bundle is compared with itself"),
    ],
)
def test_flags_without_effect_are_refused(bundle, data, capsys, flags, message):
    assert message in _refused(capsys, bundle, "--data", data, *SHORT, *flags)


def test_against_without_the_extra_says_what_to_install(bundle, data):
    code = "import sys; sys.modules['torch'] = None; from pop_export.eval_cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(bundle), "--data", str(data), *SHORT, "--against", "model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    message = "--against: expected the package torch, found none; pip install 'pop-export[export]'"
    assert (done.returncode, done.stderr) == (4, f"pop-eval: error: {message}\n")


def test_a_run_without_against_needs_no_torch(bundle, data):
    code = (
        "import sys\n"
        "from pop_export.eval_cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "bad = [name for name in ('torch', 'transformers', 'onnx', 'onnx_ir', 'rich') if name in sys.modules]\n"
        "assert not bad, bad\n"
    )
    command = [sys.executable, "-c", code, str(bundle), "--data", str(data), *SHORT, "--no-retrieval", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
