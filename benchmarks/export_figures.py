"""Print the figures of an export beside their targets: parity, speed, size, time and memory.

    python benchmarks/export_figures.py --model smollm2-135m [--bundle DIR] [--rounds 9]

Exports with default settings, without refit or windows being of importance to these figures, unless `--bundle` names a
finished bundle of the same model. Times are medians of rounds in which full and pruned take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from pop_export import ExportConfig, export
from pop_export.bundle import save_graphs
from pop_export.checkpoint import load_checkpoint
from pop_export.graph.build import build_decode_graph
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.fuse import prepare_attention
from pop_export.layer_plan import parse_layers
from pop_export.reference import PrefillPlan
from pop_export.speed import measure_speed
from pop_export.verify import NUM_STEPS, prompt_length, verify
from pop_runtime.manifest import Manifest, read_manifest
from pop_runtime.sessions import open_pair

SCATTERED = "5,12-14,18,20-29"


def main() -> None:
    """Export or take a bundle, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.bundle or export(ExportConfig(model=arguments.model, out=Path(scratch) / "bundle")).folder
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        manifest = read_manifest(folder)
        speed = measure_speed(open_pair(folder, manifest, None), manifest, rounds=arguments.rounds)
        rows = [(check["name"], f"{check['largest_difference']:.1e}", "<= 1e-3")
                for check in report["verification"]["checks"]]  # fmt: skip
        if manifest.plan.num_layers == 30:
            rows.append((f"pair, {SCATTERED}", f"{scattered_difference(manifest, arguments.model):.1e}", "<= 1e-3"))
    importance = report["calibration"]["prefill_importance"]
    skipped = len(manifest.plan.skipped_layers)
    rows += [
        (f"prefill at {speed.num_prompt_tokens} tokens, {skipped} of {len(importance)} skipped: full / pruned",
         f"{speed.full_prefill_ms:.0f} / {speed.pruned_prefill_ms:.0f} ms = {speed.prefill_speedup:.2f}", ">= 1.38"),
        ("decode, ms per token", f"{speed.decode_ms_per_token:.1f}", ""),
        ("weights.bin / fp32 parameters", f"{report['size']['weights_per_fp32_parameters']:.4f}", "<= 1.05"),
        ("whole export, s", f"{sum(report['export']['stage_seconds'].values()):.0f}", "<= 360"),
        ("peak memory, GB", f"{report['export']['peak_memory_bytes'] / 1e9:.2f}", "<= 4"),
        ("prefill importance of the last layer", f"{importance[-1]:.1e}", "0"),
        ("prefill importance, mean of the deep third / of the rest",
         f"{mean(importance[-len(importance) // 3:]):.2f} / {mean(importance[:-len(importance) // 3]):.2f}", "below"),
    ]  # fmt: skip
    for row in rows:
        print("| {} | {} | {} |".format(*row))
    print(f"| export, seconds per stage | {report['export']['stage_seconds']} | |")


def scattered_difference(manifest: Manifest, model: str) -> float:
    """Return the largest logit difference of a pair that skips layers all over the model, against its twin."""
    checkpoint = load_checkpoint(model)
    skipped = parse_layers(SCATTERED, 30)
    plan = PrefillPlan(frozenset(skipped))
    manifest = dataclasses.replace(manifest, segments=())  # they are those of the bundle's plan
    ids = checkpoint.tokenizer("The sky is blue because " * 60)["input_ids"]
    ids = ids[: prompt_length(checkpoint.model) + NUM_STEPS]
    decode = build_decode_graph(checkpoint.model, manifest.kv_layers)  # a written one is fused and cannot be cut
    prefill = cut_prefill_graph(decode, plan)
    prepare_attention(decode, prefill, manifest.max_positions)
    graphs = {manifest.decode_graph: decode, manifest.prefill_graph: prefill}
    with tempfile.TemporaryDirectory() as folder:
        save_graphs(Path(folder), graphs, manifest.weights)
        sessions = open_pair(Path(folder), manifest, None)
        found = verify(sessions, manifest, checkpoint.model, plan, ids)
    return max(check.largest_difference for check in found.checks)


def mean(values: list[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
