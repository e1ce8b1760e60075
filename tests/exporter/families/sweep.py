"""Export a tiny model of every decoder family in transformers and write docs/families.md or docs/families-standard.md.

    python -m tests.exporter.families.sweep                  all that has no result yet, then the page
    python -m tests.exporter.families.sweep llama gpt_oss    these again
    python -m tests.exporter.families.sweep --page           the page alone
    python -m tests.exporter.families.sweep --dialect standard   in ONNX operators alone, with a page of its own

Results lie in build/families/<dialect>/<model type>.json; a run that was stopped goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import torch

from pop_export.config import Dialect
from pop_export.graph.attention_form import choose_attention
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.hf_folder import refuse_non_decoder
from pop_export.quiet import quiet_transformers
from pop_runtime.errors import PopError
from tests.exporter.families import proof
from tests.exporter.families.configs import COMMON_FAMILIES, as_checkpoint, causal_model_types, tiny_family_model
from tests.exporter.families.page import ATTENTION_OPERATOR, proven_families, write_page

RESULTS = Path("build/families")
TIME_LIMIT_S = 900
TEXT_PARTS = {"gemma3": "gemma3_text"}  # multimodal checkpoints that pop_export.multimodal takes the decoder out of


def prove_family(model_type: str, dialect: Dialect = "ort") -> dict[str, Any]:
    """Return the family's result: status "proven", "refused" or "failed", with figures or the reason."""
    result: dict[str, Any] = {"model_type": model_type, "architecture": "", "status": "failed"}
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
            refuse_non_decoder(Path(model_type), as_checkpoint(model_type))
            model = tiny_family_model(TEXT_PARTS.get(model_type, model_type))
            result["architecture"] = type(model).__name__
            exported = proof.export_pair(model, Path(folder), dialect=dialect)
            result |= _figures(exported)
    except PopError as error:
        return result | {"status": "refused", "reason": str(error)}
    except Exception as error:  # a family may fail in any way: that is what the sweep is for
        return result | {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    beyond = [
        f"{name} {result[name]:.1g}" for name in ("unpruned", "pruned", "batch") if result[name] > proof.TOLERANCE
    ]
    if beyond:
        return result | {"reason": f"beyond tolerance: {', '.join(beyond)}"}
    if result["pruning_effect"] <= 10 * proof.TOLERANCE:
        return result | {"reason": "blind: the pruned model gives the same logits as the full one"}
    return result | {"status": "proven"}


def _figures(exported: proof.Exported) -> dict[str, Any]:
    ids, form = proof.prompt_ids(), choose_attention(exported.model)
    return {
        "fused": form.fused,
        "operator": ATTENTION_OPERATOR[exported.manifest.dialect] in exported.decode_ops,
        "why_not_fused": form.reason,
        "windows": [window for window in form.windows if window],
        "unpruned": proof.prove_unpruned(exported, ids),
        "pruned": proof.prove_pruned(exported, ids),
        "batch": proof.prove_batch(exported, ids),
        "pruning_effect": proof.pruning_effect(exported, ids),
    }


def _window_counts(model_type: str) -> bool:
    """Return whether the model without its window would be told apart from it."""
    name = TEXT_PARTS.get(model_type, model_type)
    with quiet_transformers():
        models = (tiny_family_model(name), tiny_family_model(name, sliding_window=256))
    ids = proof.prompt_ids()
    right, without = (proof.true_logits(model, ids) for model in models)
    return proof.relative(without, right) > 10 * proof.TOLERANCE


def _run(model_type: str, dialect: Dialect) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    started = time.monotonic()
    result = prove_family(model_type, dialect)
    result["seconds"] = round(time.monotonic() - started, 1)
    (RESULTS / dialect / f"{model_type}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result), flush=True)


def sweep(model_types: list[str], num_processes: int, dialect: Dialect) -> None:
    """Prove each family in a process of its own: memory, time and crashes stay there."""
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    warm = tiny_family_model("llama")
    build_decode_graph(warm, kv_layout(warm), dialect)  # the translations are then loaded in every process
    (RESULTS / dialect).mkdir(parents=True, exist_ok=True)
    waiting, running = list(model_types), {}
    while waiting or running:
        while waiting and len(running) < num_processes:
            name = waiting.pop(0)
            process = context.Process(target=_run, args=(name, dialect))
            process.start()
            running[name] = (process, time.monotonic())
        for name, (process, started) in list(running.items()):
            process.join(0.2)
            if process.is_alive() and time.monotonic() - started > TIME_LIMIT_S:
                process.kill()
            elif not process.is_alive():
                if process.exitcode:
                    result = {"model_type": name, "status": "failed", "reason": f"ended with {process.exitcode}"}
                    (RESULTS / dialect / f"{name}.json").write_text(json.dumps(result))
                del running[name]


def _order(model_type: str) -> int:
    """Return where a family stands in the sweep: those people ask for first."""
    return COMMON_FAMILIES.index(model_type) if model_type in COMMON_FAMILIES else len(COMMON_FAMILIES)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--page", action="store_true", help="write the page from the results there are")
    parser.add_argument("--dialect", choices=get_args(Dialect), default="ort")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    folder = RESULTS / arguments.dialect
    if not arguments.page:
        # what dialect `ort` refuses is refused for the model's sake, before a dialect is asked for
        candidates = causal_model_types() if arguments.dialect == "ort" else proven_families()
        missing = [name for name in candidates if not (folder / f"{name}.json").exists()]
        sweep(arguments.model_types or sorted(missing, key=_order), arguments.processes, arguments.dialect)
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    for result in results:
        if result["status"] == "proven" and result["windows"] and not _window_counts(result["model_type"]):
            result |= {"status": "failed", "reason": "blind: the same model without its window gives the same logits"}
    write_page(results, arguments.dialect)
    print(Counter(result["status"] for result in results))
    for result in results:
        if result["status"] == "failed":
            print(result["model_type"], result["reason"])


if __name__ == "__main__":
    main()
