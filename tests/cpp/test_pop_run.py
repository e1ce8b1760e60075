"""`pop_run`: the flags, the JSON, the refusals and the exit codes of `pop-run`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import pytest

from pop_runtime import cli, errors
from pop_runtime.flags import make_parser
from pop_runtime.providers import PROVIDERS
from tests.cpp.conftest import PROGRAM, REPOSITORY, PopRun, ids_text
from tests.runtime.tiny_bundle import PROMPT, make_bundle, with_generation_config

pytestmark = pytest.mark.cpp


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without tokenizer; do not alter it."""
    return make_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def altered(tmp_path: Path, bundle: Path) -> Path:
    """A copy of it to alter."""
    return Path(shutil.copytree(bundle, tmp_path / "altered"))


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_json_has_the_keys_of_the_python_command(
    bundle: Path, pop_run: PopRun, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(bundle), "--ids", ids_text(PROMPT), "--json", "--max-new-tokens", "9", "--sink-tokens", "3"]
    found = pop_run(*flags).json
    assert cli.main([*flags, "--threads", "1"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    for result in (found, wanted):
        assert result.pop("time_to_first_token_ms") > 0
        assert result.pop("tokens_per_second") > 0
    del wanted["nodes_by_provider"], wanted["cuda_graphs"]  # there is only the CPU here
    assert found == wanted


def test_log_probabilities_are_those_of_python(
    bundle: Path, pop_run: PopRun, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(bundle), "--ids", ids_text(PROMPT), "--json", "--max-new-tokens", "5", "--prefill", "full"]
    flags += ["--logprobs", "3", "--prompt-logprobs", "--ignore-eos", "--repetition-penalty", "1.5"]
    found = pop_run(*flags).json
    assert cli.main([*flags, "--threads", "1"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    assert found["prompt_logprobs"][0] is None and len(found["prompt_logprobs"]) == len(PROMPT)
    assert found["prompt_logprobs"][1:] == pytest.approx(wanted["prompt_logprobs"][1:], abs=1e-6)
    for mine, theirs in zip(found["logprobs"], wanted["logprobs"], strict=True):
        assert mine["id"] == theirs["id"] and mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-6)
        assert [token for token, _ in mine["likeliest"]] == [token for token, _ in theirs["likeliest"]]
        assert [x for _, x in mine["likeliest"]] == pytest.approx([x for _, x in theirs["likeliest"]], abs=1e-6)


def test_without_json_the_ids_stream_and_stats_go_to_stderr(bundle: Path, pop_run: PopRun) -> None:
    flags = (bundle, "--ids", "5\n6,\t7", "--max-new-tokens", 4, "--ignore-eos")
    wanted = pop_run(*flags, "--json").json["new_token_ids"]
    done = pop_run(*flags, "--stats")
    assert done.out == ids_text(wanted) + "\n"
    assert "(3 prompt tokens, 2 through the pruned graph)" in done.err
    assert "tokens/s (4 new tokens, stopped by length)" in done.err
    assert " boundary_tokens=1 " in done.err


def test_the_version_is_that_of_the_package(pop_run: PopRun) -> None:
    done = pop_run("--version")
    assert (done.code, done.out) == (0, f"pop_run {version('pop-export')}\n")


def test_help_shows_every_flag_of_the_python_command(pop_run: PopRun) -> None:
    done = pop_run("--help")
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines() if line.startswith("  -")]
    shown = {flag for words in lines for flag in words[0].split(",")}  # not in examples or within a longer name
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    assert flags - shown == {"--chat", "--engine", "--cuda-graphs"}  # no tokenizer, no provider but the CPU
    assert shown <= flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected --ids"),
        (["--ids", "5,x"], "--ids: expected whole numbers such as 5,6,7, found '5,x'"),
        (["--ids", "5,99999999999999999999"], "--ids: expected whole numbers"),
        (["--ids", ""], "expected at least one token"),
        (["--ids", "5,300"], "prompt, token 1: expected an id of 0..299, found 300"),
        (["--ids", "-1"], "expected an id of 0..299, found -1"),
        (["--ids", ",".join(["5"] * 64)], "expected fewer than 64 tokens"),
        (["--ids", "5", "--prompt", "x"], "excludes"),
        (
            ["--ids", "5", "--system", "x"],
            "--system: expected a prompt for the chat template, found --ids; leave one out",
        ),
        (["--ids", "5", "--raw"], "--raw: expected a prompt of text, found --ids; leave one out"),
        (
            ["--ids", "5", "--prefill", "full", "--sink-tokens", "4"],
            "--sink-tokens: expected --prefill pop, found full",
        ),
        (["--ids", "5", "--prefill", "full", "--boundary-tokens", "4"], "--boundary-tokens: expected --prefill pop"),
        (["--ids", "5\n+6"], "--ids: expected whole numbers such as 5,6,7, found '5 +6'"),
        (["--ids", "5 +6"], "--ids: expected whole numbers such as 5,6,7, found '5 +6'"),
        (["--ids", "5", "--seed", "-1"], "--seed: expected a whole number of 0..18446744073709551615, found '-1'"),
        (["--ids", "5", "--seed", "18446744073709551616"], "--seed: expected a whole number of 0.."),
        (["--ids", "5", "--top-p", "x"], "--top-p: expected a number, found 'x'; change it or leave it out"),
        (["--ids", "5", "--max-new-tokens", "0"], "max_new_tokens: expected at least 1"),
        (["--ids", "5", "--prefill", "half"], "--prefill: expected pop or full, found 'half'"),
        (["--ids", "5", "--prefill-chunk-tokens", "0"], "prefill_chunk_tokens: expected at least 1"),
        (["--ids", "5", "--stop", "x"], "stop: expected a byte-level tokenizer"),
        (["--ids", "5", "--logprobs", "1"], "--json"),
        (["--ids", "5", "--json", "--logprobs", "301"], "logprobs: expected at most the vocabulary's 300"),
        (["--ids", "5", "--json", "--prompt-logprobs"], "prompt_logprobs: expected prefill full"),
        (["--ids", "5", "--top-p", "1.5"], "top_p: expected a number above 0 and at most 1"),
        (["--ids", "5", "--temperature", "-1"], "temperature: expected a number of at least 0"),
        (["--ids", "5", "--boundary-tokens", "0"], "boundary_tokens: expected at least 1"),
        (["--ids", "5", "--no-such-flag"], "--no-such-flag; see pop_run --help"),
        (["--ids", "5", "--json=no"], "--json: expected no value, found 'no'"),
        (["--ids", "--json"], "--ids: expected a value, found '--json'"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    bundle: Path, pop_run: PopRun, flags: list[str], message: str
) -> None:
    done = pop_run(bundle, *flags)
    assert (done.code, done.out) == (errors.UsageError.exit_code, "")
    assert done.err.startswith("pop_run: error: ") and done.err.count("\n") == 1
    assert message in done.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-new-tokens", "010"],  # was 8
        ["--max-new-tokens", " 3\n"],
        ["--max-new-tokens=3"],
        ["--seed", "+7"],
        ["--seed", "-0"],
        ["--seed", "1_0"],
        ["--seed", "18446744073709551615"],
        ["--seed", "1", "--seed", "2"],  # was refused
        ["--temperature", "0.5", "--temperature", "1", "--prefill", "full", "--prefill", "pop"],
        ["--temperature", ".5"],
        ["--temperature", "5."],
        ["--temperature", "+1_0e-1_0"],
        ["--temperature", "1e-999"],  # 0 to both
        ["--ids", "9", "--ids", "5,6", "--device", "0", "--device", "00", "--ep", "x", "--ep", "cpu"],
        ["--raw", "--system", "x", "--system", "y"],
        ["--ignore-eos", "--ignore-eos", "--json", "--low-memory", "--low-memory"],
        *[
            [flag, text]
            for flag in ("--seed", "--threads", "--sink-tokens", "--boundary-tokens", "--prefill-chunk-tokens")
            for text in ("", " ")
        ],
        *[[flag, ""] for flag in ("--temperature", "--top-p", "--top-k", "--min-p", "--repetition-penalty")],
        *[[flag, ""] for flag in ("--logprobs", "--max-new-tokens", "--device", "--prefill", "--ep")],
        *[["--seed", text] for text in ("0x3", "0b11", "1'0", "1__0", "_1", "1_", "+-1", "- 1", "+ 1", "1.0", "1e3")],
        *[["--seed", text] for text in ("-1", "18446744073709551616", "+", "{}", "[1]", "5\n6", "true")],
        *[["--temperature", text] for text in ("0x1", "0x1p3", "1,5", "nan", "-inf", "1e999", "1'0", "1 2", "e5", ".")],
        *[["--prefill", text] for text in ("0", "1", "POP")],
        ["--seed", "x", "--seed", "2"],
        ["--prefill", "half", "--prefill", "pop"],
        ["--ignore-eos=false"],
        ["--ignore-eos="],
        ["--json=0"],
        ["--seed="],
        ["--seed=", "5"],
        ["--stop", "--ignore-eos"],
        ["--no\nflag"],
    ],
    ids=" ".join,
)
def test_arguments_are_read_as_in_python(
    bundle: Path, pop_run: PopRun, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    # CLI11 ignored empty numbers and read numbers and names by rules of its own
    command = [str(bundle), "--ids", "5,6", "--json", "--seed", "3", *flags]
    done = pop_run(*command)
    try:
        code = cli.main([*command, "--threads", "1"])
    except SystemExit as refused:
        code = int(str(refused.code))
    wanted = capsys.readouterr()
    assert done.code == code, done.err
    if code == 0:
        found, expected = done.json, json.loads(wanted.out)
        for name in ("prompt_token_ids", "new_token_ids", "settings", "ep", "device"):
            assert found[name] == expected[name]
    else:
        assert (code, done.out) == (errors.UsageError.exit_code, "")
        assert done.err.startswith("pop_run: error: ") and done.err.count("\n") == 1


@pytest.mark.parametrize("text", ["2147483648", "99999999999999999999"])
def test_more_threads_than_onnx_runtime_counts_are_refused(bundle: Path, pop_run: PopRun, text: str) -> None:
    done = pop_run(bundle, "--ids", "5", "--threads", text)
    assert (done.code, done.out) == (errors.UsageError.exit_code, "")
    assert done.err == (
        f"pop_run: error: --threads: expected a whole number of -2147483648..2147483647, found '{text}'; "
        "change it or leave it out\n"
    )


def test_the_cpu_is_taken_by_name(bundle: Path, pop_run: PopRun) -> None:
    found = pop_run(bundle, "--ids", "5", "--json", "--ep", "cpu", "--device", 0).json
    assert (found["ep"], found["device"]) == ("cpu", 0)


@pytest.mark.parametrize("ep", [ep for ep in PROVIDERS if ep != "cpu"])
@pytest.mark.parametrize("device", [0, 1])
def test_another_provider_ends_with_exit_4_and_the_way_to_run_on_it(
    bundle: Path, pop_run: PopRun, ep: str, device: int
) -> None:
    done = pop_run(bundle, "--ids", "5", "--ep", ep, "--device", device)
    assert (done.code, done.out) == (errors.BackendError.exit_code, "")
    assert done.err == (
        f"pop_run: error: --ep {ep} --device {device}: expected cpu, the one provider of this runtime, found {ep}; "
        f"run it with pop-run: {PROVIDERS[ep].install}\n"
    )


@pytest.mark.parametrize(
    "flags", [("--ep", "metal"), ("--ep", "CPU"), ("--ep", "cpu", "--device", "1"), ("--ep", "cuda", "--device", "-1")]
)
def test_a_target_that_is_not_in_the_table_is_refused_as_in_python(
    bundle: Path, pop_run: PopRun, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    done = pop_run(bundle, "--ids", "5", *flags)
    assert cli.main([str(bundle), "--ids", "5", *flags]) == done.code == errors.UsageError.exit_code
    wanted = capsys.readouterr().err.removeprefix("pop-run: error: ").rstrip()
    assert done.err.startswith(f"pop_run: error: {wanted}; ") and done.err.count("\n") == 1


def test_too_few_threads_are_refused(bundle: Path) -> None:
    command = [PROGRAM, bundle, "--ids", "5", "--threads", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "threads: expected at least 1, found 0" in done.stderr


def test_more_threads_than_the_machine_can_start_are_refused_as_in_python(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(bundle), "--ids", "5", "--json", "--threads", "100000"]
    done = subprocess.run([PROGRAM, *flags], capture_output=True, text=True)
    assert done.returncode == cli.main(flags) == errors.UsageError.exit_code
    assert done.stderr.removeprefix("pop_run") == capsys.readouterr().err.removeprefix("pop-run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "expected a bundle folder"),
        (lambda folder: (folder / "manifest.json").unlink(), "expected a bundle's manifest"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "expected JSON"),
        (lambda folder: (folder / "weights.bin").unlink(), "weights.bin: expected a file of"),
        (lambda folder: (folder / "decode.onnx").write_bytes(b"x"), "decode.onnx: expected"),
        (lambda folder: _edit(folder, lambda m: m.update(format_version=2)), "expected at most 1, found 2"),
        (lambda folder: _edit(folder, lambda m: m.update(vocab_size=299)), "logits: expected shape"),
        (lambda folder: _edit(folder, lambda m: m.update(kv_dtype="float16")), "expected float16"),
        (lambda folder: _edit(folder, lambda m: m.update(past_key="x{layer}")), "expected the value 'x0'"),
        (lambda folder: _edit(folder, lambda m: m["files"].update({"../x": m["files"]["decode.onnx"]})), "inside"),
    ],
)
def test_a_damaged_bundle_is_refused_as_in_python(
    altered: Path, pop_run: PopRun, change: Callable[[Path], object], message: str
) -> None:
    change(altered)
    done = pop_run(altered, "--ids", "5")
    assert (done.code, done.out) == (errors.ModelError.exit_code, "")
    assert done.err.startswith("pop_run: error: ") and done.err.count("\n") == 1
    assert message in done.err
    assert cli.main([str(altered), "--ids", "5"]) == errors.ModelError.exit_code


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("location", "../weights.bin", "decode.onnx, embed: expected data in weights.bin, found ../weights.bin"),
        ("length", "99999999", "decode.onnx, embed: expected data within"),
        ("offset", "-1", "decode.onnx, offset: expected a whole number, found -1"),
    ],
)
def test_weights_outside_the_weights_file_are_refused(
    altered: Path, pop_run: PopRun, key: str, value: str, message: str
) -> None:
    path = altered / "decode.onnx"
    model = onnx.load(path, load_external_data=False)
    for entry in next(tensor for tensor in model.graph.initializer if tensor.external_data).external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(model.SerializeToString())
    done = pop_run(altered, "--ids", "5", "--no-verify")
    assert done.code == errors.ModelError.exit_code
    assert message in done.err


def _set_length(tensor: onnx.TensorProto, value: str) -> None:
    next(entry for entry in tensor.external_data if entry.key == "length").value = value


@pytest.mark.parametrize(
    "damage",
    [
        lambda graph, embed: _set_length(embed, "4"),
        lambda graph, embed: embed.dims.__setitem__(0, 10**12),
        lambda graph, embed: embed.dims.extend([10**12, 10**12]),
        lambda graph, embed: embed.dims.__setitem__(0, -1),
        lambda graph, embed: setattr(embed, "data_type", 99),
        lambda graph, embed: setattr(embed, "data_type", onnx.TensorProto.STRING),
        lambda graph, embed: graph.initializer.append(embed),
    ],
    ids=["length", "large", "overflow", "negative", "type", "string", "twice"],
)
def test_external_data_that_does_not_fit_its_tensor_names_the_graph(
    altered: Path, pop_run: PopRun, damage: Callable[[onnx.GraphProto, onnx.TensorProto], object]
) -> None:
    # ended with exit 1 and no file named
    path = altered / "decode.onnx"
    model = onnx.load(path, load_external_data=False)
    damage(model.graph, next(tensor for tensor in model.graph.initializer if tensor.name == "embed"))
    path.write_bytes(model.SerializeToString())
    done = pop_run(altered, "--ids", "5", "--no-verify")
    assert (done.code, done.out) == (errors.BackendError.exit_code, "")
    assert "decode.onnx, embed: expected a tensor that ONNX Runtime takes, found" in done.err
    assert done.err.count("\n") == 1


def test_a_graph_that_does_not_load_is_a_backend_error(altered: Path, pop_run: PopRun) -> None:
    path = altered / "decode.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[-1].op_type = "NoSuchOperator"
    path.write_bytes(model.SerializeToString())
    done = pop_run(altered, "--ids", "5", "--no-verify")
    assert done.code == errors.BackendError.exit_code
    assert done.err.startswith("pop_run: error: decode.onnx: expected a graph that ONNX Runtime loads, found")
    assert done.err.count("\n") == 1


def test_a_sink_below_that_of_a_fit_is_refused(altered: Path, pop_run: PopRun) -> None:
    def fit(manifest: dict[str, Any]) -> None:
        manifest["windows"]["sink_tokens"] = 4
        manifest["plan"]["refitted_layers"] = [1]

    _edit(altered, fit)
    done = pop_run(altered, "--ids", "5,6,7,8,9,10", "--sink-tokens", 3)
    assert done.code == 2 and "sink_tokens: expected at least 4" in done.err
    for flags in (("--sink-tokens", 5), ("--prefill", "full")):
        assert pop_run(altered, "--ids", "5,6,7,8,9,10", "--json", *flags).code == 0


def test_a_generation_config_out_of_range_is_a_bundle_error(tmp_path: Path, pop_run: PopRun) -> None:
    make_bundle(tmp_path, text_files=with_generation_config(temperature=-1))
    done = pop_run(tmp_path, "--ids", "5")
    assert done.code == 3 and "generation_config.json, temperature" in done.err


@pytest.mark.parametrize("flags", [["--top-p", "5"], ["--min-p", "2"], ["--ids", ",".join(["5"] * 64)]])
def test_what_was_asked_for_is_refused_before_what_the_file_says(
    tmp_path: Path, pop_run: PopRun, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    flags = flags if "--ids" in flags else ["--ids", "5", *flags]
    make_bundle(tmp_path, text_files=with_generation_config(temperature=-1))
    assert pop_run(tmp_path, *flags).code == cli.main([str(tmp_path), *flags]) == errors.UsageError.exit_code


@pytest.mark.parametrize("value", [0, 1, "yes"])
def test_a_do_sample_that_is_no_truth_value_is_refused_as_in_python(
    tmp_path: Path, pop_run: PopRun, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    make_bundle(tmp_path, text_files=with_generation_config(do_sample=value))
    done = pop_run(tmp_path, "--ids", "5")
    assert cli.main([str(tmp_path), "--ids", "5", "--json"]) == done.code == errors.ModelError.exit_code
    assert "generation_config.json, do_sample: expected true or false, found" in done.err


def test_settings_without_effect_are_noted(bundle: Path, pop_run: PopRun) -> None:
    done = pop_run(bundle, "--ids", "5", "--json", "--top-k", 3)
    assert done.code == 0 and "--top-k has no effect on greedy choice" in done.err


@pytest.mark.parametrize("flags", [("--ids", "5,6", "--json"), ("--ids", "5,6", "--stats"), ("--help",)])
def test_output_that_is_lost_is_one_line_and_exit_code_1(bundle: Path, flags: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:  # ended with 0
        done = subprocess.run([PROGRAM, bundle, *flags], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "pop_run: error: stdout: cannot write: No space left on device\n"


@pytest.mark.parametrize("flags", [("--json",), ()])
def test_a_closed_stdout_is_no_error(bundle: Path, flags: tuple[str, ...]) -> None:
    command = ["sh", "-c", 'exec "$0" "$@" >&-', PROGRAM, bundle, "--ids", "5,6", *flags]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_error_kinds_have_the_exit_codes_of_python() -> None:
    header = (REPOSITORY / "runtime/cpp/include/pop/error.h").read_text()
    for kind in (errors.UsageError, errors.ModelError, errors.BackendError, errors.GateError):
        constructor = f"explicit {kind.__name__}(const std::string& message) : Error(message, {kind.exit_code})"
        assert constructor in header


def test_an_interrupt_ends_with_130_and_what_was_written(bundle: Path) -> None:
    # 60 tokens take a few milliseconds: the interrupt is sent until one run is hit by it
    for attempt in range(50):
        command = [PROGRAM, bundle, "--ids", "5", "--ignore-eos", "--threads", "1"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs start with it ignored
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(0.0002 * (attempt % 5))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if process.returncode == 130:
            assert err == "" and out.endswith("\n")
            return
    pytest.fail("no run was interrupted")
