"""`pop-run`: stream text from a bundle."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from pop_runtime.command import run_command
from pop_runtime.errors import UsageError
from pop_runtime.flags import check_flags, make_parser, options_of
from pop_runtime.memory import memory_text

if TYPE_CHECKING:
    from pop_runtime.generate import Generation
    from pop_runtime.model import Model, Prompt


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error a user can cause is one line on stderr."""
    arguments = make_parser().parse_args(argv)
    return run_command("pop-run", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    """Load, generate and print."""
    from pop_runtime.model import load  # here, so that --help and usage errors need no onnxruntime

    check_flags(arguments)
    prompt = None if arguments.chat else _prompt(arguments)
    model = load(
        arguments.dir, arguments.threads, verify=not arguments.no_verify, low_memory=arguments.low_memory,
        ep=arguments.ep, device=arguments.device, engine=arguments.engine,
        cuda_graphs=arguments.cuda_graphs,
    )  # fmt: skip
    if prompt is None:
        _chat(arguments, model)
        return
    generation = model.generate(prompt, **options_of(arguments))
    if arguments.ids is not None and not arguments.json and model.tokenizer is None:
        raise UsageError(f"{arguments.dir}: expected a tokenizer to print text, found none; add --json")
    for note in _notes(arguments, model, generation):
        print(f"pop-run: note: {note}", file=sys.stderr)
    interrupt: KeyboardInterrupt | None = None
    try:
        for token in generation:
            if not arguments.json:
                print(token.text, end="", flush=True)
    except KeyboardInterrupt as caught:  # what was written until then is shown like any answer
        generation.close()
        interrupt = caught
    print(json.dumps(_result(model, generation)) if arguments.json else "", flush=True)
    if arguments.stats:
        print(_stats_text(model, generation), file=sys.stderr)
    if interrupt is not None:
        raise interrupt


def _chat(arguments: argparse.Namespace, model: Model) -> None:
    """Hold a conversation; with --json its answers are printed at the end, in one object."""
    from pop_runtime.chat_cli import chat
    from pop_runtime.request import make_request

    if model.chat_template is None:
        raise UsageError(f"{arguments.dir}: expected a chat template for --chat, found none; give --prompt")
    make_request(model.defaults, options_of(arguments), [0])  # refuses options before the first line is read
    conversation, turns = model.conversation(), list[dict[str, Any]]()
    if arguments.system is not None:
        conversation.append({"role": "system", "content": arguments.system})

    def answered(generation: Generation) -> None:
        if not turns:
            for note in _notes(arguments, model, generation):
                print(f"pop-run: note: {note}", file=sys.stderr)
        turns.append(_result(model, generation))
        if arguments.stats:
            print(_stats_text(model, generation), file=sys.stderr)

    options = options_of(arguments)
    del options["raw"]
    try:
        chat(conversation, options, not arguments.json, answered)
    finally:  # an interrupt or a refused line does not take the turns that were answered
        if arguments.json:
            counts = {"num_tokens": len(conversation), "num_pruned_tokens": conversation.provenance.count("pruned")}
            print(json.dumps({"turns": turns, **counts}), flush=True)


def _prompt(arguments: argparse.Namespace) -> Prompt:
    """Return the prompt that the flags, or stdin, give."""
    if arguments.ids is not None:
        parts = arguments.ids.replace(",", " ").split()
        if not all(re.fullmatch("-?[0-9]{1,18}", part) for part in parts):  # int() takes "+5" and "1_0" too
            raise UsageError(f"--ids: expected whole numbers such as 5,6,7, found {arguments.ids!r}")
        return [int(part) for part in parts]
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
    except OSError as error:
        raise UsageError(f"stdin: expected UTF-8 text, found {error.strerror}; give --prompt") from error


def _notes(arguments: argparse.Namespace, model: Model, generation: Generation) -> list[str]:
    """Return what was asked for and will have no effect."""
    notes = [f"generation_config.json sets {name}, which pop-run does not apply" for name in model.ignored_settings]
    if not generation.request.sampling.do_sample:
        given = [name for name in ("top_p", "top_k", "min_p", "seed") if getattr(arguments, name) is not None]
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
        "stop_string": generation.stop_string,
        "logprobs": _logprobs(generation),
        "prompt_logprobs": generation.prompt_logprobs,
        "time_to_first_token_ms": stats.time_to_first_token_ms,
        "tokens_per_second": stats.tokens_per_second,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_past_tokens": stats.num_past_tokens,
        "num_rewound_tokens": stats.num_rewound_tokens,
        "num_pruned_tokens": stats.num_pruned_tokens,
        "num_new_tokens": stats.num_new_tokens,
        "prefill": generation.request.prefill,
        "windows": {
            "sink_tokens": generation.request.windows.sink_tokens,
            "boundary_tokens": generation.request.windows.boundary_tokens,
        },
        "settings": stats.settings,
        "ignored_settings": model.ignored_settings,
        "ep": model.sessions.target.ep,
        "device": model.sessions.target.device,
        "cuda_graphs": model.sessions.target.cuda_graphs,
        "nodes_by_provider": model.sessions.nodes_by_provider,
    }


def _logprobs(generation: Generation) -> list[dict[str, Any]] | None:
    """Return log-probability (nats) and alternatives of each new token; None unless asked for."""
    if generation.request.logprobs is None:
        return None
    return [
        {"id": token.id, "logprob": token.logprob, "likeliest": [list(pair) for pair in token.alternatives]}
        for token in generation.tokens
    ]


def _stats_text(model: Model, generation: Generation) -> str:
    """Return what --stats prints."""
    stats = generation.stats
    first = "-" if stats.time_to_first_token_ms is None else f"{stats.time_to_first_token_ms:.1f} ms"
    speed = "-" if stats.tokens_per_second is None else f"{stats.tokens_per_second:.1f} tokens/s"
    settings = " ".join(f"{name}={value}" for name, value in stats.settings.items())
    nodes = "; ".join(
        f"{graph}: {', '.join(f'{count} on {name}' for name, count in counts.items())}"
        for graph, counts in model.sessions.nodes_by_provider.items()
    )
    return (
        f"time to first token  {first} "
        f"({stats.num_prompt_tokens} prompt tokens, {stats.num_pruned_tokens} through the pruned graph)\n"
        f"decode               {speed} ({stats.num_new_tokens} new tokens, stopped by {generation.stop_reason})\n"
        f"settings             {settings}\n"
        f"nodes                {nodes}\n"
        f"{memory_text(model.sessions.sharing)}"
    )
