"""What each part of the method is worth: damage with one part changed at a time, at several ratios, in PyTorch.

    python benchmarks/texts.py build/texts
    python benchmarks/ablation.py --model smollm2-135m --data build/texts/*.txt

Protocol: windows of 384 prompt tokens and 128 scored ones, spread over each text; KL of the full model's next-token
distribution to the variant's, in nats, and how often both find the same token likeliest. The last layers are skipped,
as many as the ratio says. Re-fits are those of pop-export, on its default text, which holds none of the texts measured.
Progress goes to stderr, a Markdown table (or --json) to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from pop_export.calibration.fitting_text import fitting_corpus, fitting_text
from pop_export.checkpoint import Checkpoint, load_checkpoint
from pop_export.config import ExportConfig
from pop_export.damage import DamageMeter, Protocol
from pop_export.decoder import cache_argument, decoder_layers
from pop_export.evaluation.text import Document, cut_windows, read_text
from pop_export.full_pass import FullPass
from pop_export.layer_stack import LayerStack
from pop_export.progress import progress
from pop_export.projections import find_kv_projections
from pop_export.reference import PrefillPlan, pruned
from pop_export.refit import fit_prefill, modules_by_layer
from pop_runtime.manifest import Windows

PlanKey = tuple[float, bool, int | None]  # ratio, re-fitted, the sink it is fitted for


@dataclass(frozen=True)
class Variant:
    """One way to leave layers out."""

    name: str
    refit: bool = False
    sink_tokens: int = 0
    boundary_tokens: int = 1  # 0: the last prompt token is pruned too
    has_kv: bool = True  # False: in skipped layers decode sees nothing of the pruned positions
    both_stages: bool = False  # True: the layers are gone for prompt and response alike

    @property
    def is_plan(self) -> bool:
        """Whether a prefill plan with windows says it all, as an export does."""
        return self.boundary_tokens > 0 and self.has_kv and not self.both_stages


SINK, BOUNDARY = ExportConfig.sink_tokens, ExportConfig.boundary_tokens  # what pop-export sets by default
VARIANTS = (
    Variant("POP as published"),
    Variant("without KV projections", has_kv=False),
    Variant("without boundary", boundary_tokens=0),
    Variant("skipped in both stages", both_stages=True),
    Variant(f"POP + windows {SINK}/{BOUNDARY}", sink_tokens=SINK, boundary_tokens=BOUNDARY),
    Variant("POP + refit", refit=True),
    Variant(f"POP + refit + windows {SINK}/{BOUNDARY}", refit=True, sink_tokens=SINK, boundary_tokens=BOUNDARY),
)


@contextmanager
def head_of_last(model: PreTrainedModel, num_positions: int) -> Iterator[None]:
    """Let the head see so many last positions only: a large vocabulary over a prompt takes gigabytes."""
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: (args[0][:, -num_positions:],))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def past_hidden(model: PreTrainedModel, layers: frozenset[int]) -> Iterator[None]:
    """Let these layers attend to nothing that was in the cache before."""

    def hide(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs["attention_mask"].clone()  # [1, 1, S, T], added to the scores
        mask[..., : mask.shape[-1] - mask.shape[-2]] = torch.finfo(mask.dtype).min
        return args, {**kwargs, "attention_mask": mask}

    modules = decoder_layers(model)
    handles = [modules[layer].register_forward_pre_hook(hide, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def continuation_logits(
    model: PreTrainedModel, ids: Tensor, context: int, plan: PrefillPlan, variant: Variant
) -> np.ndarray:
    """Return the logits that predict each token after the prompt, [C, V] float32.

    Args:
        model: eager attention.
        ids: [context + C] int64.
        context: prompt tokens.
        plan: what is left out; no layers for the full model.
        variant: how.
    """
    num_scored = len(ids) - context
    cache, num_cached, logits = DynamicCache(config=model.config), 0, torch.empty(0)

    def feed(stop: int, is_pruned: bool) -> None:
        nonlocal num_cached, logits
        if stop <= num_cached:
            return
        positions = torch.arange(num_cached, stop)[None]  # [1, S]
        hidden = past_hidden(model, plan.skipped_layers) if not variant.has_kv and not is_pruned else nullcontext()
        with pruned(model, plan) if is_pruned else hidden, head_of_last(model, num_scored):
            out = model(
                input_ids=ids[None, num_cached:stop], position_ids=positions,
                **{cache_argument(model): cache, "use_cache": True},
            )  # fmt: skip
        logits, num_cached = torch.cat([logits.reshape(-1, out.logits.shape[-1]), out.logits[0].float()]), stop

    if plan.skipped_layers and not variant.both_stages:
        feed(variant.sink_tokens, False)
        feed(context - variant.boundary_tokens, True)
    feed(len(ids) - 1, variant.both_stages and bool(plan.skipped_layers))
    return logits[-num_scored:].numpy()  # [C, V]


def fitted_plans(
    checkpoint: Checkpoint, stack: LayerStack, ratios: Sequence[float], config: ExportConfig
) -> dict[PlanKey, PrefillPlan]:
    """Return plans with re-fitted K and V projections and no surrogates, one for each ratio and sink of `VARIANTS`.

    A fit is made for its sink: run with another it does twice the damage.
    """
    text = fitting_text(config, checkpoint, fitting_corpus(config, checkpoint))
    projections = find_kv_projections(checkpoint.model)
    modules = modules_by_layer(projections)
    passes = [FullPass(stack, windows, modules, keep=range(len(stack))) for windows in (text.fitting, text.judging)]
    plans = {}
    for ratio in ratios:
        for sink in sorted({variant.sink_tokens for variant in VARIANTS if variant.refit}):
            print(f"re-fitting for {ratio:.0%}, sink {sink} ...", file=sys.stderr, flush=True)
            fit = fit_prefill(stack, projections, *passes, tail(ratio, len(stack)), surrogate=False, sink_tokens=sink)
            plans[ratio, True, sink] = fit.plan
    return plans


def tail(ratio: float, num_layers: int) -> frozenset[int]:
    """Return the last layers, as many as the ratio says."""
    return frozenset(range(num_layers - round(ratio * num_layers), num_layers))


def document_of(path: Path, checkpoint: Checkpoint) -> Document:
    """Return a text as the checkpoint's tokenizer reads it."""
    tokenizer = checkpoint.tokenizer
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    ids = tokenizer(read_text(path), add_special_tokens=False, verbose=False)["input_ids"]
    return Document(str(path), np.array(ids, np.int64), tuple(whole[: whole.index(bare[0])]))


def compared(full: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return mean KL(full || other) in nats and the share of equal likeliest tokens, for logits [C, V] float32.

    In float32, summed in float64: within 1e-6 of `pop_export.evaluation.scores`, at half the memory.
    """
    p, q = (torch.from_numpy(logits).log_softmax(-1) for logits in (full, other))
    divergence = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)  # [C]
    return float(divergence.mean()), float((p.argmax(-1) == q.argmax(-1)).double().mean())


def measure_plans(
    stack: LayerStack, texts: dict[str, np.ndarray], context: int, plans: dict[PlanKey, PrefillPlan]
) -> list[dict[str, Any]]:
    """Return rows as `measure_others` does, of the variants that are plans: by the exporter's own fast measurement."""
    continuation = next(iter(texts.values())).shape[1] - context
    largest = max(variant.sink_tokens for variant in VARIANTS)
    meter = DamageMeter(stack, {name: list(rows) for name, rows in texts.items()},
                        Protocol(context, continuation, Windows(largest, 1)))  # fmt: skip
    found = []
    for (ratio, refit, sink), plan in plans.items():
        for variant in VARIANTS:
            if variant.is_plan and variant.refit == refit and sink in (variant.sink_tokens, None):
                damage = meter.measure(plan, Windows(variant.sink_tokens, variant.boundary_tokens))
                of_files = {name: (value.kl_mean_nats, value.top1_agreement) for name, value in damage.items()}
                everything = of_files.pop("all")
                found.append(_row(ratio, variant, everything, of_files))
    return found


def measure_others(
    model: PreTrainedModel, texts: dict[str, np.ndarray], context: int, plans: dict[PlanKey, PrefillPlan]
) -> list[dict[str, Any]]:
    """Return one row per ratio and variant that is no plan, by the model's own forward pass.

    Each has `ratio`, `variant`, `kl_mean_nats`, `top1_agreement` and `kl_by_file`.
    """
    tasks = [(ratio, variant) for ratio, refit, _ in plans if not refit for variant in VARIANTS if not variant.is_plan]
    found: dict[tuple[float, Variant], dict[str, list[tuple[float, float]]]] = {task: {} for task in tasks}
    with progress("measuring", len(tasks) * sum(map(len, texts.values()))) as advance:
        for name, window in ((name, torch.tensor(row)) for name, rows in texts.items() for row in rows):
            full = continuation_logits(model, window, context, PrefillPlan(frozenset()), VARIANTS[0])
            for ratio, variant in tasks:
                other = continuation_logits(model, window, context, plans[ratio, False, None], variant)
                found[ratio, variant].setdefault(name, []).append(compared(full, other))
                advance(1)
    rows = []
    for (ratio, variant), results in found.items():
        means = {name: tuple(np.mean(of_file, axis=0).tolist()) for name, of_file in results.items()}
        everything = np.mean([result for of_file in results.values() for result in of_file], axis=0).tolist()
        rows.append(_row(ratio, variant, everything, means))
    return rows


def _row(
    ratio: float, variant: Variant, everything: Sequence[float], of_files: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    return {
        "ratio": ratio,
        "variant": variant.name,
        "kl_mean_nats": everything[0],
        "top1_agreement": everything[1],
        "kl_by_file": {name: result[0] for name, result in of_files.items()},
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table: variants down, ratios across, mean KL and agreement in each cell."""
    ratios = sorted({row["ratio"] for row in rows})
    lines = ["| variant | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |", "|---" * (len(ratios) + 1) + "|"]
    names = {row["variant"] for row in rows}
    for variant in (variant.name for variant in VARIANTS if variant.name in names):
        of_variant = {row["ratio"]: row for row in rows if row["variant"] == variant}
        cells = (
            f"{of_variant[ratio]['kl_mean_nats']:.3f} ({of_variant[ratio]['top1_agreement']:.1%})" for ratio in ratios
        )
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--data", nargs="+", type=Path, required=True)
    add("--ratios", nargs="+", type=float, default=[1 / 6, 1 / 3, 1 / 2])
    add("--windows", type=int, default=2, help="per file")
    add("--context", type=int, default=384)
    add("--continuation", type=int, default=128)
    add("--no-refit", action="store_true", help="leave the variants with refit out")
    add("--seed", type=int, default=0)
    add("--threads", type=int)
    add("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    checkpoint = load_checkpoint(arguments.model)
    length = arguments.context + arguments.continuation
    texts = {
        path.stem: cut_windows(document_of(path, checkpoint), length, arguments.windows, arguments.seed)
        for path in arguments.data
    }
    stack = LayerStack(checkpoint.model)
    plans: dict[PlanKey, PrefillPlan] = {
        (ratio, False, None): PrefillPlan(tail(ratio, len(stack))) for ratio in arguments.ratios
    }
    if not arguments.no_refit:
        config = ExportConfig(arguments.model, Path("unused"), seed=arguments.seed)
        plans |= fitted_plans(checkpoint, stack, arguments.ratios, config)
    rows = measure_plans(stack, texts, arguments.context, plans)
    print(markdown(rows), file=sys.stderr, flush=True)
    rows += measure_others(checkpoint.model, texts, arguments.context, plans)
    print(json.dumps(rows) if arguments.json else markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
