"""Prove the pair on a GPU in one run of under 8 minutes, and print what docs/results.md says of it.

    python benchmarks/gpu_check.py                      on an NVIDIA GPU: pip install 'pop-export[gpu,export]'
    python benchmarks/gpu_check.py --device cpu --tiny  the same logic where there is none

- tiny families and SmolLM2 on the CUDA provider against PyTorch on the same GPU, and again with decode steps that are
  recorded and replayed (CUDA graphs) where the graph copies nothing between CPU and GPU in a run;
- device memory of both graphs against that of one;
- time of a full and of a pruned prefill, of a step, and of a replayed step.

Exit code 1 if a comparison is beyond tolerance; the targets of memory and speed are printed beside what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import transformers
from device_copies import copied_values
from device_pair import compare, export_pair, median_ms, open_on, synchronize
from transformers import AutoModelForCausalLM, PreTrainedModel

from pop_export.checkpoint import load_checkpoint
from pop_runtime.errors import PopError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest
from pop_runtime.providers import CPU, Target
from pop_runtime.sequence import Sequence as Tokens
from pop_runtime.sessions import DECODE_ENTRIES, open_session

TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=300, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**TINY, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **TINY, head_dim=16, sliding_window=8, layer_types=["sliding_attention"] * 3 + ["full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**TINY, partial_rotary_factor=0.75),
}
# CUDA's GroupQueryAttention knows 16 bits only, a CPU no bfloat16.
CASES = {
    "cuda": (("float32", "standard"), ("float16", "ort"), ("bfloat16", "ort"), ("float16", "standard")),
    "cpu": (("float32", "standard"), ("float32", "ort"), ("float16", "ort")),
}
SKIPPED_TINY, SKIPPED_SHARE = (1, 2), 1 / 3
MEMORY_TARGET, NUM_PROMPT, ROUNDS, NUM_STEPS = 1.10, 1024, 5, 8


def main() -> int:
    """Run the parts and print a table each; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(CASES), default="cuda")
    parser.add_argument("--model", default="smollm2-135m", help="what --tiny leaves out")
    parser.add_argument("--tiny", action="store_true", help="tiny models only")
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    arguments = parser.parse_args()
    target = CPU if arguments.device == "cpu" else Target(arguments.device)
    torch.manual_seed(0)
    try:
        checks = check_families(arguments.families, target, arguments.device)
        model = tiny_model("llama") if arguments.tiny else load_checkpoint(arguments.model).model
        checked, measured = check_model(model, target, arguments.device)
    except PopError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return error.exit_code
    failed = [check["case"] for check in (*checks, *checked) if not check["passed"]]
    print(f"failed: {', '.join(failed) or 'none'}")
    print(json.dumps({"device": _device_name(arguments.device), "checks": [*checks, *checked], "model": measured}))
    return 1 if failed else 0


@torch.no_grad()
def tiny_model(family: str) -> PreTrainedModel:
    """Return a tiny model of a family with every parameter re-drawn."""
    model = AutoModelForCausalLM.from_config(
        FAMILIES[family](), attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.3 if parameter.ndim > 1 else parameter + noise * 0.2)
    return model


def check_families(families: Sequence[str], target: Target, device: str) -> list[dict[str, Any]]:
    """Return the comparison of every tiny family in every case of the device."""
    print("| model | numbers | dialect | largest difference / largest logit | replayed | tolerance |")
    print("|---" * 6 + "|")
    ids = torch.randint(3, 300, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    checks = []
    for family in families:
        model = tiny_model(family)
        for case in CASES[device]:
            with tempfile.TemporaryDirectory() as folder:
                checks.append(_check(family, model, Path(folder), case, SKIPPED_TINY, ids, target, device)[0])
    return checks


def check_model(
    model: PreTrainedModel, target: Target, device: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return comparisons of one model in 16 bits, and its memory and times in each case."""
    num_layers = model.config.num_hidden_layers
    skipped = tuple(range(num_layers - max(1, round(SKIPPED_SHARE * num_layers)), num_layers))
    ids = torch.randint(3, 300, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    checks, measured = [], []
    for case in [case for case in CASES[device] if case[0] != "float32"]:
        with tempfile.TemporaryDirectory() as folder:
            name = type(model).__name__
            check, manifest = _check(name, model, Path(folder), case, skipped, ids, target, device)
            checks.append(check)
            measured.append({"case": check["case"], **_measure(Path(folder), manifest, target, device)})
    print("\n| case | one MB | pair MB | pair / one | full ms | pruned ms | full / pruned | step ms | replayed ms |")
    print("|---" * 9 + "|")
    for row in measured:
        numbers = ("one_mb", "pair_mb", "pair_over_one", "full_ms", "pruned_ms", "speedup", "step_ms", "replayed_ms")
        print(f"| {row['case']} | " + " | ".join(_shown(row[number]) for number in numbers) + " |")
    print(f"target of pair / one: <= {MEMORY_TARGET}")
    return checks, measured


def _check(
    name: str, model: PreTrainedModel, folder: Path, case: tuple[str, Any], skipped: tuple[int, ...], ids: list[int],
    target: Target, device: str,
) -> tuple[dict[str, Any], Manifest]:  # fmt: skip
    dtype = getattr(torch, case[0])
    manifest = export_pair(model, folder, dtype, case[1], skipped)
    found = compare(open_on(folder, manifest, target), manifest, model, dtype, ids, device)
    replayed = _replayed(folder, manifest, target)
    again = found if replayed is None else compare(
        open_on(folder, manifest, replayed), manifest, model, dtype, ids, device
    )  # fmt: skip
    shown = "-" if replayed is None else f"{again.largest:.1e}"
    print(f"| {name} | {case[0]} | {case[1]} | {found.largest:.1e} | {shown} | {found.tolerance:.0e} |", flush=True)
    row = {"case": f"{name} {case[0]} {case[1]}", "largest": found.largest, "tolerance": found.tolerance}
    return {**row, "replayed": again.largest, "passed": found.passed and again.passed}, manifest


def _replayed(folder: Path, manifest: Manifest, target: Target) -> Target | None:
    """Return the target with recorded steps; None where they cannot be recorded: a value is copied in every run."""
    if target.provider.records_runs is None or copied_values(ir.load(folder / manifest.decode_graph)):
        return None
    return dataclasses.replace(target, cuda_graphs=True)


def _measure(folder: Path, manifest: Manifest, target: Target, device: str) -> dict[str, float | None]:
    """Return the memory of one session and of the pair (None on a CPU: benchmarks/session_memory.py), and times."""
    before = _used_mb(device)
    alone = open_session(folder / manifest.decode_graph, 1, DECODE_ENTRIES, target, manifest)
    one = _used_mb(device)
    del alone
    freed = _used_mb(device)
    pair = open_on(folder, manifest, target)
    both = _used_mb(device)
    num_tokens = min(NUM_PROMPT, manifest.max_positions - 16)
    cache = allocate_cache(manifest, 1, num_tokens + 16, pair.place)
    ids = [7] * num_tokens
    full = median_ms(lambda: Tokens(pair, cache).feed(ids, "decode"), device, ROUNDS)
    pruned = median_ms(lambda: Tokens(pair, cache).feed(ids, "prefill"), device, ROUNDS)
    sequence = Tokens(pair, cache)
    sequence.feed(ids, "prefill")
    step = median_ms(lambda: sequence.feed([7], "decode"), device, NUM_STEPS)
    replayed_ms, replayed = None, _replayed(folder, manifest, target)
    if replayed is not None:
        del sequence, pair
        sequence = Tokens(open_on(folder, manifest, replayed), cache)
        sequence.feed(ids, "prefill")
        replayed_ms = median_ms(lambda: sequence.feed([7], "decode"), device, NUM_STEPS)
    memory = {"one_mb": None, "pair_mb": None, "pair_over_one": None}
    if before is not None and one is not None and freed is not None and both is not None:
        memory = {"one_mb": one - before, "pair_mb": both - freed, "pair_over_one": (both - freed) / (one - before)}
    times = {"full_ms": full, "pruned_ms": pruned, "speedup": full / pruned, "step_ms": step}
    return {**memory, **times, "replayed_ms": replayed_ms}


def _used_mb(device: str) -> float | None:
    """Return the memory in use on the GPU, by whoever."""
    if device == "cpu":
        return None
    synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def _device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())
