"""The flags of `pop-run`: what there is, what contradicts what, and the options they stand for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pop_runtime.errors import UsageError
from pop_runtime.version import add_version_flag

if TYPE_CHECKING:
    from pop_runtime.request import Options

_EXAMPLES = """\
examples:
  pop-run out/smollm2 --prompt "Why is the sky blue?"        chat template, if the bundle has one
  pop-run out/smollm2 --prompt "Once upon a time" --raw      the text as it is
  pop-run out/smollm2 --system "Answer in verse." < question.txt
  pop-run out/smollm2 --prompt "A name for a cat" --temperature 0.8 --top-p 0.95 --seed 7
  pop-run out/smollm2 --prompt "List three rivers" --stop "2."   end before this text; may be given several times
  pop-run out/smollm2 --chat --system "Be brief."            a conversation: a line, an answer, a line, ...
  pop-run out/smollm2 --prompt "..." --stats                 time to first token, tokens per second, settings
  pop-run out/smollm2 --prompt "..." --prefill full          the exact model, to compare with
  pop-run out/smollm2 --prompt "..." --logprobs 3 --json     how sure the model was, and what else it might have said
  pop-run out/smollm2 --ids 5,6,7 --json                     token ids in, one JSON object out; no tokenizer needed

exit codes: 0 done, 1 stdout cannot be written, 2 usage, 3 bundle, 4 ONNX Runtime, 130 interrupted
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="pop-run", description="Stream text from a bundle made by pop-export.", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("dir", help="the bundle's folder")

    prompt = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; without it and --ids it is read from stdin")
    prompt.add_argument("--ids", metavar="N,N,...", help="the prompt as token ids")
    prompt.add_argument("--chat", action="store_true", help="a conversation: each line of stdin is a message")
    text = parser.add_argument_group("text")
    text.add_argument("--raw", action="store_true", help="do not apply the chat template")
    text.add_argument("--system", metavar="TEXT", help="a system message before the prompt")

    reading = parser.add_argument_group("reading the prompt")
    reading.add_argument("--prefill", choices=("pop", "full"), default="pop", help="pruned (default) or exact")
    reading.add_argument(
        "--sink-tokens", type=int, metavar="N", help="first tokens read in full; default: the bundle's"
    )
    reading.add_argument(
        "--boundary-tokens", type=int, metavar="N", help="last tokens read in full; default: the bundle's"
    )
    reading.add_argument(
        "--prefill-chunk-tokens",
        type=int,
        metavar="N",
        help="read so many at once (default 512); less takes less memory",
    )

    choice = parser.add_argument_group("choosing tokens")
    choice.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: generation_config.json")
    choice.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this probability")
    choice.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 is no limit")
    choice.add_argument(
        "--min-p", type=float, metavar="X", help="drop tokens less likely than X times the likeliest; 0 is no limit"
    )
    choice.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 makes seen tokens less likely")
    choice.add_argument("--seed", type=int, metavar="N", help="same seed, same text")

    ending = parser.add_argument_group("ending the answer")
    ending.add_argument("--max-new-tokens", type=int, metavar="N", help="stop after so many tokens (default 256)")
    ending.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeat for several")
    ending.add_argument("--ignore-eos", action="store_true", help="do not stop at an end token")

    output = parser.add_argument_group("output")
    output.add_argument("--stats", action="store_true", help="print speed and the settings in force on stderr")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    output.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: each token's log-probability and the N likeliest ids'"
    )
    output.add_argument(
        "--prompt-logprobs", action="store_true", help="with --json and --prefill full: the prompt tokens' too, slowly"
    )

    machine = parser.add_argument_group("machine")
    machine.add_argument("--threads", type=int, metavar="N", help="threads (default: the cores this process may use)")
    add_target_flags(machine)
    machine.add_argument(
        "--low-memory",
        action="store_true",
        help="leave weights that are not quantised as they lie in the file, for slower steps",
    )
    machine.add_argument("--no-verify", action="store_true", help="do not compare the files' sha256 with the manifest")
    add_version_flag(parser)
    return parser


def add_target_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that say where a bundle runs: the same for every command that runs one."""
    add = parser.add_argument
    add("--ep", default="cpu", metavar="EP",
        help="execution provider: cpu, cuda, tensorrt, nv-tensorrt-rtx or openvino (default cpu)")  # fmt: skip
    add("--device", type=int, default=0, metavar="N", help="which device of it (default 0)")
    add("--engine", action="store_true", help="run what pop-compile made for this machine")
    add("--cuda-graphs", action="store_true", help="on --ep cuda, record a decode step once and replay it")


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other or would have no effect."""
    if arguments.system is not None and (arguments.raw or arguments.ids is not None):
        raise UsageError("--system: expected a prompt for the chat template, found --raw or --ids; leave one out")
    if arguments.raw and arguments.ids is not None:
        raise UsageError("--raw: expected a prompt of text, found --ids; leave one out")
    if arguments.chat and arguments.raw:
        raise UsageError("--chat: expected messages for the chat template, found --raw; leave one out")
    check_windows_have_effect(arguments.sink_tokens, arguments.boundary_tokens, arguments.prefill == "pop")
    for name in ("logprobs", "prompt_logprobs"):
        given = getattr(arguments, name)  # --logprobs 0 asks for those of the tokens alone
        if given is not None and given is not False and not arguments.json:
            raise UsageError(f"--{name.replace('_', '-')}: expected --json to show them in, found none; add it")


def check_windows_have_effect(sink_tokens: int | None, boundary_tokens: int | None, has_pruned: bool) -> None:
    """Refuse windows where no prompt is pruned: the same for every command that takes them.

    Args:
        sink_tokens: None: not given.
        boundary_tokens: None: not given.
        has_pruned: whether some prompt is read with `--prefill pop`.
    """
    for flag, given in (("--sink-tokens", sink_tokens), ("--boundary-tokens", boundary_tokens)):
        if given is not None and not has_pruned:
            raise UsageError(f"{flag}: expected --prefill pop, found full, which has no windows; leave one out")


def options_of(arguments: argparse.Namespace) -> Options:
    """Return the options of each answer."""
    return {
        "max_new_tokens": arguments.max_new_tokens, "prefill": arguments.prefill, "stop": arguments.stop,
        "sink_tokens": arguments.sink_tokens, "boundary_tokens": arguments.boundary_tokens,
        "prefill_chunk_tokens": arguments.prefill_chunk_tokens, "temperature": arguments.temperature,
        "top_p": arguments.top_p, "top_k": arguments.top_k, "min_p": arguments.min_p, "seed": arguments.seed,
        "repetition_penalty": arguments.repetition_penalty, "logprobs": arguments.logprobs,
        "prompt_logprobs": arguments.prompt_logprobs, "ignore_eos": arguments.ignore_eos, "raw": arguments.raw,
    }  # fmt: skip
