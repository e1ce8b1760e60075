"""What report.json says about fits and damage, and which text damage is measured on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pop_export.calibration.corpus import Samples
from pop_export.damage import Damage, Protocol
from pop_export.plan_lab import Point
from pop_export.refit import FitRecord, PrefillFit
from pop_export.ridge import RIDGES
from pop_runtime.manifest import Windows


def measuring_text(samples: Samples, windows: Windows) -> tuple[dict[str, list[np.ndarray]], Protocol]:
    """Return the windows kept aside by source, the longest ones alone, and the protocol that fits their length.

    Three quarters of a window are the prompt, the rest the continuation: 384 and 128 of 512 tokens.
    """
    longest = max(len(window) for window in samples.held_out)
    by_source: dict[str, list[np.ndarray]] = {}
    for window, source in zip(samples.held_out, samples.held_out_sources, strict=True):
        if len(window) == longest:
            by_source.setdefault(source, []).append(window)
    continuation = max(1, longest // 4)
    return by_source, Protocol(longest - continuation, continuation, windows)


def fit_summary(fitted: PrefillFit, text: str, seconds: float) -> dict[str, Any]:
    """Return `refit` and `surrogate` of report.json: relative squared errors on fitting text and on text kept aside."""
    base = {"text": text, "ridges": list(RIDGES), "num_tokens": fitted.num_tokens, "seconds": seconds}
    refits = [record for record in fitted.records if record.projection != "surrogate"]
    surrogates = [record for record in fitted.records if record.projection == "surrogate"]
    without = sorted(fitted.plan.skipped_layers - {record.layer for record in refits})
    return {
        "refit": {
            **base,
            "layers": [_record(record) for record in refits],
            "layers_without_projections": without,
            "tuning": None if fitted.tuning is None else dataclasses.asdict(fitted.tuning),
        },
        "surrogate": {**base, "layers": [_record(record) for record in surrogates]},
    }


def quality_summary(
    protocol: Protocol, damage: dict[str, Damage], curve: tuple[Point, ...], predicted_speedup: float, num_layers: int
) -> dict[str, Any]:
    """Return `quality` of report.json: damage and predicted speedup of the chosen plan, and of other ratios."""
    per_source = {source: _damage(value) for source, value in damage.items() if source != "all"}
    return {
        "protocol": dataclasses.asdict(protocol),
        "chosen": {**_damage(damage["all"]), "predicted_speedup": predicted_speedup, "per_source": per_source},
        "curve": [{"ratio": len(point.skipped_layers) / num_layers, **dataclasses.asdict(point)} for point in curve],
    }


def _damage(damage: Damage) -> dict[str, Any]:
    return dataclasses.asdict(damage)


def _record(record: FitRecord) -> dict[str, Any]:
    return dataclasses.asdict(record)
