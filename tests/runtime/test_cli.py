"""`pop-run`: what goes to stdout, to stderr and into the exit code."""

from __future__ import annotations

import functools
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pop_runtime
from pop_runtime.cli import main
from tests.runtime.conftest import chat_files
from tests.runtime.tiny_bundle import Twin, make_bundle, tiny_weights


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return dict(json.loads(out))


def test_text_streams_to_stdout_and_nothing_else(
    chat_bundle: Path, chat_model: pop_runtime.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(chat_bundle), "--prompt", "hi", "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    generation = chat_model.generate("hi", max_new_tokens=5)
    list(generation)
    assert captured.out == generation.text + "\n"
    assert captured.err == ""


def test_json_holds_ids_text_reason_and_speed(chat_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, str(chat_bundle), "--prompt", "hi", "--max-new-tokens", "5", "--ignore-eos")
    assert len(result["new_token_ids"]) == result["num_new_tokens"] == 5
    assert result["stop_reason"] == "length"
    assert isinstance(result["text"], str)
    assert result["time_to_first_token_ms"] > 0 and result["tokens_per_second"] > 0
    assert result["prompt_token_ids"][0] == 259
    assert result["windows"] == {"sink_tokens": 0, "boundary_tokens": 1}
    assert result["settings"]["do_sample"] is False


@pytest.mark.parametrize("prefill", ["pop", "full"])
def test_ids_need_no_tokenizer(bundle: Path, capsys: pytest.CaptureFixture[str], prefill: str) -> None:
    result = _json(
        capsys, str(bundle), "--ids", "5,6, 7", "--max-new-tokens", "6", "--prefill", prefill, "--ignore-eos"
    )
    pruned = [prefill == "pop"] * 2 + [False]
    assert result["new_token_ids"] == Twin(tiny_weights()).greedy([5, 6, 7], 6, pruned)
    assert result["text"] is None
    assert (result["prefill"], result["num_pruned_tokens"]) == (prefill, sum(pruned))


def test_stats_go_to_stderr_with_the_settings_in_force(chat_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "hi", "--stats", "--temperature", "0.5", "--seed", "3", "--sink-tokens", "2"]
    assert main([str(chat_bundle), *arguments, "--max-new-tokens", "3", "--boundary-tokens", "4"]) == 0
    captured = capsys.readouterr()
    for part in ("time to first token", "tokens/s", "temperature=0.5", "seed=3", "sink_tokens=2", "boundary_tokens=4"):
        assert part in captured.err
    assert "temperature" not in captured.out


def test_stats_of_one_token_show_no_speed(chat_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(chat_bundle), "--prompt", "hi", "--stats", "--max-new-tokens", "1"]) == 0
    assert "decode               - (1 new tokens" in capsys.readouterr().err


def test_sampling_flags_reach_the_settings(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--temperature", "0.8", "--top-p", "0.9", "--top-k", "7", "--repetition-penalty", "1.2", "--seed", "3"]
    settings = _json(capsys, str(bundle), "--ids", "5,6", *flags, "--max-new-tokens", "2")["settings"]
    assert settings["temperature"] == 0.8 and settings["top_p"] == 0.9 and settings["top_k"] == 7
    assert settings["repetition_penalty"] == 1.2 and settings["seed"] == 3


def test_what_has_no_effect_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle(tmp_path, text_files={"generation_config.json": '{"num_beams": 4}'})
    assert main([str(folder), "--ids", "5", "--json", "--top-k", "3", "--max-new-tokens", "1"]) == 0
    error = capsys.readouterr().err
    assert "note: generation_config.json sets num_beams" in error
    assert "note: --top-k has no effect on greedy choice" in error


def _stdin(monkeypatch: pytest.MonkeyPatch, content: bytes, is_terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr(stdin, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_a_prompt_may_come_from_stdin(
    chat_bundle: Path,
    chat_model: pop_runtime.Model,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _stdin(monkeypatch, "Hé\n".encode())
    result = _json(capsys, str(chat_bundle), "--max-new-tokens", "1")
    assert result["prompt_token_ids"] == chat_model.encode_prompt("Hé")


def test_a_system_message_stands_before_the_prompt(
    chat_bundle: Path, chat_model: pop_runtime.Model, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _json(capsys, str(chat_bundle), "--system", "S", "--prompt", "hi", "--max-new-tokens", "1")
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    assert result["prompt_token_ids"] == chat_model.encode_prompt(messages)
    result = _json(capsys, str(chat_bundle), "--raw", "--prompt", "hi", "--max-new-tokens", "1")
    assert result["prompt_token_ids"] == chat_model.encode_prompt("hi", raw=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "5,x"], "--ids: expected whole numbers"),
        (["--ids", ""], "expected at least one token, found none"),
        (["--ids", "5,300"], "prompt, token 1: expected an id of 0..299, found 300"),
        (["--ids", "5"], "expected a tokenizer to print text, found none; add --json"),
        (["--prompt", "hi"], "expected a tokenizer for a text prompt, found none"),
        (["--ids", "5", "--json", "--temperature", "-1"], "temperature: expected"),
        (["--ids", "5", "--json", "--threads", "0"], "threads: expected at least 1"),
        (["--ids", "5", "--json", "--max-new-tokens", "0"], "max_new_tokens: expected at least 1"),
        (["--ids", "5", "--system", "x"], "--system: expected a prompt for the chat template"),
        (["--prompt", "hi", "--raw", "--system", "x"], "--system: expected a prompt for the chat template"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(
    bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(bundle), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pop-run: error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_no_prompt_at_all_is_a_usage_error(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, b"", is_terminal=True)
    assert main([str(bundle)]) == 2
    assert "expected --prompt, --ids or text on stdin, found none" in capsys.readouterr().err


def test_bytes_on_stdin_that_are_no_text_are_a_usage_error(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _stdin(monkeypatch, b"ab\xff")
    assert main([str(bundle)]) == 2
    assert "stdin: expected UTF-8 text, found invalid start byte at byte 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--prompt", "a", "--ids", "5"], ["--prefill", "half"], ["--top-k", "x"], ["--what"]]
)
def test_flags_that_cannot_be_are_refused_by_the_parser(bundle: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(bundle), *arguments])
    assert caught.value.code == 2


def test_a_folder_that_is_no_bundle_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--ids", "5", "--json"]) == 3
    assert "expected a bundle's manifest, found none" in capsys.readouterr().err


def test_an_altered_file_is_exit_3_unless_told_not_to_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_bundle(tmp_path)
    content = bytearray((folder / "weights.bin").read_bytes())
    content[5] ^= 1
    (folder / "weights.bin").write_bytes(content)
    assert main([str(folder), "--ids", "5", "--json"]) == 3
    assert "weights.bin: expected sha256" in capsys.readouterr().err
    assert main([str(folder), "--ids", "5", "--json", "--no-verify", "--max-new-tokens", "1"]) == 0


def test_a_graph_that_does_not_load_is_exit_4(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(bundle, folder)
    (folder / "prefill.onnx").write_bytes(b"no graph")
    assert main([str(folder), "--ids", "5", "--json", "--no-verify"]) == 4
    captured = capsys.readouterr()
    assert captured.err.startswith("pop-run: error: prefill.onnx: expected a graph")
    assert captured.err.count("\n") == 1


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert 'pop-run out/smollm2 --prompt "Why is the sky blue?"' in capsys.readouterr().out


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pop_runtime", str(folder), "--threads", "1", *arguments]
    # a shell starts background jobs with SIGINT ignored, and children inherit it
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed)


@pytest.fixture(scope="module")
def endless_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that generates for many seconds: positions enough, and printable bytes to choose from."""
    weights = tiny_weights()
    weights["positions"] = weights["positions"].repeat(2000, axis=0)
    weights["head"][:, 94:] = 0  # ids of printable ASCII bytes stay
    weights["head"][:, :94] *= 50
    folder = tmp_path_factory.mktemp("endless")
    return make_bundle(folder, weights, text_files=chat_files(), max_positions=128_000)


def test_an_interrupt_ends_quietly_with_130(endless_bundle: Path) -> None:
    process = _start(endless_bundle, "--prompt", "hi", "--max-new-tokens", "100000", "--ignore-eos")
    assert process.stdout is not None and process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, b"")


def test_a_closed_pipe_ends_quietly(endless_bundle: Path) -> None:
    process = _start(endless_bundle, "--prompt", "hi", "--max-new-tokens", "100000", "--ignore-eos")
    assert process.stdout is not None and process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    assert (process.wait(timeout=30), error) == (141, b"")
