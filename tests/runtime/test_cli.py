"""`pop-run`: what goes to stdout, to stderr and into the exit code."""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pop_runtime
from pop_runtime.cli import main
from pop_runtime.manifest import Plan, Windows
from tests.runtime.conftest import CHAT_TEMPLATE, chat_files
from tests.runtime.tiny_bundle import SKIPPED, L, Twin, make_bundle, tiny_weights


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
        capsys, str(bundle), "--ids", "5,6,\n\t7", "--max-new-tokens", "6", "--prefill", prefill, "--ignore-eos"
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
    flags += ["--min-p", "0.1", "--prefill-chunk-tokens", "3"]
    settings = _json(capsys, str(bundle), "--ids", "5,6", *flags, "--max-new-tokens", "2")["settings"]
    assert settings["min_p"] == 0.1 and settings["prefill_chunk_tokens"] == 3
    assert settings["temperature"] == 0.8 and settings["top_p"] == 0.9 and settings["top_k"] == 7
    assert settings["repetition_penalty"] == 1.2 and settings["seed"] == 3


def test_min_p_of_one_leaves_only_the_likeliest(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ids", "5,6,7", "--max-new-tokens", "6", "--ignore-eos"]
    greedy = _json(capsys, str(bundle), *flags)["new_token_ids"]
    sampled = [*flags, "--temperature", "5", "--seed", "1"]
    assert _json(capsys, str(bundle), *sampled)["new_token_ids"] != greedy
    assert _json(capsys, str(bundle), *sampled, "--min-p", "1")["new_token_ids"] == greedy


def test_a_repetition_penalty_forbids_repeating(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ids", "5,6,7", "--max-new-tokens", "40", "--ignore-eos"]
    repeated = _json(capsys, str(bundle), *flags)["new_token_ids"]
    assert len(set(repeated)) < 40
    ids = _json(capsys, str(bundle), *flags, "--repetition-penalty", "1e6")["new_token_ids"]
    assert len(set(ids)) == 40 and not {5, 6, 7} & set(ids)


def test_stop_strings_end_the_text(chat_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "hi", "--raw", "--max-new-tokens", "20", "--ignore-eos", "--temperature", "2", "--seed", "3"]
    text = _json(capsys, str(chat_bundle), *flags)["text"]
    stop = text[5:8]
    result = _json(capsys, str(chat_bundle), *flags, "--stop", "unheard", "--stop", stop)
    assert result["text"] == text[: text.index(stop)]
    assert (result["stop_reason"], result["stop_string"]) == ("stop", stop)
    assert result["settings"]["stop"] == ["unheard", stop]
    assert main([str(chat_bundle), *flags, "--stop", stop, "--threads", "1"]) == 0
    assert capsys.readouterr().out == result["text"] + "\n"


def test_logprobs_are_in_the_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ids", "5,6,7", "--max-new-tokens", "3", "--ignore-eos"]
    result = _json(capsys, str(bundle), *flags, "--logprobs", "2", "--prompt-logprobs", "--prefill", "full")
    assert [entry["id"] for entry in result["logprobs"]] == result["new_token_ids"]
    for entry in result["logprobs"]:
        assert entry["likeliest"][0] == [entry["id"], entry["logprob"]] and len(entry["likeliest"]) == 2
    assert result["prompt_logprobs"][0] is None and len(result["prompt_logprobs"]) == 3
    plain = _json(capsys, str(bundle), *flags)
    assert plain["logprobs"] is None and plain["prompt_logprobs"] is None


def test_prompt_logprobs_of_the_pruned_prefill_are_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(bundle), "--ids", "5,6", "--json", "--prompt-logprobs"]) == 2
    assert "the pruned graph has no head" in capsys.readouterr().err


def test_a_sink_that_the_fit_does_not_cover_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_bundle(tmp_path, plan=Plan(L, SKIPPED, "user", SKIPPED), windows=Windows(4, 2))
    assert main([str(folder), "--ids", "5,6", "--json", "--sink-tokens", "0"]) == 2
    assert "sink_tokens: expected at least 4, found 0" in capsys.readouterr().err
    assert main([str(folder), "--ids", "5,6", "--json", "--sink-tokens", "4"]) == 0


# Chat


def test_chat_answers_line_by_line(
    chat_bundle: Path,
    chat_model: pop_runtime.Model,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--chat", "--system", "S", "--max-new-tokens", "4", "--ignore-eos", "--threads", "1"]
    conversation = chat_model.conversation()
    conversation.append({"role": "system", "content": "S"})
    texts = []
    for line in ("a", "b"):
        conversation.append(line)
        generation = conversation.generate(max_new_tokens=4, ignore_eos=True)
        list(generation)
        texts.append(generation.text)
    _stdin(monkeypatch, b"a\n\nb\n/exit\nnever\n")
    assert main([str(chat_bundle), *flags, "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(text + "\n" for text in texts)
    assert captured.err.count("time to first token") == 2
    _stdin(monkeypatch, b"a\nb")
    result = _json(capsys, str(chat_bundle), *flags)
    assert [turn["text"] for turn in result["turns"]] == texts
    assert result["num_tokens"] == len(conversation)
    assert result["num_pruned_tokens"] == conversation.provenance.count("pruned") > 0


def test_chat_takes_a_turn_back(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [str(chat_bundle), "--chat", "--max-new-tokens", "3", "--ignore-eos"]
    _stdin(monkeypatch, b"a\nb\n/undo\nc\n")
    turns = _json(capsys, *flags)["turns"]
    _stdin(monkeypatch, b"a\nc\n")
    assert _json(capsys, *flags)["turns"][1]["new_token_ids"] == turns[2]["new_token_ids"]


def test_a_line_that_does_not_fit_is_refused_at_a_terminal_and_ends_a_pipe(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [str(chat_bundle), "--chat", "--max-new-tokens", "2", "--ignore-eos", "--threads", "1"]
    _stdin(monkeypatch, b"x" * 90 + b"\n/undo\na\n")
    assert main(flags) == 2
    assert "expected fewer than 64 tokens" in capsys.readouterr().err
    lines = iter(["x" * 90, "/undo", "a"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    _stdin(monkeypatch, b"", is_terminal=True)
    monkeypatch.setattr("builtins.input", read)
    assert main(flags) == 0
    captured = capsys.readouterr()
    assert "expected fewer than 64 tokens" in captured.err and "undo: expected at least one turn" in captured.err
    assert captured.out.endswith("\n") and captured.out.count("\n") >= 1


def test_an_interrupt_at_a_terminal_ends_the_answer_and_not_the_chat(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, answers = iter(["a", "b"]), iter([True, False])

    def read(prompt: str) -> str:
        return next(lines, "/exit")

    advance = pop_runtime.Generation.__next__
    interrupt = {"due": 0}

    def interrupted(self: pop_runtime.Generation) -> pop_runtime.Token:
        if len(self.tokens) == 2 and next(answers, False):
            interrupt["due"] += 1
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(pop_runtime.Generation, "__next__", interrupted)
    _stdin(monkeypatch, b"", is_terminal=True)
    monkeypatch.setattr("builtins.input", read)
    assert main([str(chat_bundle), "--chat", "--max-new-tokens", "5", "--ignore-eos", "--json", "--threads", "1"]) == 0
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert [(turn["stop_reason"], turn["num_new_tokens"]) for turn in turns] == [("cancelled", 2), ("length", 5)]
    assert interrupt["due"] == 1


def test_a_message_whose_reading_is_interrupted_is_forgotten_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the message stayed pending, so that this template refused the next one, and --stats ended in a TypeError
    alternating = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHAT_TEMPLATE
    )
    folder = make_bundle(tmp_path, text_files=chat_files(alternating))
    advance, interrupts = pop_runtime.Generation._advance, iter([False, True])

    def interrupted(self: pop_runtime.Generation) -> None:
        if not self.tokens and next(interrupts, False):
            raise KeyboardInterrupt
        advance(self)

    lines = iter(["a", "b", "c"])
    monkeypatch.setattr(pop_runtime.Generation, "_advance", interrupted)
    _stdin(monkeypatch, b"", is_terminal=True)
    monkeypatch.setattr("builtins.input", lambda _: next(lines, "/exit"))
    assert main([str(folder), "--chat", "--max-new-tokens", "2", "--ignore-eos", "--threads", "1", "--stats"]) == 0
    error = capsys.readouterr().err
    assert error.count("pop-run: note: broken off before the answer began: the message is forgotten\n") == 1
    assert error.count("time to first token  - (") == 1 and "stopped by cancelled" in error
    assert "roles must alternate" not in error and error.count("stopped by length") == 2


def test_an_interrupt_leaves_the_json_of_the_turns_that_were_answered(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, counts = pop_runtime.Generation._advance, {"tokens": 0}

    def interrupted(self: pop_runtime.Generation) -> None:
        counts["tokens"] += 1
        if counts["tokens"] == 3:  # the first of the second answer
            raise KeyboardInterrupt
        advance(self)

    monkeypatch.setattr(pop_runtime.Generation, "_advance", interrupted)
    _stdin(monkeypatch, b"a\nb\nc\n")
    assert (
        main([str(chat_bundle), "--chat", "--json", "--max-new-tokens", "2", "--ignore-eos", "--threads", "1"]) == 130
    )
    assert len(json.loads(capsys.readouterr().out)["turns"]) == 1


@pytest.mark.parametrize("refused", [b"x" * 90, b"\xff"])
def test_a_refused_line_of_a_pipe_leaves_the_json_of_the_turns_before(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, refused: bytes
) -> None:
    _stdin(monkeypatch, b"a\n" + refused + b"\nb\n")
    assert main([str(chat_bundle), "--chat", "--json", "--max-new-tokens", "2", "--ignore-eos", "--threads", "1"]) == 2
    assert len(json.loads(capsys.readouterr().out)["turns"]) == 1


def test_the_prompt_for_a_line_is_not_among_the_answers(chat_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pop_runtime", str(chat_bundle), "--chat", "--json", "--max-new-tokens", "2"]
    terminal, typed = pty.openpty()
    os.write(terminal, b"a\n/exit\n")
    with (tmp_path / "turns.json").open("wb") as stdout:
        done = subprocess.run(command, stdin=typed, stdout=stdout, stderr=subprocess.PIPE, check=True)
    os.close(terminal)
    os.close(typed)
    assert len(json.loads((tmp_path / "turns.json").read_text())["turns"]) == 1
    assert done.stderr.endswith(b"> > ")


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
        (["--ids", "5", "--json", "--threads", "99999999999"], "threads: expected at most "),
        (["--ids", "5", "--json", "--threads", "100000"], "threads: expected at most "),
        (["--ids", "5", "--logprobs", "0"], "--logprobs: expected --json"),
        (["--ids", "5", "--json", "--max-new-tokens", "0"], "max_new_tokens: expected at least 1"),
        (["--ids", "5", "--system", "x"], "--system: expected a prompt for the chat template"),
        (["--ids", "5", "--raw"], "--raw: expected a prompt of text, found --ids; leave one out"),
        (
            ["--ids", "5", "--prefill", "full", "--sink-tokens", "4"],
            "--sink-tokens: expected --prefill pop, found full",
        ),
        (["--ids", "5", "--prefill", "full", "--boundary-tokens", "4"], "--boundary-tokens: expected --prefill pop"),
        (["--ids", "5 +6"], "--ids: expected whole numbers such as 5,6,7, found '5 +6'"),
        (["--ids", "1_0"], "--ids: expected whole numbers"),
        (["--ids", "-1"], "prompt, token 0: expected an id of 0..299, found -1"),
        (["--ids", "5,99999999999999999999"], "--ids: expected whole numbers"),
        (["--prompt", "hi", "--raw", "--system", "x"], "--system: expected a prompt for the chat template"),
        (["--chat", "--raw"], "--chat: expected messages for the chat template"),
        (["--chat"], "expected a chat template for --chat, found none"),
        (["--ids", "5", "--logprobs", "2"], "--logprobs: expected --json"),
        (["--ids", "5", "--prompt-logprobs"], "--prompt-logprobs: expected --json"),
        (["--ids", "5", "--json", "--stop", "x"], "stop: expected a tokenizer"),
        (["--ids", "5", "--json", "--min-p", "2"], "min_p: expected a number from 0 to 1"),
        (["--ids", "5", "--json", "--prefill-chunk-tokens", "0"], "prefill_chunk_tokens: expected at least 1"),
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
    "arguments",
    [["--prompt", "a", "--ids", "5"], ["--prompt", "a", "--chat"], ["--prefill", "half"], ["--top-k", "x"], ["--what"]],
)
def test_flags_that_cannot_be_are_refused_by_the_parser(bundle: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(bundle), *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--chat", "--system", "\udcff"], "prompt, message 0"),
        (["--prompt", "hi", "--system", "\udcff"], "prompt, message 0"),
        (["--prompt", "\udcff"], "prompt, message 0"),
        (["--prompt", "\udcff", "--raw"], "prompt"),
        (["--prompt", "hi", "--stop", "\udcff"], "stop"),
    ],
)
def test_text_on_the_command_line_that_is_not_utf_8_is_a_usage_error(
    chat_bundle: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    place: str,
) -> None:
    _stdin(monkeypatch, b"hi\n")
    assert main([str(chat_bundle), *arguments]) == 2
    message = f"{place}: expected UTF-8 text, found '\\udcff' at 0; change it or leave it out"
    assert capsys.readouterr().err == f"pop-run: error: {message}\n"


def test_a_closed_stdin_has_no_lines_to_chat_with(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main([str(chat_bundle), "--chat"]) == 2
    assert capsys.readouterr().err.startswith(
        "pop-run: error: stdin: expected lines of text for --chat, found it closed"
    )


@pytest.mark.parametrize("flags", [[], ["--stats"], ["--json"]])
def test_a_closed_stdout_is_no_error(chat_bundle: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main([str(chat_bundle), "--prompt", "hi", "--max-new-tokens", "2", *flags]) == 0


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


def test_an_interrupt_leaves_the_json_of_what_was_written(
    chat_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = pop_runtime.Generation.__next__

    def interrupted(self: pop_runtime.Generation) -> pop_runtime.Token:
        if len(self.tokens) == 2:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(pop_runtime.Generation, "__next__", interrupted)
    assert main([str(chat_bundle), "--prompt", "hi", "--ignore-eos", "--json", "--stats"]) == 130
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["stop_reason"], result["num_new_tokens"], len(result["new_token_ids"])) == ("cancelled", 2, 2)
    assert "stopped by cancelled" in captured.err


@pytest.mark.parametrize("flags", [["--prompt", "hi"], ["--prompt", "hi", "--json"]])
def test_an_answer_that_cannot_be_written_is_one_line(chat_bundle: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "pop_runtime", str(chat_bundle), *flags, "--max-new-tokens", "2"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"pop-run: error: stdout: cannot write: No space left on device\n")


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_a_stdin_that_cannot_be_read_is_a_usage_error(chat_bundle: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "pop_runtime", str(chat_bundle), *flags]
    with Path(os.devnull).open("wb") as unreadable:
        done = subprocess.run(command, stdin=unreadable, capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"stdin: expected" in done.stderr and b"Bad file descriptor" in done.stderr


def test_a_closed_pipe_ends_quietly(endless_bundle: Path) -> None:
    process = _start(endless_bundle, "--prompt", "hi", "--max-new-tokens", "100000", "--ignore-eos")
    assert process.stdout is not None and process.stdout.read(10)
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    assert (process.wait(timeout=30), error) == (141, b"")
