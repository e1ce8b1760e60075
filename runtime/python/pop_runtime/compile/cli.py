"""`pop-compile`: arguments in, an engine and one summary out."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pop_runtime.command import run_command
from pop_runtime.errors import UsageError
from pop_runtime.providers import PROVIDERS, Shapes, Target
from pop_runtime.version import add_version_flag

if TYPE_CHECKING:
    from pop_runtime.engine import Engine
    from pop_runtime.manifest import Manifest

DEFAULT_PROMPT_LENGTHS = (1, 512, 4096)
DEFAULT_MAX_SEQ_LEN = 4096
EXAMPLES = """\
examples:
  pop-compile out/smollm2 --ep cpu                                  optimise once, load faster: pop-run --engine
  pop-compile out/llama --ep tensorrt --precision fp16 --prompt-lengths 1,512,2048 --max-seq-len 4096
  pop-run out/llama --ep tensorrt --prompt "..."                    finds the engine by itself

exit codes: 0 done, 1 stdout cannot be written, 2 usage, 3 bundle, 4 provider or device missing or
the build failed, 5 no finite numbers
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)

    def work() -> None:
        with os.fdopen(os.dup(2), "w", buffering=1) as progress:  # while a graph is built stderr goes into the log
            result = _run(arguments, lambda line: print(line, file=progress))
        print(json.dumps(result) if arguments.json else _summary(result))

    return run_command("pop-compile", work, "interrupted; nothing was written")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-compile", description="Build engines of a bundle on the machine that will run them.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("dir", type=Path, help="the bundle's folder")
    add("--ep", required=True, choices=tuple(PROVIDERS), help="execution provider")
    add("--device", type=int, default=0, metavar="N", help="which device of it (default 0)")
    add("--precision", metavar="P",
        help="let the provider compute in it, where it can be told: tensorrt fp16 or bf16, openvino fp32 or fp16 "
        "(default: the bundle's own)")  # fmt: skip
    add("--prompt-lengths", metavar="N,N,...",
        help="TensorRT: new tokens of one run; tuned for the middle one, taking up to the last "
        f"(default {','.join(map(str, DEFAULT_PROMPT_LENGTHS))}, as far as --max-seq-len allows)")  # fmt: skip
    add("--max-seq-len", type=int, metavar="N",
        help="TensorRT: capacity of the KV buffers "
        f"(default {DEFAULT_MAX_SEQ_LEN} or the model's positions)")  # fmt: skip
    add("--batch", type=int, metavar="N", help="TensorRT: most rows (default 1)")
    add("--force", action="store_true", help="build it again though it is there")
    add("--json", action="store_true", help="end stdout with one JSON object")
    add_version_flag(parser)
    return parser


def _run(arguments: argparse.Namespace, say: Any) -> dict[str, Any]:
    target = Target(arguments.ep, arguments.device)
    _check_precision(target, arguments.precision)
    from pop_runtime.compile.build import build_engine  # onnxruntime: not for --help or a typing error
    from pop_runtime.manifest import read_manifest, verify_files

    manifest = read_manifest(arguments.dir)
    shapes = chosen_shapes(arguments, manifest)
    verify_files(arguments.dir, manifest)
    engine, built = build_engine(arguments.dir, manifest, target, arguments.precision, shapes, arguments.force, say)
    return _result(engine, built)


def _check_precision(target: Target, precision: str | None) -> None:
    known = target.provider.precisions
    if precision is not None and precision not in known:
        expected = f"one of {', '.join(known)}" if known else "none: it computes in the bundle's own"
        raise UsageError(
            f"--precision: expected {expected} with --ep {target.ep}, found {precision}; pop-export --precision makes "
            "a bundle of another one"
        )


def chosen_shapes(arguments: argparse.Namespace, manifest: Manifest) -> Shapes | None:
    """Return the sizes to build for; None for providers whose engines take any.

    Raises:
        UsageError: they contradict each other or the model, or the provider has no use for them.
    """
    given = {
        "--prompt-lengths": arguments.prompt_lengths, "--max-seq-len": arguments.max_seq_len,
        "--batch": arguments.batch,
    }  # fmt: skip
    if not PROVIDERS[arguments.ep].needs_engine:
        for flag, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{flag}: expected none with --ep {arguments.ep}, whose engines take any size; drop it"
                )
        return None
    room = arguments.max_seq_len
    if room is None:
        room = min(DEFAULT_MAX_SEQ_LEN, manifest.max_positions)
    if not 2 <= room <= manifest.max_positions:
        raise UsageError(f"--max-seq-len: expected 2..{manifest.max_positions} (the model's positions), found {room}")
    batch = 1 if arguments.batch is None else arguments.batch
    if batch < 1:
        raise UsageError(f"--batch: expected at least 1, found {batch}")
    lengths: tuple[int, ...] = tuple(sorted({min(length, room) for length in DEFAULT_PROMPT_LENGTHS}))
    if arguments.prompt_lengths is not None:
        try:
            lengths = tuple(int(part) for part in arguments.prompt_lengths.split(","))
        except ValueError as error:
            raise UsageError(
                f"--prompt-lengths: expected whole numbers such as 1,512,4096, found {arguments.prompt_lengths!r}"
            ) from error
        if list(lengths) != sorted(set(lengths)) or lengths[0] < 1 or lengths[-1] > room:
            raise UsageError(
                f"--prompt-lengths: expected ascending lengths of 1..{room} (--max-seq-len), found "
                f"{arguments.prompt_lengths}"
            )
    return Shapes(lengths, room, batch)


def _result(engine: Engine, built: bool) -> dict[str, Any]:
    return {
        "folder": str(engine.folder),
        "built": built,
        "build_seconds": engine.build_seconds,
        "bytes": sum(entry.bytes for entry in engine.files.values()),
        "nodes_by_provider": engine.nodes_by_provider,
        "key": engine.facts.key,
    }


def _summary(result: dict[str, Any]) -> str:
    nodes = "; ".join(
        f"{graph}: {', '.join(f'{count} on {name}' for name, count in counts.items())}"
        for graph, counts in result["nodes_by_provider"].items()
    )
    how = f"built in {result['build_seconds']:.1f} s" if result["built"] else "already there"
    return f"{result['folder']}: {how}, {result['bytes'] / 1e6:.1f} MB; nodes: {nodes}"


if __name__ == "__main__":
    sys.exit(main())
