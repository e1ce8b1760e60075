"""What each part of the method is worth for the chosen plan, and what other windows would do to it."""

from __future__ import annotations

import dataclasses
from typing import Any

from pop_export.damage import Damage
from pop_export.plan_lab import PlanLab
from pop_export.reference import PrefillPlan
from pop_export.refit import PrefillFit
from pop_runtime.manifest import Windows

BOUNDARIES = (16, 32, 64, 128)  # tokens at the end of a prompt, compared beside the chosen number


def ablation_summary(lab: PlanLab, fitted: PrefillFit, exported: Damage) -> dict[str, Any]:
    """Return `ablation` of report.json: the damage of the chosen layers with parts of the method left out.

    All rows are measured on the text that `quality` is measured on; nothing is fitted anew. Fits are made for their
    sink, so it stays in every row that has them.

    Args:
        lab: measures.
        fitted: the chosen plan.
        exported: its damage under the windows that it is exported with.
    """
    plan, windows = fitted.plan, lab.settings.protocol.windows
    if not plan.skipped_layers:
        return {"variants": [], "windows": []}
    bare = PrefillPlan(plan.skipped_layers)
    num_prunable = lab.settings.protocol.context_tokens - windows.sink_tokens
    boundaries = {1, windows.boundary_tokens, *(size for size in BOUNDARIES if size < num_prunable)}
    by_boundary = {
        size: _figures(exported, windows)
        if size == windows.boundary_tokens
        else _measured(lab, plan, Windows(windows.sink_tokens, size))
        for size in sorted(boundaries)
    }
    variants = [
        {"name": "as published: the last token alone at full depth", **_measured(lab, bare, Windows(0, 1))},
        {"name": "windows alone", **_measured(lab, bare, windows)},
    ]
    if plan.weights or plan.surrogates:
        if fitted.tuning is not None and fitted.tuning.kept:
            untuned = _figures(fitted.tuning.before, windows)
            variants.append({"name": "fits as least squares leave them, and windows", **untuned})
        variants.append({"name": "fits alone", **by_boundary[1]})
        variants.append({"name": "fits and windows, as exported", **by_boundary[windows.boundary_tokens]})
    return {"variants": variants, "windows": list(by_boundary.values())}


def _measured(lab: PlanLab, plan: PrefillPlan, windows: Windows) -> dict[str, Any]:
    return _figures(lab.meter.measure(plan, windows)["all"], windows)


def _figures(damage: Damage, windows: Windows) -> dict[str, Any]:
    return {
        **dataclasses.asdict(windows),
        "kl_mean_nats": damage.kl_mean_nats,
        "top1_agreement": damage.top1_agreement,
        "num_positions": damage.num_positions,
    }
