"""Fit what prefill uses in place of skipped layers, in closed form: their K and V projections, and linear surrogates.

One walk through the layers, front to back, all calibration text at once: the full model gives the targets, the pruned
pass the features as they really arrive. A skipped layer costs the pruned pass its K and V projections and no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from pop_export.full_pass import AnyPass, FullState
from pop_export.layer_stack import Calls, LayerStack, StopLayer, watched
from pop_export.projections import Projection, output_axis
from pop_export.reference import PrefillPlan, Surrogate
from pop_export.ridge import Fitted, Moments, fit
from pop_export.tune import Tuning

# X^T X of the features of one layer and text, by where they lie: K, V and the surrogate mostly read the same ones.
_Grams = dict[tuple[int, bool], np.ndarray]


@dataclass(frozen=True)
class FitRecord:
    """How one fit went: relative squared errors before and after, and whether it is used."""

    layer: int
    projection: str  # "key", "value" or "surrogate"
    ridge: float
    error_before: float
    error_after: float
    held_out_before: float
    held_out_after: float
    kept: bool  # False: no gain on text kept aside, so the original stands


@dataclass(frozen=True)
class PrefillFit:
    """A prefill plan with all that was fitted for it, and the record of each fit."""

    plan: PrefillPlan
    records: tuple[FitRecord, ...]
    num_tokens: int
    tuning: Tuning | None = None  # None: the projections are those of the fits

    @property
    def refitted_layers(self) -> tuple[int, ...]:
        """Return the skipped layers of which K or V is re-fitted, ascending."""
        return tuple(sorted({r.layer for r in self.records if r.kept and r.projection != "surrogate"}))


@dataclass
class _Features:
    """What reached the modules of one skipped layer in the pruned pass, of one batch."""

    inputs: dict[str, Tensor]  # [B, S, F] by module
    outputs: dict[str, Tensor]  # [B, S, N], by the original weights


@dataclass
class _Walk:
    """One text on its way through the layers."""

    full: AnyPass
    pruned: list[Tensor] = field(default_factory=list)  # per batch [B, S, E]: what enters the current layer
    features: list[_Features] = field(default_factory=list)


def modules_by_layer(projections: Iterable[Projection]) -> dict[int, set[str]]:
    """Return the names of the modules that make K and V, per layer."""
    found: dict[int, set[str]] = {}
    for projection in projections:
        found.setdefault(projection.layer, set()).add(projection.module)
    return found


@torch.no_grad()
def fit_prefill(
    stack: LayerStack,
    projections: Sequence[Projection],
    fitting: AnyPass,
    held_out: AnyPass,
    skipped_layers: Iterable[int],
    *,
    refit: bool = True,
    surrogate: bool = True,
    sink_tokens: int = 0,
) -> PrefillFit:
    """Return the plan that skips these layers, with K and V projections and surrogates fitted to the full model.

    Args:
        stack: the model's layers.
        projections: from `find_kv_projections`.
        fitting: text to fit on; its modules are `modules_by_layer(projections)`.
        held_out: text to judge by: a fit that does not lower the error there is not used.
        skipped_layers: the layers.
        refit: fit K and V projections.
        surrogate: fit linear surrogates of skipped layers that lie before kept ones.
        sink_tokens: first positions of each window that run at full depth: not fitted on, and seen as such by others.

    Raises:
        ModelError: activations are not finite.
    """
    skipped = sorted(set(skipped_layers))
    walks = (_Walk(fitting), _Walk(held_out))
    last_kept = max(set(range(len(stack))) - set(skipped), default=-1)
    weights: dict[str, Tensor] = {}
    surrogates: dict[int, Surrogate] = {}
    records: list[FitRecord] = []
    for layer in range(skipped[-1] + 1 if skipped and (refit or surrogate) else 0):
        of_layer = [projection for projection in projections if projection.layer == layer]
        states = [walk.full.states(layer) for walk in walks]
        if layer < skipped[0]:
            continue
        for walk, state in zip(walks, states, strict=True):
            walk.pruned = walk.pruned or [batch.entered for batch in state]
            if layer not in skipped:
                walk.pruned = stack.run_all(walk.full.calls, layer, walk.pruned)
            else:
                modules = {projection.module for projection in of_layer}
                walk.features = [
                    _reaching(stack, c, layer, h, modules) for c, h in zip(walk.full.calls, walk.pruned, strict=True)
                ]
        if layer not in skipped:
            continue
        grams: _Grams = {}
        if refit:
            records += _refit_layer(stack, of_layer, walks, states, sink_tokens, weights, grams)
        if surrogate and of_layer and layer < last_kept:
            found = _fit_surrogate(of_layer[0].module, layer, walks, states, sink_tokens, grams)
            records.append(found[0])
            if found[0].kept:
                surrogates[layer] = found[1]
        for walk, state in zip(walks, states, strict=True):
            walk.pruned = _passed_on(walk, state, surrogates.get(layer), sink_tokens)
    plan = PrefillPlan(frozenset(skipped), weights, surrogates)
    return PrefillFit(plan, tuple(records), sum(call.entered.shape[:2].numel() for call in fitting.calls))


def _reaching(stack: LayerStack, calls: Calls, layer: int, hidden: Tensor, modules: set[str]) -> _Features:
    """Return what reaches the layer's modules when `hidden` enters it; the rest of the layer does not run."""
    with watched(stack.model, modules, stop=True) as seen, suppress(StopLayer):
        stack.run(calls, layer, hidden)
    return _Features({name: x for name, (x, _) in seen.items()}, {name: y for name, (_, y) in seen.items()})


def _passed_on(walk: _Walk, states: tuple[FullState, ...], surrogate: Surrogate | None, sink: int) -> list[Tensor]:
    """Return what a skipped layer passes on: what entered it, plus its surrogate; sinks as the full model has them."""
    passed = []
    for hidden, state, features in zip(walk.pruned, states, walk.features, strict=True):
        if surrogate is not None:
            hidden = hidden + features.inputs[surrogate.module] @ surrogate.matrix
        passed.append(torch.cat([state.left[:, :sink], hidden[:, sink:]], dim=1))
    return passed


def _refit_layer(
    stack: LayerStack,
    of_layer: Sequence[Projection],
    walks: Sequence[_Walk],
    states: Sequence[tuple[FullState, ...]],
    sink: int,
    weights: dict[str, Tensor],
    grams: _Grams,
) -> list[FitRecord]:
    """Fit K and V of one layer, put the new values of whole parameters into `weights`, and return the records."""
    records = []
    for projection in of_layer:
        module = stack.model.get_submodule(projection.module)
        has_bias = getattr(module, "bias", None) is not None
        moments = [
            _moments(
                [features.inputs[projection.module] for features in walk.features],
                [features.outputs[projection.module][..., projection.columns] for features in walk.features],
                [batch.outputs[projection.module][..., projection.columns] for batch in state],
                sink,
                has_bias,
                grams,
            )
            for walk, state in zip(walks, states, strict=True)
        ]
        fitted = fit(moments[0], moments[1], has_bias)
        records.append(_record(projection.layer, projection.part, fitted))
        if fitted.helps:
            _change_weights(module, projection, fitted.change, weights)
    return records


def _fit_surrogate(
    module: str,
    layer: int,
    walks: Sequence[_Walk],
    states: Sequence[tuple[FullState, ...]],
    sink: int,
    grams: _Grams,
) -> tuple[FitRecord, Surrogate]:
    """Return the linear map from the layer's normalised input to what the full model has more than the pruned pass."""
    moments = [
        _moments(
            [features.inputs[module] for features in walk.features],
            [hidden * 0 for hidden in walk.pruned],
            [batch.left - hidden for batch, hidden in zip(state, walk.pruned, strict=True)],
            sink,
            False,
            grams,
        )
        for walk, state in zip(walks, states, strict=True)
    ]
    fitted = fit(moments[0], moments[1], has_intercept=False)
    matrix = torch.from_numpy(fitted.change).to(walks[0].pruned[0].dtype)
    return _record(layer, "surrogate", fitted), Surrogate(module, matrix)


def _moments(
    inputs: list[Tensor],
    present: list[Tensor],
    targets: list[Tensor],
    sink: int,
    has_intercept: bool,
    grams: _Grams,
) -> Moments:
    """Return the sums over all batches, without the sinks.

    Args:
        inputs: per batch [B, S, F].
        present: per batch [B, S, R], what the present map makes of them.
        targets: per batch [B, S, R].
        sink: positions left out at the start of each window.
        has_intercept: add the constant 1 as the last feature.
        grams: of this layer, by features.
    """
    key = (inputs[0].data_ptr(), has_intercept)
    if key not in grams:
        grams[key] = sum(features.T @ features for features in _features(inputs, sink, has_intercept))
    moments = Moments(grams[key], targets[0].shape[-1])
    for features, now, target in zip(_features(inputs, sink, has_intercept), present, targets, strict=True):
        wanted = target[:, sink:].flatten(0, 1).double()  # [N, R]
        residual = wanted - now[:, sink:].flatten(0, 1).double()
        moments.add(features, residual.numpy(), wanted.numpy())
    return moments


def _features(inputs: list[Tensor], sink: int, has_intercept: bool) -> Iterator[np.ndarray]:
    """Yield each batch's features [N, F] in float64, without the sinks, the constant 1 last if it is wanted."""
    for x in inputs:
        features = x[:, sink:].flatten(0, 1).double()
        yield (nn.functional.pad(features, (0, 1), value=1.0) if has_intercept else features).numpy()


def _change_weights(module: nn.Module, projection: Projection, change: np.ndarray, weights: dict[str, Tensor]) -> None:
    """Add a change [F (+ 1), R] to the projection's columns of the module's weight and bias in `weights`."""
    parameters = {f"{projection.module}.{name}": value for name, value in module.named_parameters(recurse=False)}
    columns = torch.from_numpy(projection.columns)
    num_features = parameters[f"{projection.module}.weight"].shape[1 - output_axis(module)]
    for name, original in parameters.items():
        part = change[:num_features].T if output_axis(module) == 0 else change[:num_features]
        axis = output_axis(module)
        if name.endswith(".bias"):
            part, axis = change[-1], 0
        changed = weights.get(name, original).double().clone()
        changed.index_add_(axis, columns, torch.from_numpy(np.ascontiguousarray(part)))
        weights[name] = changed.to(original.dtype)


def _record(layer: int, projection: str, fitted: Fitted) -> FitRecord:
    numbers = {f.name: getattr(fitted, f.name) for f in dataclasses.fields(fitted) if f.name != "change"}
    return FitRecord(layer, projection, kept=fitted.helps, **numbers)
