"""`pop-eval`: a bundle and texts in, figures out."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pop_export.cli import add_checkpoint_flags
from pop_export.extras import imports_for
from pop_runtime.command import run_command
from pop_runtime.errors import UsageError
from pop_runtime.flags import add_target_flags, check_windows_have_effect
from pop_runtime.version import add_version_flag

if TYPE_CHECKING:
    from pop_export.evaluate import EvalConfig, Evaluation
    from pop_runtime.model import Model

EXAMPLES = """\
examples:
  pop-eval out/smollm2 --data notes.txt verse.txt           KL, agreement, perplexity, retrieval
  pop-eval out/smollm2 --data notes.txt --no-retrieval --json
  pop-eval out/smollm2 --data notes.txt --sink-tokens 4 --boundary-tokens 32
  pop-eval out/smollm2 --data notes.txt --against smollm2-135m                  with the damage of quantisation
  pop-eval out/smollm2 --data notes.txt --against smollm2-135m --prefill full   that damage alone
  pop-eval out/smollm2 --data notes.txt --ep cuda --device 1                    on the second GPU

A window is --context tokens of prompt and --continuation tokens of the same text, which both sides then predict one
by one. Give text that the bundle was not calibrated on.

exit codes: 0 done, 1 stdout cannot be written, 2 usage or data, 3 bundle or checkpoint, 4 ONNX Runtime, 130 interrupted
"""
_INTEGERS = {
    "context": "prompt tokens of each window (default 384)",
    "continuation": "tokens scored after the prompt (default 128)",
    "windows": "windows per file, spread over it (default 8)",
    "sink-tokens": "first tokens read in full (default: the bundle's)",
    "boundary-tokens": "last prompt tokens read in full (default: the bundle's)",
    "retrieval-length": "prompt tokens of the retrieval task (default 512, or what the model takes)",
    "retrieval-keys": "keys hidden at each depth (default 8)",
    "batch": "windows stepped together (default 8); changes speed and memory, not what is measured",
    "seed": "of windows and keys (default 0)",
}


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="pop-eval",
        description="Measure how far a bundle's pruned prefill is from the full model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("dir", type=Path, help="the bundle's folder")
    add("--data", nargs="+", type=Path, required=True, metavar="FILE", help="UTF-8 text files")
    for name, text in _INTEGERS.items():
        add(f"--{name}", type=int, metavar="N", help=text)
    add("--prefill", choices=("pop", "full"), help="how the bundle reads the prompts (default pop)")
    add("--against", metavar="MODEL", help="take the original checkpoint in PyTorch as the full model, as in "
        "pop-export --model (default: the same bundle with --prefill full)")  # fmt: skip
    add_checkpoint_flags(parser.add_argument_group("checkpoint of --against"))
    add("--no-retrieval", action="store_true", help="leave the retrieval task out")
    add("--threads", type=int, metavar="N", help="threads to use (default: one per visible core)")
    add_target_flags(parser)
    add("--json", action="store_true", help="end stdout with one JSON object")
    add_version_flag(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="pop-eval: warning: %(message)s")
    return run_command("pop-eval", lambda: print(_run(arguments)))


def _run(arguments: argparse.Namespace) -> str:
    """Return what the command prints."""
    from pop_export.evaluate import evaluate  # here, so that --help needs no onnxruntime
    from pop_export.evaluation.text import encode_document, read_text
    from pop_runtime.model import load

    _check_flags(arguments)
    config = _config(arguments)
    texts = {str(path): read_text(path) for path in arguments.data}
    model = load(
        arguments.dir, arguments.threads, ep=arguments.ep, device=arguments.device, engine=arguments.engine,
        cuda_graphs=arguments.cuda_graphs,
    )  # fmt: skip
    if model.tokenizer is None:
        raise UsageError(f"{arguments.dir}: expected a tokenizer to read text, found none; re-run pop-export")
    documents = [encode_document(name, text, model.tokenizer) for name, text in texts.items()]
    full = None
    if arguments.against is not None:
        with imports_for("--against"):
            from pop_export.evaluation.against import open_checkpoint_side  # only now torch is needed

        full = open_checkpoint_side(
            arguments.against, model.manifest, arguments.threads, revision=arguments.revision,
            offline=arguments.offline, trust_remote_code=arguments.trust_remote_code,
            allow_pickle=arguments.allow_pickle,
        )  # fmt: skip
    evaluation = evaluate(model, documents, config, full)
    if config.prefill == "pop" and not evaluation.num_pruned_tokens:
        print("pop-eval: note: no prompt token went through the pruned graph: the windows cover all", file=sys.stderr)
    if arguments.json:
        return json.dumps(evaluation.as_json(_settings(arguments, config, model)))
    return summary(evaluation)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that others leave without effect."""
    for name in ("retrieval-length", "retrieval-keys"):
        if arguments.no_retrieval and getattr(arguments, name.replace("-", "_")) is not None:
            raise UsageError(f"--{name} and --no-retrieval: the one has no effect beside the other; drop one of them")
    for name in ("revision", "trust-remote-code", "allow-pickle", "offline"):
        if getattr(arguments, name.replace("-", "_")) and arguments.against is None:
            raise UsageError(f"--{name}: expected --against with it, whose checkpoint it is about, found none; add it")
    if arguments.prefill == "full" and arguments.against is None:
        raise UsageError("--prefill full: expected --against, or the bundle is compared with itself; add it")
    check_windows_have_effect(arguments.sink_tokens, arguments.boundary_tokens, arguments.prefill != "full")


def _config(arguments: argparse.Namespace) -> EvalConfig:
    """Return the settings given, over the defaults."""
    from pop_export.evaluate import EvalConfig

    names = [name.replace("-", "_") for name in _INTEGERS] + ["prefill"]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return EvalConfig(**given, retrieval=not arguments.no_retrieval)


def _settings(arguments: argparse.Namespace, config: EvalConfig, model: Model) -> dict[str, Any]:
    """Return everything needed to repeat the run."""
    import dataclasses

    return {
        "dir": str(arguments.dir),
        "data": [str(path) for path in arguments.data],
        "against": arguments.against,
        "revision": arguments.revision,
        "threads": model.sessions.threads,
        "ep": model.sessions.target.ep,
        "device": model.sessions.target.device,
        "cuda_graphs": model.sessions.target.cuda_graphs,
        "nodes_by_provider": model.sessions.nodes_by_provider,
        **dataclasses.asdict(config),
    }


def summary(evaluation: Evaluation) -> str:
    """Return the figures as a table for people."""
    rows = [("", "KL mean", "KL p95", "top-1", "ppl full", "ppl pruned", "greedy run")]
    for name, quality in [*evaluation.files.items(), ("overall", evaluation.overall)]:
        rows.append(
            (
                Path(name).name, f"{quality.kl_mean_nats:.4f}", f"{quality.kl_p95_nats:.4f}",
                f"{quality.top1_agreement:.1%}", f"{quality.perplexity_full:.2f}",
                f"{quality.perplexity_pruned:.2f}", f"{quality.common_greedy_tokens:.1f}",
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        figures = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *figures]))
    retrieval = evaluation.retrieval
    if retrieval is not None:
        lines.append(f"retrieval of a key in {retrieval.length_tokens} tokens ({retrieval.format}): "
                     f"{retrieval.accuracy_full:.0%} full, {retrieval.accuracy_pruned:.0%} pruned")  # fmt: skip
        lines += [
            f"  at {result.depth:.0%}: {result.accuracy_full:.0%} full, {result.accuracy_pruned:.0%} pruned; "
            f"log-probability of the key {result.key_logprob_full:.2f} and {result.key_logprob_pruned:.2f}"
            for result in retrieval.depths
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
