"""`pop-bench`: what a bundle costs in time and memory, beside other engines in the same run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pop_runtime.bench.output import plot, plot_endings, table, write_csv
from pop_runtime.bench.peers import PEERS
from pop_runtime.command import run_command
from pop_runtime.errors import BackendError, UsageError
from pop_runtime.flags import add_target_flags
from pop_runtime.providers import Target
from pop_runtime.version import add_version_flag

_EXAMPLES = """\
examples:
  pop-bench out/smollm2
  pop-bench out/smollm2 --prompt-lengths 512,1024,2048 --new-tokens 64 --repeat 5 --threads 2 --plot first-token.png
  pop-bench out/smollm2 --peers transformers=./hf,onnxruntime-genai=./genai-int4 --json --csv samples.csv
  pop-bench out/smollm2 --boundary-tokens 16                 fewer tokens at full depth; pop-eval says what it costs

A peer is given with what it loads; the package and, if it has none, the way to make its model are named when they are
missing. Peers run on the CPU whatever --ep is. That all compute the same model is shown by their greedy answers.

exit codes: 0 done, 1 stdout cannot be written, 2 usage, 3 bundle, 4 an engine that does not run
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; an error a user can cause is one line on stderr."""
    arguments = _parser().parse_args(argv)
    return run_command("pop-bench", lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="pop-bench", description="Measure time to first token, time per token and memory of a bundle.",
        epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("dir", type=Path, help="the bundle's folder")
    add("--prompt-lengths", metavar="N,N,...", default="512,1024,2048", help="in tokens (default %(default)s)")
    add("--new-tokens", type=int, metavar="N", default=64, help="tokens of each answer (default %(default)s)")
    add("--repeat", type=int, metavar="N", default=5, help="rounds that count, after one to warm up (default 5)")
    add("--threads", type=int, metavar="N", help="of every engine (default: the cores this process may use)")
    add("--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: time of the one thread, for a machine that others use (default wall)")  # fmt: skip
    add("--prefill", metavar="KIND,...", default="pop,full", help="pop, full or both (default %(default)s)")
    add("--sink-tokens", type=int, metavar="N", help="first tokens read in full (default: the bundle's)")
    add("--boundary-tokens", type=int, metavar="N", help="last prompt tokens read in full (default: the bundle's)")
    add("--peers", metavar="NAME=PATH,...", default="", help=f"other engines and their models: {', '.join(PEERS)}")
    add("--low-memory", action="store_true", help="as for pop-run")
    add_target_flags(parser)
    add("--csv", type=Path, metavar="FILE", help="write every sample")
    add("--plot", type=Path, metavar="FILE", help="draw the time to first token over the prompt length")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add_version_flag(parser)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    """Check, measure, show."""
    from pop_runtime.bench.measure import Settings, measure  # here, so that --help needs no onnxruntime

    _check_files(arguments)
    settings = Settings(
        folder=arguments.dir,
        prompt_lengths=_lengths(arguments.prompt_lengths),
        num_new=arguments.new_tokens,
        num_rounds=arguments.repeat,
        threads=arguments.threads,
        prefills=tuple(part.strip() for part in arguments.prefill.split(",")),
        peers=_peers(arguments.peers),
        low_memory=arguments.low_memory,
        target=Target(arguments.ep, arguments.device, arguments.cuda_graphs),
        compiled=arguments.engine,
        clock=arguments.clock,
        sink_tokens=arguments.sink_tokens,
        boundary_tokens=arguments.boundary_tokens,
    )
    report, samples = measure(settings, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        print(json.dumps(report) if arguments.json else table(report), flush=True)  # first: a file may fail even now
    finally:  # and so may stdout
        if arguments.csv is not None:
            with _writing("--csv", arguments.csv):
                write_csv(arguments.csv, samples)
        if arguments.plot is not None:
            with _writing("--plot", arguments.plot):
                plot(arguments.plot, report)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse files that could not be written when all is measured, and leave those that are there as they are."""
    if arguments.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise BackendError("--plot: expected the package matplotlib, found none; pip install matplotlib")
        known, ending = plot_endings(), arguments.plot.suffix.removeprefix(".").lower()
        if ending not in known:
            raise UsageError(f"--plot {arguments.plot}: expected a name that ends in one of {', '.join(known)}")
    for flag, path in (("--csv", arguments.csv), ("--plot", arguments.plot)):
        if path is not None:
            with _writing(flag, path):
                was_there = path.exists()
                path.open("ab").close()
                if not was_there:
                    path.unlink()


@contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{flag} {path}: expected a file that can be written, found: {error.strerror}; choose another"
        ) from error


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--prompt-lengths: expected numbers such as 512,1024, found {text!r}") from error


def _peers(text: str) -> tuple[tuple[str, Path | None], ...]:
    """Return the name of each peer with the path given for it."""
    given = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    return tuple((name, Path(path) if path else None) for name, _, path in given)


if __name__ == "__main__":
    sys.exit(main())
