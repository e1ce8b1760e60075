"""Print what each precision costs and keeps: bytes, KL to the checkpoint, and on request CPU time.

    python benchmarks/texts.py build/texts
    python benchmarks/precisions.py --model smollm2-135m --data build/texts/*.txt
    python benchmarks/precisions.py --model smollm2-135m --data build/texts/*.txt --times --rows int8 int4/rtn/64

A row is a precision of pop-export and, divided by slashes, its other settings: a method, a block size, symmetric or
asymmetric. The graph is traced once and quantised for each row by the code that pop-export runs; no layer is skipped.
`--graphs` adds decode graphs of other builders whose inputs and outputs are named as ours: those of onnxruntime-genai.

- bytes: of weights.bin, over those of the fp32 parameters.
- KL weights: mean over positions of KL(checkpoint || PyTorch with the weights as they are stored), nats. The export
  proves that the graphs with exact kernels equal that model.
- KL run: the same for the written graphs as users run them: the prompt at full depth, then a token at a time.
- ms: CPU time of the process, one thread, minimum over rounds: prompt of 512 tokens through the graph that reads
  prompts (nothing skipped), through the decode graph, and a step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from pop_export.bundle import save_graphs
from pop_export.calibration.corpus import calibration_samples
from pop_export.calibration.fitting_text import fitting_corpus, fitting_text
from pop_export.checkpoint import Checkpoint, load_checkpoint
from pop_export.config import ExportConfig, Quantizer
from pop_export.decoder import max_positions_of
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.fuse import prepare_attention
from pop_export.precision import store_precision
from pop_export.precision_damage import mean_kl
from pop_export.reference import PrefillPlan
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest, Plan, Windows
from pop_runtime.sequence import Sequence as TokenSequence
from pop_runtime.sessions import DECODE_ENTRIES, SessionPair, open_pair, open_session

DEFAULT_ROWS = ("fp32", "int8", "int8-dynamic", "int4", "int4/rtn", "int4/symmetric", "int4/k_quant", "int4/hqq")
CONTEXT_TOKENS, SCORED_TOKENS = 384, 128  # as pop-eval
TIMED_TOKENS, ROUNDS, STEPS = 512, 3, 16


@dataclass(frozen=True)
class Figures:
    """One row of the table; NaN where nothing was measured."""

    name: str
    bytes_ratio: float
    kl_weights: float
    kl_run: float
    seconds: float  # to quantise
    prefill_ms: float = float("nan")
    full_ms: float = float("nan")
    step_ms: float = float("nan")


def main() -> None:
    """Quantise, measure and print row after row."""
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = load_checkpoint(arguments.model)
    configs = {row: row_config(arguments.model, row) for row in arguments.rows}
    windows = _windows(checkpoint, arguments.data, arguments.windows)
    reference = [model_scores(checkpoint.model, ids) for ids in windows]
    config = ExportConfig(arguments.model, Path("unused"))
    text = fitting_text(config, checkpoint, fitting_corpus(config, checkpoint)).fitting
    decode = build_decode_graph(checkpoint.model, kv_layout(checkpoint.model))
    print(f"{len(windows)} windows: {CONTEXT_TOKENS} tokens of prompt, {SCORED_TOKENS} scored", flush=True)
    print("| row | stored as | bytes | KL weights | KL run | quantising s | prefill | full prefill | step ms |")
    print("|---" * 9 + "|")
    for row, config in configs.items():
        found = measure(
            checkpoint,
            config,
            decode.clone(),
            windows,
            reference,
            text,
            threads=arguments.threads,
            timed=arguments.times,
        )
        numbers = (found.kl_weights, found.kl_run, found.seconds, found.prefill_ms, found.full_ms, found.step_ms)
        cells = " | ".join("" if np.isnan(number) else f"{number:.4g}" for number in numbers)
        print(f"| {row} | {found.name} | {found.bytes_ratio:.4f} | {cells} |", flush=True)
    for path in arguments.graphs:
        kl_run, ratio = foreign_figures(checkpoint, path, windows, reference, arguments.threads)
        print(f"| {path.parent.name} | another builder's | {ratio:.4f} |  | {kl_run:.4g} |  |  |  |  |", flush=True)


def foreign_figures(
    checkpoint: Checkpoint, path: Path, windows: Sequence[list[int]], reference: Sequence[np.ndarray], threads: int
) -> tuple[float, float]:
    """Return KL as it runs and bytes over fp32 parameters of a decode graph with inputs and outputs named as ours."""
    session = open_session(path, threads, DECODE_ENTRIES)
    manifest = _manifest(checkpoint, "another", "float32")
    sessions = SessionPair(session, session, threads)
    kl_run = mean_kl(reference, [_bundle_scores(sessions, manifest, ids) for ids in windows])
    parameters = 4 * sum(parameter.numel() for parameter in checkpoint.model.parameters())
    return kl_run, sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")) / parameters


def row_config(model: str, row: str) -> ExportConfig:
    """Return the settings that a row such as `int4/gptq/64/asymmetric` stands for."""
    precision, *rest = row.split("/")
    settings: dict[str, Any] = {"precision": precision}
    for word in rest:
        if word.isdigit():
            settings["block_size"] = int(word)
        elif word in ("symmetric", "asymmetric"):
            settings["symmetric"] = word == "symmetric"
        elif word in get_args(Quantizer):
            settings["quantizer"] = word
        else:
            raise SystemExit(f"--rows {row}: {word} is no method, block size or symmetry")
    return ExportConfig(model=model, out=Path("unused"), **settings)


def measure(
    checkpoint: Checkpoint,
    config: ExportConfig,
    decode: ir.Model,
    windows: Sequence[list[int]],
    reference: Sequence[np.ndarray],
    text: Sequence[np.ndarray],
    *,
    threads: int,
    timed: bool = False,
) -> Figures:
    """Return the figures of one row.

    Args:
        checkpoint: the model.
        config: the row's settings.
        decode: its decode graph, quantised in place.
        windows: token ids to score, CONTEXT_TOKENS and more each.
        reference: `model_scores` of them.
        text: windows of token ids that weights may be fitted to.
        threads: of ONNX Runtime.
        timed: measure CPU times as well.
    """
    model = checkpoint.model
    prefill = cut_prefill_graph(decode, PrefillPlan(frozenset()))
    started = time.monotonic()
    stored = store_precision(config, model, decode, prefill, text)
    seconds = time.monotonic() - started
    prepare_attention(decode, prefill, max_positions_of(model))
    with stored.twin(model):
        kl_weights = mean_kl(reference, [model_scores(model, ids) for ids in windows])
    manifest = _manifest(checkpoint, stored.name, stored.kv_dtype)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_graphs(folder, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights)
        parameters = 4 * sum(parameter.numel() for parameter in model.parameters())
        ratio = (folder / manifest.weights).stat().st_size / parameters
        sessions = open_pair(folder, manifest, threads)
        kl_run = mean_kl(reference, [_bundle_scores(sessions, manifest, ids) for ids in windows])
        times = _times(folder, manifest) if timed else ()
    return Figures(stored.name, ratio, kl_weights, kl_run, seconds, *times)


def _windows(checkpoint: Checkpoint, files: Sequence[str], num_windows: int) -> list[list[int]]:
    length = CONTEXT_TOKENS + SCORED_TOKENS
    found: list[list[int]] = []
    for file in files:
        text = calibration_samples(checkpoint.tokenizer, data=(file,), num_samples=num_windows, length=length, seed=7)
        found += [ids.tolist() for ids in text.ids]
    return found


@torch.no_grad()
def model_scores(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities before each token behind the context, [S - CONTEXT_TOKENS, V]."""
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: (args[0][:, CONTEXT_TOKENS - 1 : -1],))
    try:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        handle.remove()
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def _bundle_scores(sessions: SessionPair, manifest: Manifest, ids: list[int]) -> np.ndarray:
    """Return the same from the decode graph: the prompt at once, then a token at a time."""
    sequence = TokenSequence(sessions, allocate_cache(manifest, 1, len(ids)))
    pieces = [ids[:CONTEXT_TOKENS], *([token] for token in ids[CONTEXT_TOKENS:-1])]
    rows = [sequence.feed(piece, "decode") for piece in pieces]
    logits = torch.from_numpy(np.stack([row for row in rows if row is not None]))
    return torch.log_softmax(logits, dim=-1).numpy()


def _times(folder: Path, manifest: Manifest) -> tuple[float, float, float]:
    """Return CPU ms of a prompt through either graph and of a step behind it."""
    sessions = open_pair(folder, manifest, 1)
    cache = allocate_cache(manifest, 1, TIMED_TOKENS + STEPS)
    ids = [5] * TIMED_TOKENS
    prefill = min(_cpu_ms(lambda: TokenSequence(sessions, cache).feed(ids, "prefill")) for _ in range(ROUNDS))
    full = min(_cpu_ms(lambda: TokenSequence(sessions, cache).feed(ids, "decode")) for _ in range(ROUNDS))
    sequence = TokenSequence(sessions, cache)
    sequence.feed(ids, "decode")
    step = min(_cpu_ms(lambda: sequence.feed([5], "decode")) for _ in range(STEPS))
    return prefill, full, step


def _cpu_ms(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return (time.process_time() - started) * 1e3


def _manifest(checkpoint: Checkpoint, precision: str, kv_dtype: str) -> Manifest:
    """Return as much of a manifest as running the pair takes."""
    kv_layers = kv_layout(checkpoint.model)
    return Manifest(
        model=checkpoint.source,
        vocab_size=checkpoint.model.get_output_embeddings().weight.shape[0],
        max_positions=max_positions_of(checkpoint.model),
        plan=Plan(num_layers=len(kv_layers), skipped_layers=(), chosen_by="user"),
        windows=Windows(0, 1),
        kv_dtype=kv_dtype,
        kv_layers=kv_layers,
        precision=precision,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        pad_token_id=checkpoint.pad_token_id,
        tokenizer=None,
        chat_template=None,
        generation_config=None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", nargs="+", required=True, help=".txt files that nothing was fitted on")
    parser.add_argument("--rows", nargs="*", default=DEFAULT_ROWS, metavar="ROW", help="default: %(default)s")
    parser.add_argument(
        "--graphs", nargs="+", type=Path, default=(), metavar="FILE", help="decode graphs of other builders"
    )
    parser.add_argument("--windows", type=int, default=2, help="of 512 tokens per file (default %(default)s)")
    parser.add_argument("--times", action="store_true", help="measure CPU time as well")
    parser.add_argument("--threads", type=int, default=2, help="of all but the timed runs (default %(default)s)")
    return parser


if __name__ == "__main__":
    main()
