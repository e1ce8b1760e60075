"""The order of an export, once: each stage is one function in one file, and its result feeds the next."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from pop_export.ablation import ablation_summary
from pop_export.bundle import Bundle, check_space, check_target, save_graphs
from pop_export.calibration.calibrate import calibrate
from pop_export.calibration.corpus import Samples, calibration_samples
from pop_export.calibration.fitting_text import FittingText, fitting_corpus, fitting_text
from pop_export.calibration.record import Calibration, read_calibration, write_calibration
from pop_export.checkpoint import Checkpoint, load_checkpoint, save_tokenizer
from pop_export.config import ExportConfig
from pop_export.cost import prompt_work
from pop_export.decoder import max_positions_of, num_layers_of
from pop_export.genai_config import genai_config
from pop_export.graph.attention_form import NUM_TOKENS
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.fuse import prepare_attention
from pop_export.half_precision import require_finite
from pop_export.plan_lab import PlanLab, TrialSettings
from pop_export.precision import HALF, StoredPrecision, least_bytes, require_precision, store_precision, traced_weights
from pop_export.precision_damage import OriginalScores, original_scores, precision_damage, require_small_damage
from pop_export.quality import MeasuringText, fit_summary, measuring_text, quality_summary
from pop_export.reference import PrefillPlan
from pop_export.refit import PrefillFit
from pop_export.report import build_report, write_json
from pop_export.report_html import write_html
from pop_export.samples import sample_answers
from pop_export.segmented import add_segments, segments_summary
from pop_export.selection import Choice, check_plan, choose_plan
from pop_export.speed import DECODE_STEPS, measure_speed
from pop_export.verify import (
    NUM_STEPS,
    Check,
    Verification,
    prompt_length,
    require_passed,
    verify,
    verify_last_layer,
    verify_quantized,
)
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import KvLayer, Manifest, Plan, describe_files, write_manifest
from pop_runtime.model import Model
from pop_runtime.sessions import SessionPair, open_graphs, open_pair
from pop_runtime.staging import staged_folder
from pop_runtime.threads import visible_cores

TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
NUM_HELD_OUT = 8  # windows of calibration text kept aside, to verify with
MIN_POSITIONS = max(NUM_TOKENS, DECODE_STEPS + 1)  # of what a model is tried and timed with


@dataclass
class _Stopwatch:
    """Seconds of each stage, announced on stderr as they begin."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        print(f"{what} ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 2)


def export(config: ExportConfig) -> Bundle:
    """Export a model as `config` says and return the finished bundle.

    Raises:
        UsageError: the settings contradict the model or the target.
        ModelError: the checkpoint is not fit for export, or the bundle cannot be written.
        BackendError: ONNX Runtime cannot run the precision here.
        GateError: what was built differs from PyTorch beyond tolerance; nothing is written.
    """
    check_target(config.out, config.force)
    require_precision(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    watch = _Stopwatch()
    with watch.stage("load", f"loading {config.model}"):
        checkpoint = load_checkpoint(
            config.model,
            revision=config.revision,
            offline=config.offline,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
        )
        _check_positions(checkpoint)
        check_plan(config, num_layers_of(checkpoint.model))
        saved = _saved_calibration(config, checkpoint)
        kv_layers = kv_layout(checkpoint.model)
        check_space(config.out, least_bytes(config, checkpoint.model))
    with watch.stage("text", "gathering text"):
        samples = _samples(config, checkpoint)
        prompt = _verification_text(checkpoint, samples)
        corpus = fitting_corpus(config, checkpoint)
        aside = measuring_text(corpus, config.windows)
        _check_measuring(config, aside)
    # before calibration and fits: code that cannot be traced is found within seconds, not after minutes
    with watch.stage("build", "building the decode graph"), traced_weights(config, checkpoint.model):
        if config.precision in HALF:
            require_finite(checkpoint.model, prompt)
        decode = build_decode_graph(checkpoint.model, kv_layers, config.dialect)
    with watch.stage("calibrate", "calibrating"):
        calibration = saved or _calibration(config, checkpoint, samples)
    with watch.stage("own_text", "letting the model write text to fit on"):
        text = fitting_text(config, checkpoint, corpus)
    choice, fitted, measured = _planned(config, checkpoint, kv_layers, calibration, text, aside, watch)
    original = _original_scores(config, checkpoint, fitted.plan, aside)
    with watch.stage("cut", "cutting the prefill graph"):
        prefill = cut_prefill_graph(decode, fitted.plan)
    with watch.stage("precision", "storing weights"):
        stored = store_precision(config, checkpoint.model, decode, prefill, text.fitting)
        prepare_attention(decode, prefill, max_positions_of(checkpoint.model))
    with staged_folder(config.out, "bundle") as folder:
        manifest = _manifest(config, checkpoint, kv_layers, choice, fitted, stored)
        with watch.stage("write", "writing graphs and weights"):
            # decode first: its weights then lie where they lie for any plan that re-fits the layers it skips
            fusions = save_graphs(
                folder, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights
            )
        with watch.stage("verify", "verifying against PyTorch"):
            whole = open_graphs(folder, manifest, config.threads or visible_cores())
            verification, last_layer = _verified(
                folder, whole, manifest, (decode, prefill), checkpoint, fitted.plan, stored, prompt
            )
            require_passed([*verification.checks, last_layer])
            segmented = add_segments(folder, manifest, (decode, prefill), fitted.plan, prompt, whole)
            require_passed(segmented.checks)
            manifest = segmented.manifest
            del whole
        with watch.stage("measure", "measuring speed and damage"):
            sessions = open_pair(folder, manifest, config.threads)
            speed = measure_speed(sessions, manifest)
            damage = None if original is None else precision_damage(sessions, manifest, original)
            if damage is not None and config.precision == "int8-dynamic":
                require_small_damage(damage)
        manifest = _with_texts(folder, manifest, checkpoint)
        with watch.stage("sample", "generating sample answers"):
            answers = sample_answers(Model(folder, manifest, sessions))
        report = build_report(
            config, checkpoint, calibration, manifest, verification, last_layer, speed, damage, folder, watch.seconds
        )
        report |= measured | {
            "samples": answers,
            "quantization": stored.summary(),
            "fusion": {name: dataclasses.asdict(fusions[name]) for name in fusions},
            "segments": segments_summary(segmented),
        }
        manifest = _finish(folder, manifest, calibration, report)
    return Bundle(config.out, manifest, report)


def _check_positions(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a model too short for the tokens that any model is tried with."""
    num_positions = max_positions_of(checkpoint.model)
    if num_positions < MIN_POSITIONS:
        raise ModelError(
            f"{checkpoint.source['source']}: expected a model of at least {MIN_POSITIONS} positions, found "
            f"{num_positions} (config); give one that reads longer prompts"
        )


def _planned(
    config: ExportConfig,
    checkpoint: Checkpoint,
    kv_layers: tuple[KvLayer, ...],
    calibration: Calibration,
    text: FittingText,
    aside: MeasuringText,
    watch: _Stopwatch,
) -> tuple[Choice, PrefillFit, dict[str, Any]]:
    """Return the layers to skip, the plan fitted for them, and what report.json says of both.

    The full model's passes over the texts, a gigabyte or more, end with this function.
    """
    with watch.stage("select", "choosing layers"):
        settings = TrialSettings(config.refit, config.uses_surrogates, aside.protocol)
        lab = PlanLab(checkpoint.model, kv_layers, text.fitting, text.judging, aside.by_source, settings)
        if not aside.shows_damage:  # a curve would be flat, and tuning judged by nothing
            config = dataclasses.replace(config, curve=False, tune_steps=0)
        choice = choose_plan(config, lab, calibration.prefill.importance)
    with watch.stage("refit", "fitting the prefill to the full model"):
        fitted = lab.fit(choice.skipped_layers, config.tune_steps, config.seed)
    with watch.stage("quality", "measuring damage"):
        measured = _measured(lab, choice, fitted, aside.shows_damage)
    return choice, fitted, {**fit_summary(fitted, text.description, watch.seconds["refit"]), **measured}


def _check_measuring(config: ExportConfig, aside: MeasuringText) -> None:
    """Refuse windows that cover the prompts which damage is measured on, where damage decides; else say what follows.

    Raises:
        UsageError: layers are to be chosen by damage, and no plan would show any.
    """
    if aside.shows_damage:
        return
    windows = config.windows
    found = (
        f"--sink-tokens {windows.sink_tokens} --boundary-tokens {windows.boundary_tokens}: expected some of the "
        f"{aside.protocol.context_tokens} tokens of the prompts that damage is measured on between them, found none"
    )
    if config.searches or config.max_kl is not None:
        raise UsageError(
            f"{found}; lower --boundary-tokens, give longer texts (--calibration-data, --refit-length), or name the "
            "layers with --prune-layers"
        )
    print(f"note: damage is not measured: {found}", file=sys.stderr)


def _measured(lab: PlanLab, choice: Choice, fitted: PrefillFit, shows_damage: bool) -> dict[str, Any]:
    """Return what report.json says of the damage that the plan does, None where it cannot be seen, and of its work."""
    full, pruned = prompt_work(lab.costs, fitted.plan.skipped_layers, fitted.plan.surrogates)
    work = {"full": dataclasses.asdict(full), "pruned": dataclasses.asdict(pruned)}
    if not shows_damage:
        return {"quality": None, "ablation": None, "work": work}
    damage, predicted = lab.meter.measure(fitted.plan), lab.predicted_speedup(fitted.plan)
    quality = quality_summary(lab.settings.protocol, damage, choice.curve, predicted, len(choice.order))
    return {"quality": quality, "ablation": ablation_summary(lab, fitted, damage["all"]), "work": work}


def _samples(config: ExportConfig, checkpoint: Checkpoint) -> Samples:
    """Return the calibration text as token windows, no longer than the model allows."""
    return calibration_samples(
        checkpoint.tokenizer,
        data=config.calibration_data,
        num_samples=config.calibration_samples,
        length=min(config.calibration_length, max_positions_of(checkpoint.model)),
        seed=config.seed,
        num_held_out=NUM_HELD_OUT,
        offline=config.offline,
    )


def _saved_calibration(config: ExportConfig, checkpoint: Checkpoint) -> Calibration | None:
    """Return the saved calibration that was asked for, None where there is to be a new one."""
    if config.calibration is None:
        return None
    return read_calibration(
        config.calibration, num_layers=num_layers_of(checkpoint.model), model_sha256=checkpoint.source["sha256"]
    )


def _calibration(config: ExportConfig, checkpoint: Checkpoint, samples: Samples) -> Calibration:
    """Return a new calibration."""
    return calibrate(
        checkpoint.model,
        samples,
        model_name=checkpoint.source["name"],
        model_sha256=checkpoint.source["sha256"],
        length=config.calibration_length,
        fisher=config.fisher,
        seed=config.seed,
        batch_size=config.calibration_batch,
    )


def _verification_text(checkpoint: Checkpoint, samples: Samples) -> list[int]:
    """Return token ids to verify with: kept-aside text, repeated where there is too little of it."""
    text = np.concatenate(samples.held_out or samples.ids)
    return np.resize(text, prompt_length(checkpoint.model) + NUM_STEPS).tolist()


def _original_scores(
    config: ExportConfig, checkpoint: Checkpoint, plan: PrefillPlan, aside: MeasuringText
) -> OriginalScores | None:
    """Return what the checkpoint predicts before its weights are changed; None where they are not."""
    if config.precision == "fp32":
        return None
    return original_scores(checkpoint.model, plan, aside.windows, aside.protocol)


def _verified(
    folder: Path,
    sessions: SessionPair,
    manifest: Manifest,
    graphs: tuple[ir.Model, ir.Model],
    checkpoint: Checkpoint,
    plan: PrefillPlan,
    stored: StoredPrecision,
    text: list[int],
) -> tuple[Verification, Check]:
    """Return the comparisons with PyTorch, which computes with the weights as the bundle stores them."""
    model, plan = checkpoint.model, stored.twin_plan(plan)
    with stored.twin(model):
        if stored.quantization is not None:
            return verify_quantized(folder, sessions, manifest, graphs, model, plan, text)
        checks = verify(sessions, manifest, model, plan, text)
        return checks, verify_last_layer(folder, sessions, manifest, graphs[0], model, text)


def _manifest(
    config: ExportConfig,
    checkpoint: Checkpoint,
    kv_layers: tuple[KvLayer, ...],
    choice: Choice,
    fitted: PrefillFit,
    stored: StoredPrecision,
) -> Manifest:
    """Return the manifest as far as it is known before the files exist."""
    model = checkpoint.model
    return Manifest(
        model=checkpoint.source,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_positions=max_positions_of(model),
        plan=Plan(
            num_layers=len(kv_layers),
            skipped_layers=choice.skipped_layers,
            chosen_by=choice.chosen_by,
            refitted_layers=fitted.refitted_layers,
            surrogate_layers=tuple(sorted(fitted.plan.surrogates)),
        ),
        windows=config.windows,
        kv_dtype=stored.kv_dtype,
        kv_layers=kv_layers,
        precision=stored.name,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        pad_token_id=checkpoint.pad_token_id,
        tokenizer=None,
        chat_template=None,
        generation_config=None,
        dialect=config.dialect,
        tools={tool: importlib.metadata.version(tool) for tool in TOOLS},
    )


def _with_texts(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """Write tokenizer, chat template and generation config, and return the manifest that names them."""
    written = save_tokenizer(checkpoint, folder)
    return dataclasses.replace(
        manifest,
        tokenizer=written.tokenizer,
        chat_template=written.chat_template,
        generation_config=written.generation_config,
        tokenizer_config="tokenizer_config.json" if (folder / "tokenizer_config.json").is_file() else None,
    )


def _finish(folder: Path, manifest: Manifest, calibration: Calibration, report: dict[str, object]) -> Manifest:
    """Write calibration and report, the manifest last, and return it complete."""
    write_calibration(folder / "calibration.json", calibration)
    write_json(folder / "report.json", report)
    genai = genai_config(manifest) if manifest.dialect == "ort" else None  # the only one that it was tried with
    if genai is not None:
        write_json(folder / "genai_config.json", genai)
    write_html(folder / "report.html", report)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    complete = dataclasses.replace(manifest, files=describe_files(folder, names))
    write_manifest(folder, complete)
    return complete
