"""Try prefill plans: fit each to the full model on some text, measure it on other text, and price it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel

from pop_export.cost import LayerCost, layer_costs, predicted_speedup
from pop_export.damage import DamageMeter, Protocol
from pop_export.full_pass import AnyPass, FullPass, JoinedPass
from pop_export.layer_stack import LayerStack
from pop_export.projections import find_kv_projections
from pop_export.reference import PrefillPlan
from pop_export.refit import PrefillFit, fit_prefill, modules_by_layer
from pop_export.text_run import resume_text
from pop_export.tune import tune
from pop_runtime.manifest import KvLayer

TRIAL_SHARE = 6  # plans are compared after fitting them on every sixth window
JUDGING_SHARE = 2  # and judging the fits on every second one


@dataclass(frozen=True)
class TrialSettings:
    """What a plan may use beside skipping layers."""

    refit: bool
    surrogate: bool
    protocol: Protocol


@dataclass(frozen=True)
class Point:
    """One plan on the curve of damage against speed."""

    skipped_layers: tuple[int, ...]
    surrogate_layers: tuple[int, ...]
    kl_mean_nats: float
    predicted_speedup: float
    kl_by_window_nats: tuple[float, ...] = ()  # mean of each window of text that it was measured on


@dataclass
class PlanLab:
    """Everything that trying plans shares: the full model's passes over the texts are made once.

    Args:
        model: causal LM; unchanged afterwards.
        kv_layers: shape of each layer's K and V.
        fitting: windows to fit on.
        judging: windows that fits are judged by; nothing is fitted on them.
        held_out: by source, windows of the protocol's length, to measure damage on; nor on these.
        settings: what plans may use.
    """

    model: PreTrainedModel
    kv_layers: Sequence[KvLayer]
    fitting: Sequence[np.ndarray]
    judging: Sequence[np.ndarray]
    held_out: Mapping[str, Sequence[np.ndarray]]
    settings: TrialSettings
    _points: dict[frozenset[int], Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stack = LayerStack(self.model)
        self.projections = find_kv_projections(self.model)
        self.costs: tuple[LayerCost, ...] = layer_costs(self.model, self.projections, self.kv_layers)
        self._modules = modules_by_layer(self.projections)
        self.meter = DamageMeter(self.stack, self.held_out, self.settings.protocol)
        every = range(len(self.stack))  # many fits share these
        self._trial_judging = FullPass(self.stack, self.judging[::JUDGING_SHARE], self._modules, every)
        self._trial = FullPass(self.stack, self.fitting[::TRIAL_SHARE], self._modules, every)

    def fit(self, skipped: Collection[int], tune_steps: int = 0, seed: int = 0) -> PrefillFit:
        """Return the plan fitted on all of the fitting text, its projections tuned in so many steps."""
        first, last = min(skipped, default=0), len(self.stack) - 1
        text = self._beside(self._trial, self.fitting, TRIAL_SHARE, keep=(first,))
        judging = self._beside(self._trial_judging, self.judging, JUDGING_SHARE)
        fitted = self._fit(text, judging, skipped)
        if not (tune_steps and fitted.plan.weights):
            return fitted
        windows = self.settings.protocol.windows
        runs = [
            resume_text(self.stack, ids, windows.sink_tokens, first, before.entered, after.left)
            for ids, before, after in zip(text.ids, text.states(first), text.states(last), strict=True)
        ]
        plan, tuning = tune(
            fitted.plan,
            runs,
            lambda plan: self.meter.measure(plan)["all"],
            steps=tune_steps,
            sink_tokens=windows.sink_tokens,
            boundary_tokens=windows.boundary_tokens,
            seed=seed,
        )
        return dataclasses.replace(fitted, plan=plan, tuning=tuning)

    def try_plan(self, skipped: Collection[int]) -> Point:
        """Return the plan's damage, fitted on a part of the text only, and its predicted speedup."""
        key = frozenset(skipped)
        if key not in self._points:
            fitted = self._fit(self._trial, self._trial_judging, skipped)
            kl = self.meter.kl_by_window(fitted.plan)
            self._points[key] = Point(
                tuple(sorted(key)),
                tuple(sorted(fitted.plan.surrogates)),
                float(kl.mean()),
                self.predicted_speedup(fitted.plan),
                tuple(kl.tolist()),
            )
        return self._points[key]

    def predicted_speedup(self, plan: PrefillPlan) -> float:
        """Return the full model's work on a prompt over that of a turn with this plan."""
        windows = self.settings.protocol.windows
        return predicted_speedup(self.costs, plan.skipped_layers, plan.surrogates, windows)

    def _beside(
        self, trial: FullPass, windows: Sequence[np.ndarray], share: int, keep: Container[int] = ()
    ) -> JoinedPass:
        """Return the pass over all windows, of which `trial` has every `share`-th and the other keeps some layers."""
        others = [window for index, window in enumerate(windows) if index % share]
        return JoinedPass([trial, FullPass(self.stack, others, self._modules, keep)])

    def _fit(self, text: AnyPass, judging: AnyPass, skipped: Collection[int]) -> PrefillFit:
        settings = self.settings
        return fit_prefill(
            self.stack,
            self.projections,
            text,
            judging,
            skipped,
            refit=settings.refit,
            surrogate=settings.surrogate,
            sink_tokens=settings.protocol.windows.sink_tokens,
        )
