"""The export as a whole, and its command line."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

import pop_runtime
from pop_export import ExportConfig, pipeline, speed
from pop_export.cli import main, summary
from pop_export.extras import imports_for
from pop_export.reference import PrefillPlan
from pop_export.samples import sample_answers
from pop_runtime.errors import GateError, ModelError, UsageError
from pop_runtime.manifest import read_manifest, verify_files
from tests.exporter.conftest import TINY_PLAN
from tests.tiny_models import CHAT_TEMPLATE, TINY, byte_tokenizer, save_checkpoint, tiny_model


@pytest.fixture(autouse=True)
def _short_measurement(monkeypatch):
    monkeypatch.setattr(speed, "PROMPT_TOKENS", 64)


def test_a_bundle_is_whole_and_its_manifest_lists_every_file(tiny_bundle):
    manifest = read_manifest(tiny_bundle.folder)
    verify_files(tiny_bundle.folder, manifest)
    files = {path.name for path in tiny_bundle.folder.iterdir()} - {"manifest.json"}
    assert files == set(manifest.files)
    assert files >= {
        "prefill.onnx", "decode.onnx", "weights.bin", "calibration.json", "report.json", "tokenizer.json",
        "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "genai_config.json",
    }  # fmt: skip
    assert manifest == tiny_bundle.manifest
    assert manifest.plan.skipped_layers == TINY_PLAN
    assert manifest.eos_token_ids == (257,)


def test_a_bundle_knows_no_path_of_the_machine_it_was_made_on(tiny_bundle):
    for path in tiny_bundle.folder.iterdir():
        if path.name not in ("report.json", "report.html", "manifest.json"):  # they name the source as the user gave it
            assert str(Path.cwd()).encode() not in path.read_bytes(), path.name


def test_greedy_tokens_equal_those_of_transformers_without_pruning(tiny_bundle, llama):
    ids = [7, 200, 13, 90, 41, 5]
    expected = llama.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=None)
    model = pop_runtime.load(tiny_bundle.folder, threads=1)
    found = [token.id for token in model.generate(ids, max_new_tokens=32, prefill="full", ignore_eos=True)]
    assert found == expected[0, len(ids) :].tolist()


def test_report_holds_what_was_measured(tiny_bundle):
    report = json.loads((tiny_bundle.folder / "report.json").read_text())
    assert report == json.loads(json.dumps(tiny_bundle.report))
    assert all(check["passed"] for check in report["verification"]["checks"])
    assert len(report["verification"]["checks"]) == 5
    assert report["calibration"]["prefill_importance"][-1] == 0
    assert report["speed"]["full_prefill_ms"] > 0 and report["export"]["peak_memory_bytes"] > 1e8
    assert report["settings"]["prune_layers"] == "1,3"


def test_the_ratio_is_rounded_to_layers_and_lowest_importance_goes_first(quick_export):
    bundle = quick_export(prune_ratio=0.4)
    importance = bundle.report["calibration"]["prefill_importance"]
    skipped = bundle.manifest.plan.skipped_layers
    assert len(skipped) == 2
    assert max(importance[layer] for layer in skipped) <= min(
        importance[layer] for layer in {0, 1, 2, 3, 4} - {*skipped}
    )


def test_a_saved_calibration_is_reused(quick_export, tmp_path):
    first = quick_export(prune_ratio=0.4)
    again = quick_export(
        calibration=first.folder / "calibration.json", calibration_samples=32, calibration_length=256,  # the defaults
        prune_ratio=0.4, out=tmp_path / "again",
    )  # fmt: skip
    assert again.manifest.plan.skipped_layers == first.manifest.plan.skipped_layers
    assert (again.folder / "calibration.json").read_text() == (first.folder / "calibration.json").read_text()
    assert again.report["calibration"]["reused"]


def test_force_replaces_a_bundle_and_without_it_nothing_is_touched(quick_export):
    first = quick_export(prune_layers="1")
    with pytest.raises(UsageError, match="--force"):
        quick_export(prune_layers="2")
    assert read_manifest(first.folder).plan.skipped_layers == (1,)
    assert quick_export(prune_layers="2", force=True).manifest.plan.skipped_layers == (2,)
    assert read_manifest(first.folder).plan.skipped_layers == (2,)


def test_beyond_tolerance_no_bundle_is_written(quick_export, monkeypatch, tmp_path):
    real = pipeline.cut_prefill_graph
    monkeypatch.setattr(pipeline, "cut_prefill_graph", lambda decode, _: real(decode, PrefillPlan(frozenset({0}))))
    with pytest.raises(GateError, match="pair, prompt whole"):
        quick_export(prune_layers="2")
    assert list(tmp_path.iterdir()) == []


def test_the_same_settings_give_the_same_graphs_and_weights(quick_export, tmp_path):
    first, second = quick_export(prune_layers="1"), quick_export(prune_layers="1", out=tmp_path / "second")
    for name in ("prefill.onnx", "decode.onnx", "weights.bin", "calibration.json"):
        assert first.manifest.files[name] == second.manifest.files[name], name


def _exit(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def _one_line(capsys) -> str:
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pop-export: error: ")]
    assert len(errors) == 1
    return errors[0]


def test_json_ends_stdout_with_what_report_json_holds(quick_export, llama_folder, tmp_path, capsys):
    code = _exit(
        "--model", llama_folder, "--out", tmp_path / "out", "--json", "--prune-layers", "1", "--calibration-samples", 2,
        "--calibration-length", 32, "--threads", 1,
    )  # fmt: skip
    assert code == 0
    stdout = capsys.readouterr().out
    assert json.loads(stdout.splitlines()[-1]) == json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prune-layers", "3-99"], "expected layers 0 to 4"),
        (["--prune-layers", "9-2"], "lower layer first"),
        (["--prune-ratio", "1.5"], "--prune-ratio: expected 0 <= ratio < 1"),
        (["--calibration-samples", "0"], "--calibration-samples: expected at least 1"),
        (["--calibration-data", "no-such.txt"], "no-such.txt"),
        (["--boundary-tokens", "0"], "--boundary-tokens: expected at least 1"),
        (["--sink-tokens", "-1"], "--sink-tokens: expected at least 0"),
        (["--threads", "0"], "--threads: expected at least 1"),
        (["--threads", "100000"], "--threads: expected at most "),  # PyTorch ended the process
        (["--threads", "99999999999"], "--threads: expected at most "),
        (["--seed", "-1"], "--seed: expected at least 0"),
    ],
)
def test_a_mistyped_setting_is_one_line_and_exit_2(llama_folder, tmp_path, capsys, flags, message):
    settings = ["--calibration-samples", 2, "--calibration-length", 32]
    assert _exit("--model", llama_folder, "--out", tmp_path / "out", *settings, *flags) == 2
    assert message in _one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_one_line_and_exit_3(tmp_path, capsys):
    assert _exit("--model", tmp_path / "nowhere", "--out", tmp_path / "out", "--offline") == 3
    assert "nowhere" in _one_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_is_one_line_and_exit_3(tmp_path, capsys):
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=300
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save_pretrained(tmp_path / "bert")
    assert _exit("--model", tmp_path / "bert", "--out", tmp_path / "out") == 3
    assert "Bert" in _one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_no_tokenizer_is_one_line_and_exit_3(tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "bare")
    assert _exit("--model", tmp_path / "bare", "--out", tmp_path / "out") == 3
    assert "tokenizer" in _one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_model_of_few_positions_is_calibrated_and_verified_within_them(tmp_path, capsys):
    config = transformers.LlamaConfig(**{**TINY, "max_position_embeddings": 24, "num_hidden_layers": 2})
    save_checkpoint(tmp_path / "short", tiny_model(config))
    flags = ("--calibration-samples", 2, "--boundary-tokens", 4)
    assert _exit("--model", tmp_path / "short", "--out", tmp_path / "out", *flags) == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["verification"]["num_prompt_tokens"] == 16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_of_fewer_positions_than_it_is_tried_with_is_one_line_and_exit_3(tmp_path, capsys, family):
    """Times were taken of 1 + 16 tokens, exit 4; GPT-2, whose positions are a table, failed in a traceback."""
    config = transformers.LlamaConfig(**{**TINY, "max_position_embeddings": 16, "num_hidden_layers": 2})
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=300, n_positions=16)
    save_checkpoint(tmp_path / "short", tiny_model(config))
    flags = ("--calibration-samples", 2, "--boundary-tokens", 4)
    assert _exit("--model", tmp_path / "short", "--out", tmp_path / "out", *flags) == 3
    assert "short: expected a model of at least 24 positions, found 16 (config); give" in _one_line(capsys)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_quietly_and_leaves_nothing(llama_folder, tmp_path, sign):
    command = [
        str(Path(sys.executable).with_name("pop-export")), "--model", str(llama_folder), "--out", str(tmp_path / "out"),
        "--calibration-samples", "2000", "--calibration-length", "64", "--threads", "1",
    ]  # fmt: skip
    # a shell starts background jobs with SIGINT ignored, and children inherit it
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("calibrating"):
            break
    time.sleep(0.5)
    process.send_signal(sign)
    assert "Traceback" not in (rest := process.stderr.read())
    assert "interrupted; nothing was written" in rest
    assert process.wait(timeout=60) == 130
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_wait_for_torch():
    script = "import sys; from pop_export.cli import parser; parser().format_help(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("package", "extra"), [("torch", "export"), ("onnx_ir", "export"), ("onnxruntime", "cpu")])
def test_an_installation_without_an_extra_says_what_to_install(tmp_path, package, extra):
    script = (
        f"import sys; sys.modules[{package!r}] = None; from pop_export.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "--model", "x", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    wanted = f"exporting: expected the package {package}, found none; pip install 'pop-export[{extra}]'"
    assert done.stderr == f"pop-export: error: {wanted}\n"


def test_a_package_of_our_own_that_is_missing_is_our_fault():
    with pytest.raises(ModuleNotFoundError), imports_for("exporting"):
        import pop_export.no_such_module  # noqa: F401


def test_every_setting_has_a_flag(capsys):
    flags = {action.dest for action in __import__("pop_export.cli", fromlist=["parser"]).parser()._actions}
    assert set(ExportConfig.__dataclass_fields__) - flags == {"calibration_batch"}  # changes no result


def test_code_that_cannot_be_traced_is_found_before_anything_is_measured(quick_export, monkeypatch):
    def refuse(*_):
        raise ModelError("TinyForCausalLM: its code cannot be traced into a graph")

    monkeypatch.setattr(pipeline, "build_decode_graph", refuse)
    monkeypatch.setattr(pipeline, "calibrate", lambda *_, **__: pytest.fail("calibrated first"))
    with pytest.raises(ModelError, match="cannot be traced"):
        quick_export()


@pytest.mark.parametrize(
    "settings", [{"boundary_tokens": 400}, {"refit_length": 64}, {"max_kl": 0.1, "select": "gates"}]
)
def test_where_damage_decides_windows_that_hide_it_are_refused_before_any_work(quick_export, monkeypatch, settings):
    monkeypatch.setattr(pipeline, "build_decode_graph", lambda *_: pytest.fail("built first"))
    with pytest.raises(
        UsageError, match=r"--boundary-tokens \d+: expected some of the \d+ tokens .* found none; lower"
    ):
        quick_export(**{"boundary_tokens": 400, **settings})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"prune_layers": "99"}, UsageError, '--prune-layers "99": expected layers 0 to 4'),
        ({"prune_layers": ""}, UsageError, '--prune-layers "": expected layers such as'),
        ({"calibration": "none.json"}, UsageError, "--calibration none.json: cannot be read"),
        ({"calibration": __file__}, ModelError, "expected JSON"),
    ],
)
def test_layers_and_a_saved_calibration_are_checked_before_any_work(
    quick_export, monkeypatch, settings, error, message
):
    monkeypatch.setattr(pipeline, "calibration_samples", lambda *_, **__: pytest.fail("read text first"))
    with pytest.raises(error, match=message):
        quick_export(**settings)


def test_a_template_that_takes_no_plain_exchange_leaves_samples_to_raw_prompts(
    quick_export, llama_folder, tmp_path, monkeypatch, caplog
):
    """It ended the export at its last stage, with nothing written."""
    folder = shutil.copytree(llama_folder, tmp_path / "model")
    template = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template + CHAT_TEMPLATE)
    bundle = quick_export(model=str(folder), prune_layers="1", curve=False, boundary_tokens=4)
    assert len(bundle.report["samples"]) == 1  # the others are longer than the model
    assert "no sample answers to chat prompts: chat template: expected messages it accepts" in caplog.text

    def refuse(*_):
        raise UsageError("prompt, token 3: expected an id of 0..299, found 300")

    monkeypatch.setattr(pop_runtime.Model, "encode_prompt", refuse)
    assert sample_answers(pop_runtime.load(bundle.folder, threads=1)) == []
    assert "no sample answers to raw prompts: prompt, token 3" in caplog.text


def test_where_layers_are_named_it_is_said_that_no_damage_was_measured(quick_export, capsys):
    bundle = quick_export(prune_layers="1,3", boundary_tokens=400)
    assert (
        "note: damage is not measured: --sink-tokens 4 --boundary-tokens 400: expected some of the"
        in capsys.readouterr().err
    )
    assert bundle.report["quality"] is None and bundle.report["ablation"] is None
    assert bundle.report["refit"]["tuning"] is None
    assert "damage was not measured" in summary(bundle.folder, bundle.report)
    html = (bundle.folder / "report.html").read_text()
    assert 'id="quality"' not in html and "mean KL to the full model" not in html
