"""`pop-run`: stream text from a bundle."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from pop_runtime.errors import PopError, UsageError

if TYPE_CHECKING:
    from pop_runtime.generate import Generation
    from pop_runtime.model import Model, Prompt

_EXAMPLES = """\
examples:
  pop-run out/smollm2 --prompt "Why is the sky blue?"        chat template, if the bundle has one
  pop-run out/smollm2 --prompt "Once upon a time" --raw      the text as it is
  pop-run out/smollm2 --system "Answer in verse." < question.txt
  pop-run out/smollm2 --prompt "A name for a cat" --temperature 0.8 --top-p 0.95 --seed 7
  pop-run out/smollm2 --prompt "..." --stats                 time to first token, tokens per second, settings
  pop-run out/smollm2 --prompt "..." --prefill full          the exact model, to compare with
  pop-run out/smollm2 --ids 5,6,7 --json                     token ids in, one JSON object out; no tokenizer needed

exit codes: 0 done, 2 usage, 3 bundle, 4 ONNX Runtime, 130 interrupted
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error a user can cause is one line on stderr."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    try:
        _run(arguments)
        sys.stdout.flush()
    except PopError as error:
        print(f"pop-run: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 141  # as a process that SIGPIPE ended
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="pop-run", description="Stream text from a bundle made by pop-export.", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("dir", help="the bundle's folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; without it and --ids it is read from stdin")
    prompt.add_argument("--ids", metavar="N,N,...", help="the prompt as token ids")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="stop after so many tokens (default 256)")
    parser.add_argument(
        "--prefill", choices=("pop", "full"), default="pop", help="pruned or exact reading of the prompt"
    )
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: generation_config.json")
    parser.add_argument("--top-p", type=float, metavar="X", help="keep the likeliest tokens up to this probability")
    parser.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 is no limit")
    parser.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 makes seen tokens less likely")
    parser.add_argument("--seed", type=int, metavar="N", help="same seed, same text")
    parser.add_argument("--sink-tokens", type=int, metavar="N", help="first tokens read in full; default: the bundle's")
    parser.add_argument(
        "--boundary-tokens", type=int, metavar="N", help="last tokens read in full; default: the bundle's"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at an end token")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: the cores this process may use)")
    parser.add_argument("--low-memory", action="store_true", help="share the weights between prefill and decode")
    parser.add_argument("--stats", action="store_true", help="print speed and the settings in force on stderr")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the files' sha256 with the manifest")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    """Load, generate and print."""
    from pop_runtime.model import load  # here, so that --help and usage errors need no onnxruntime

    prompt = _prompt(arguments)
    model = load(arguments.dir, arguments.threads, verify=not arguments.no_verify, low_memory=arguments.low_memory)
    generation = model.generate(
        prompt, max_new_tokens=arguments.max_new_tokens, prefill=arguments.prefill, raw=arguments.raw,
        temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k,
        repetition_penalty=arguments.repetition_penalty, seed=arguments.seed, sink_tokens=arguments.sink_tokens,
        boundary_tokens=arguments.boundary_tokens, ignore_eos=arguments.ignore_eos,
    )  # fmt: skip
    if arguments.ids is not None and not arguments.json and model.tokenizer is None:
        raise UsageError(f"{arguments.dir}: expected a tokenizer to print text, found none; add --json")
    for note in _notes(arguments, model, generation):
        print(f"pop-run: note: {note}", file=sys.stderr)
    for token in generation:
        if not arguments.json:
            print(token.text, end="", flush=True)
    if arguments.stats:
        sys.stdout.flush()
    print(json.dumps(_result(model, generation)) if arguments.json else "")
    if arguments.stats:
        print(_stats_text(generation), file=sys.stderr)


def _prompt(arguments: argparse.Namespace) -> Prompt:
    """Return the prompt that the flags, or stdin, give."""
    if arguments.system is not None and (arguments.raw or arguments.ids is not None):
        raise UsageError("--system: expected a prompt for the chat template, found --raw or --ids; leave one out")
    if arguments.ids is not None:
        try:
            return [int(part) for part in arguments.ids.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError(f"--ids: expected whole numbers such as 5,6,7, found {arguments.ids!r}") from error
    text = arguments.prompt if arguments.prompt is not None else _read_stdin()
    if arguments.system is None:
        return text
    return [{"role": "system", "content": arguments.system}, {"role": "user", "content": text}]


def _read_stdin() -> str:
    """Return the text on stdin without its last line end."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("prompt: expected --prompt, --ids or text on stdin, found none; see pop-run --help")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: expected UTF-8 text, found {error.reason} at byte {error.start}") from error


def _notes(arguments: argparse.Namespace, model: Model, generation: Generation) -> list[str]:
    """Return what was asked for and will have no effect."""
    notes = [f"generation_config.json sets {name}, which pop-run does not apply" for name in model.ignored_settings]
    if not generation.request.sampling.do_sample:
        given = [name for name in ("top_p", "top_k", "seed") if getattr(arguments, name) is not None]
        flags = [f"--{name.replace('_', '-')}" for name in given]
        notes += [f"{flag} has no effect on greedy choice; give --temperature above 0" for flag in flags]
    return notes


def _result(model: Model, generation: Generation) -> dict[str, Any]:
    """Return what --json prints; `text` is null without a tokenizer."""
    stats = generation.stats
    return {
        "prompt_token_ids": list(generation.request.prompt_token_ids),
        "new_token_ids": generation.token_ids,
        "text": None if model.tokenizer is None else generation.text,
        "stop_reason": generation.stop_reason,
        "time_to_first_token_ms": stats.time_to_first_token_ms,
        "tokens_per_second": stats.tokens_per_second,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_pruned_tokens": stats.num_pruned_tokens,
        "num_new_tokens": stats.num_new_tokens,
        "prefill": generation.request.prefill,
        "windows": {
            "sink_tokens": generation.request.windows.sink_tokens,
            "boundary_tokens": generation.request.windows.boundary_tokens,
        },
        "settings": stats.settings,
        "ignored_settings": model.ignored_settings,
    }


def _stats_text(generation: Generation) -> str:
    """Return what --stats prints."""
    stats = generation.stats
    speed = "-" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f} tokens/s"
    settings = " ".join(f"{name}={value}" for name, value in stats.settings.items())
    return (
        f"time to first token  {stats.time_to_first_token_ms:.1f} ms "
        f"({stats.num_prompt_tokens} prompt tokens, {stats.num_pruned_tokens} through the pruned graph)\n"
        f"decode               {speed} ({stats.num_new_tokens} new tokens, stopped by {generation.stop_reason})\n"
        f"settings             {settings}"
    )
