"""Measure the damage of prefill plans in PyTorch, over windows, on text that nothing was fitted on.

    python benchmarks/texts.py build/texts
    python benchmarks/plans.py --model smollm2-135m --data build/texts/*.txt --layers 20-29 --windows 0:1 4:32
    python benchmarks/plans.py --model smollm2-135m --data build/texts/*.txt --layers 5,12-14,18,20-29 --surrogate off

One line per plan and windows: mean KL and top-1 agreement per source, and predicted speedup. Plans are fitted on the
default text of pop-export, so figures are those of an export with `--tune-steps 0`; no graph is built. A plan is fitted
once, for the largest sink of the list: compare sinks by calls of their own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from pop_export.calibration.corpus import calibration_samples
from pop_export.calibration.fitting_text import fitting_corpus, fitting_text
from pop_export.checkpoint import Checkpoint, load_checkpoint
from pop_export.config import ExportConfig
from pop_export.cost import predicted_speedup
from pop_export.damage import CONTEXT_TOKENS, CONTINUATION_TOKENS, Damage, Protocol
from pop_export.graph.build import kv_layout
from pop_export.layer_plan import parse_layers
from pop_export.plan_lab import PlanLab, TrialSettings
from pop_runtime.manifest import Windows


def main() -> None:
    """Fit and measure each plan."""
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    config = ExportConfig(arguments.model, Path("unused"), refit=not arguments.no_refit, surrogate=arguments.surrogate)
    checkpoint = load_checkpoint(arguments.model)
    windows = [Windows(*map(int, item.split(":"))) for item in arguments.windows]
    lab = _lab(config, checkpoint, arguments, max(window.sink_tokens for window in windows))
    for layers in arguments.layers:
        started = time.monotonic()
        fitted = lab.fit(parse_layers(layers, len(lab.stack)))
        print(f"{layers}: fitted in {time.monotonic() - started:.0f} s on {fitted.num_tokens} tokens", flush=True)
        for window in windows:
            started = time.monotonic()
            damage = lab.meter.measure(fitted.plan, window)
            speedup = predicted_speedup(lab.costs, fitted.plan.skipped_layers, fitted.plan.surrogates, window)
            print(_line(window, damage, speedup, time.monotonic() - started), flush=True)


def _lab(config: ExportConfig, checkpoint: Checkpoint, arguments: argparse.Namespace, sink_tokens: int) -> PlanLab:
    """Return a lab that fits on the default text and measures on the given files."""
    text = fitting_text(config, checkpoint, fitting_corpus(config, checkpoint))
    length = CONTEXT_TOKENS + CONTINUATION_TOKENS
    held_out: dict[str, list[np.ndarray]] = {}
    for file in arguments.data:
        samples = calibration_samples(
            checkpoint.tokenizer, data=(file,), num_samples=arguments.samples, length=length, seed=7
        )
        held_out[Path(file).stem] = list(samples.ids)
    settings = TrialSettings(config.refit, config.uses_surrogates, Protocol(windows=Windows(sink_tokens, 1)))
    return PlanLab(checkpoint.model, kv_layout(checkpoint.model), text.fitting, text.judging, held_out, settings)


def _line(windows: Windows, damage: dict[str, Damage], speedup: float, seconds: float) -> str:
    figures = "  ".join(
        f"{source} {found.kl_mean_nats:.4f} {found.top1_agreement:.3f}" for source, found in damage.items()
    )
    return (
        f"  sink {windows.sink_tokens:2d} boundary {windows.boundary_tokens:2d}: {figures}  "
        f"predicted {speedup:.2f} x  ({seconds:.1f} s)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", nargs="+", required=True, help=".txt files")
    parser.add_argument("--layers", nargs="+", required=True, help="plans, as pop-export --prune-layers takes them")
    parser.add_argument("--windows", nargs="+", default=["0:1", "4:32"], help="sink:boundary")
    parser.add_argument("--samples", type=int, default=3, help="windows of 512 tokens per file")
    parser.add_argument("--no-refit", action="store_true")
    parser.add_argument("--surrogate", choices=("auto", "off"))
    parser.add_argument("--threads", type=int, default=2)
    return parser


if __name__ == "__main__":
    main()
