"""Export a model in dialect `standard` without calibration, prove it, and time full against pruned prefill on the CPU.

    python benchmarks/standard_prefill.py smollm2-135m --layers 18,20-22,24-29 [--dialect ort] [--threads 2]

The K and V projections of skipped layers stay as they are: their fit changes no time. Speed is measured as every export
measures it (`pop_export.speed`), the difference to PyTorch as every export verifies it (`pop_export.verify`). CPU times
of one thread stand beside the wall times: they repeat on a busy machine, where those do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import get_args

import onnx
import torch
from device_pair import export_pair

from pop_export.calibration.corpus import calibration_samples
from pop_export.checkpoint import Checkpoint, load_checkpoint
from pop_export.config import Dialect
from pop_export.layer_plan import parse_layers
from pop_export.reference import PrefillPlan
from pop_export.speed import measure_speed
from pop_export.verify import NUM_STEPS, prompt_length, verify
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import MANIFEST_NAME, Manifest, describe_files, read_manifest, write_manifest
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import open_pair


def main() -> None:
    """Print one line for people and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--layers", required=True, metavar="LIST", help="skipped in prefill: 20-29 or 5,12-14")
    parser.add_argument("--dialect", choices=get_args(Dialect), default="standard")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-verify", action="store_true", help="time only")
    parser.add_argument("--folder", type=Path, help="keep the pair there; one that is there already is taken as it is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        manifest, checkpoint = exported(folder, arguments)
        skipped = manifest.plan.skipped_layers
        sessions = open_pair(folder, manifest, arguments.threads)
        speed = measure_speed(sessions, manifest)
        cpu_ms = cpu_times(folder, manifest, speed.num_prompt_tokens)
        result = {"dialect": arguments.dialect, "skipped_layers": skipped, "speed": dataclasses.asdict(speed)}
        result["cpu_ms"] = cpu_ms
        print(
            f"{arguments.dialect}: prefill of {speed.num_prompt_tokens} tokens {speed.full_prefill_ms:.0f} ms full, "
            f"{speed.pruned_prefill_ms:.0f} ms pruned: {speed.prefill_speedup:.2f} x; a step "
            f"{speed.decode_ms_per_token:.1f} ms; CPU time of one thread {cpu_ms['decode']:.0f} ms full, "
            f"{cpu_ms['prefill']:.0f} ms pruned: {cpu_ms['decode'] / cpu_ms['prefill']:.2f} x",
            flush=True,
        )
        if not arguments.no_verify:
            for graph in (manifest.prefill_graph, manifest.decode_graph):
                onnx.checker.check_model(str(folder / graph), full_check=True)
                proto = onnx.load(folder / graph, load_external_data=False)
                onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
            checkpoint = checkpoint or load_checkpoint(arguments.model, offline=True)
            model = checkpoint.model
            num_tokens = prompt_length(model) + NUM_STEPS
            samples = calibration_samples(checkpoint.tokenizer, num_samples=1, length=num_tokens, seed=0)
            plan = PrefillPlan(frozenset(skipped))
            checks = verify(sessions, manifest, model, plan, samples.ids[0].tolist()).checks
            for check in checks:
                print(
                    f"{check.name}: {check.largest_difference:.1e}, largest logit {check.largest_logit:.3g}", flush=True
                )
            result["checks"] = [dataclasses.asdict(check) for check in checks]
    print(json.dumps(result))


def cpu_times(folder: Path, manifest: Manifest, num_tokens: int) -> dict[str, float]:
    """Return the CPU time in ms of a prefill through each graph with one thread, minima over three."""
    pair, ids = open_pair(folder, manifest, 1), [7] * num_tokens
    cache = allocate_cache(manifest, 1, num_tokens)
    found = {"decode": float("inf"), "prefill": float("inf")}
    for _ in range(3):
        for stage in found:
            started = time.process_time()
            Sequence(pair, cache).feed(ids, "prefill" if stage == "prefill" else "decode")
            found[stage] = min(found[stage], (time.process_time() - started) * 1e3)
    return found


def exported(folder: Path, arguments: argparse.Namespace) -> tuple[Manifest, Checkpoint | None]:
    """Return the manifest of the pair in a folder, and the checkpoint if the pair had to be made from it."""
    if (folder / MANIFEST_NAME).is_file():
        return read_manifest(folder), None
    checkpoint = load_checkpoint(arguments.model, offline=True)
    skipped = parse_layers(arguments.layers, checkpoint.model.config.num_hidden_layers)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = export_pair(checkpoint.model, folder, torch.float32, arguments.dialect, skipped)
    names = (manifest.prefill_graph, manifest.decode_graph, manifest.weights)
    manifest = dataclasses.replace(manifest, files=describe_files(folder, names))
    write_manifest(folder, manifest)
    return manifest, checkpoint


if __name__ == "__main__":
    main()
