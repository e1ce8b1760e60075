"""Print the peak memory and the time of a prefill by prompt length and chunk: what the default chunk was chosen by.

    python benchmarks/prefill_memory.py BUNDLE [--tokens 1000 8000] [--chunks 64 128 256 512] [--prefill pop]

Each row runs in a process of its own, Linux only. Peak is the process's largest resident memory during the prefill,
weights included (the kernel's mark is reset before it), less the bytes of the KV cache that the prompt fills, which has
to grow. The bar: a long prompt's peak within 15 % of a short one's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import pop_runtime
from pop_runtime.manifest import Windows


def main() -> None:
    """Measure each pair of length and chunk in a new process, or the one that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--prefill", choices=("pop", "full"), default="pop")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--low-memory", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    print(
        "| chunk | tokens | peak MB, cache apart | over the shortest | prefill CPU s | tokens per CPU s |\n"
        + "|---" * 6
        + "|"
    )
    for chunk in arguments.chunks:
        shortest = None
        for tokens in arguments.tokens:
            command = [sys.executable, __file__, str(arguments.bundle), "--one", "--tokens", str(tokens)]
            command += ["--chunks", str(chunk), "--prefill", arguments.prefill]
            command += ["--threads", str(arguments.threads)]
            command += ["--low-memory"] if arguments.low_memory else []
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            shortest = shortest or found["peak_mb"]
            print(
                f"| {chunk} | {tokens} | {found['peak_mb']:.0f} | {found['peak_mb'] / shortest:.3f} | "
                f"{found['seconds']:.2f} | {tokens / found['seconds']:.0f} |",
                flush=True,
            )


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Return peak memory in MB, the cache apart, and seconds of one prefill."""
    model = pop_runtime.load(arguments.bundle, arguments.threads, low_memory=arguments.low_memory)
    num_tokens, chunk = arguments.tokens[0], arguments.chunks[0]
    ids = np.random.default_rng(0).integers(3, model.manifest.vocab_size, num_tokens).tolist()
    windows = model.manifest.windows
    warm = model.sequence(64)
    warm.append(ids[:48], windows=Windows(windows.sink_tokens, 1))  # both graphs have run: lazy set-up is over
    sequence = model.sequence(num_tokens)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    started = time.process_time()
    sequence.append(ids, arguments.prefill, chunk_tokens=chunk)
    seconds = time.process_time() - started
    cache_bytes = sum(buffer.nbytes for buffer in sequence.cache.buffers.values())
    return {"peak_mb": (_peak_bytes() - cache_bytes) / 1e6, "seconds": seconds}


def _peak_bytes() -> int:
    rows = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main()
