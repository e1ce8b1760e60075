"""`report.json`: what was exported, how, what was proven and what was measured."""

from __future__ import annotations

import dataclasses
import json
import resource
import shlex
import sys
from pathlib import Path
from typing import Any

from pop_export.calibration.record import Calibration
from pop_export.checkpoint import Checkpoint
from pop_export.config import ExportConfig
from pop_export.precision_damage import PrecisionDamage
from pop_export.speed import Speed
from pop_export.verify import Check, Verification
from pop_runtime.manifest import Manifest

NOT_FLAGS = ("calibration_batch",)  # settings of `ExportConfig` that only Python can change
OFF_FLAGS = {"symmetric": "asymmetric"}  # what says no to a setting, where that is not --no-SETTING


def build_report(
    config: ExportConfig,
    checkpoint: Checkpoint,
    calibration: Calibration,
    manifest: Manifest,
    verification: Verification,
    last_layer: Check,
    speed: Speed,
    damage: PrecisionDamage | None,
    folder: Path,
    stage_seconds: dict[str, float],
) -> dict[str, Any]:
    """Return everything that report.json holds; sizes in bytes, times in seconds or milliseconds as named."""
    return {
        "model": checkpoint.source,
        "plan": dataclasses.asdict(manifest.plan),
        "windows": dataclasses.asdict(manifest.windows),
        "precision": manifest.precision,
        "calibration": _calibration_summary(calibration, reused=config.calibration is not None),
        "verification": {
            "num_prompt_tokens": verification.num_prompt_tokens,
            "num_steps": verification.num_steps,
            "checks": [_check_summary(check) for check in (*verification.checks, last_layer)],
        },
        "speed": dataclasses.asdict(speed),
        "precision_damage": None if damage is None else dataclasses.asdict(damage),
        "size": _sizes(folder, manifest, checkpoint),
        "export": {"stage_seconds": stage_seconds, "peak_memory_bytes": peak_memory_bytes()},
        "settings": _settings(config),
        "command_line": command_line(config),
        "tools": manifest.tools,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON that people can read."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def peak_memory_bytes() -> int:
    """Return the most resident memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _settings(config: ExportConfig) -> dict[str, Any]:
    """Return every setting needed to repeat the export."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(config).items()}


def command_line(config: ExportConfig) -> str:
    """Return the `pop-export` command that repeats the export: what differs from the defaults."""
    words = ["pop-export"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name in NOT_FLAGS:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--{OFF_FLAGS.get(field.name, f'no-{flag}')}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def _check_summary(check: Check) -> dict[str, Any]:
    return {**dataclasses.asdict(check), "passed": check.passed}


def _calibration_summary(calibration: Calibration, reused: bool) -> dict[str, Any]:
    return {
        "corpus": calibration.corpus,
        "num_samples": calibration.num_samples,
        "length_tokens": calibration.length_tokens,
        "fisher": calibration.fisher,
        "seed": calibration.seed,
        "reused": reused,
        "prefill_importance": calibration.prefill.importance,
        "prefill_standard_error": calibration.prefill.standard_error,
        "decode_importance": calibration.decode.importance,
        "decode_standard_error": calibration.decode.standard_error,
    }


def _sizes(folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the bytes of the weights file and its ratio to the fp32 parameters, tied ones counted once."""
    weights = (folder / manifest.weights).stat().st_size
    parameters = 4 * sum(parameter.numel() for parameter in checkpoint.model.parameters())
    return {
        "weights_bytes": weights,
        "fp32_parameter_bytes": parameters,
        "weights_per_fp32_parameters": weights / parameters,
        "graph_bytes": sum((folder / name).stat().st_size for name in (manifest.prefill_graph, manifest.decode_graph)),
    }
