"""Choose the plan: by ratio, by the user's list, or by a budget of damage or speed, along one order of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pop_export.config import ExportConfig
from pop_export.layer_plan import layer_order, num_skipped_at, parse_layers
from pop_export.plan_lab import PlanLab, Point
from pop_export.progress import progress
from pop_export.search import search_order
from pop_runtime.errors import GateError, UsageError

CURVE_RATIOS = (1 / 6, 1 / 3, 0.5, 0.6)
MAX_RATIO = 0.6  # no budget looks further: damage there is beyond use


@dataclass(frozen=True)
class Choice:
    """Which layers to skip, and how the alternatives compare."""

    skipped_layers: tuple[int, ...]
    chosen_by: str  # "gates", "search" or "user"
    order: tuple[int, ...]  # layers in the order in which they would be skipped
    curve: tuple[Point, ...]  # over ratios, each plan holding the one before it


def check_plan(config: ExportConfig, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers that the user listed, None without a list; to be asked as soon as their number is known.

    Raises:
        UsageError: the list makes no sense for this model, or a budget asks for layers to skip of a single one.
    """
    budget = "--max-kl" if config.max_kl is not None else "--target-speedup"
    if num_layers == 1 and (config.max_kl is not None or config.target_speedup is not None):
        raise UsageError(
            f"{budget}: expected a model that has a layer to skip, found one of a single layer; leave it out"
        )
    return None if config.prune_layers is None else parse_layers(config.prune_layers, num_layers)


def choose_plan(config: ExportConfig, lab: PlanLab, importance: Sequence[float]) -> Choice:
    """Return the layers to skip as `config` asks for.

    Args:
        config: one of ratio, list, `max_kl` or `target_speedup`; how to order layers; whether to measure the curve.
        lab: tries plans.
        importance: [L], prefill importance by gates.

    Raises:
        UsageError: as `check_plan`.
        GateError: no plan meets the budget (names the nearest that can be reached).
    """
    num_layers = len(importance)
    listed = check_plan(config, num_layers)
    most = num_skipped_at(max(MAX_RATIO, config.ratio), num_layers)
    order = layer_order(importance)
    if config.searches:
        budget = config.max_kl is not None or config.target_speedup is not None
        num_wanted = most if budget else num_skipped_at(config.ratio, num_layers)
        with progress("searching", num_wanted) as advance:
            order = search_order(
                lambda layers: price(lab.try_plan(layers)),
                importance,
                num_wanted,
                breadth=config.search_breadth,
                advance=advance,
            )
    curve = _curve(lab, order, num_layers) if config.curve else ()
    if listed is not None:
        return Choice(listed, "user", order, curve)

    def point(num_skipped: int) -> Point:
        return lab.try_plan(order[:num_skipped])

    if config.max_kl is not None:
        num_skipped = most_within(point, most, config.max_kl)
    elif config.target_speedup is not None:
        num_skipped = fewest_reaching(point, most, config.target_speedup)
    else:
        num_skipped = num_skipped_at(config.ratio, num_layers)
    return Choice(tuple(sorted(order[:num_skipped])), "search" if config.searches else "gates", order, curve)


def price(point: Point) -> np.ndarray:
    """Return the damage of a plan for each unit of the prompt's time that it saves, on each window of text: [W].

    So a plan that is a little better and much slower, because of its surrogates, does not win.
    """
    saved = 1 - 1 / point.predicted_speedup
    damage = np.asarray(point.kl_by_window_nats)
    return damage / saved if saved > 0 else np.full_like(damage, math.inf)


def most_within(point: Callable[[int], Point], most: int, max_kl: float) -> int:
    """Return the largest number of layers, at most `most`, whose plan does no more damage than `max_kl`.

    Plans are tried from none upwards until damage is well beyond the budget, because it grows with the number of layers
    but for small dips.

    Raises:
        GateError: even the plan of a single layer does more.
    """
    best, least = 0, float("inf")
    for num_skipped in range(1, most + 1):
        kl = point(num_skipped).kl_mean_nats
        least = min(least, kl)
        if kl <= max_kl:
            best = num_skipped
        elif kl > 2 * max_kl:
            break
    if best == 0:
        raise GateError(
            f"--max-kl {max_kl:g}: expected a plan that does no more damage, found that the least one does "
            f"{least:.2g} nats per token; allow that much, or export with --prune-layers none"
        )
    return best


def fewest_reaching(point: Callable[[int], Point], most: int, target_speedup: float) -> int:
    """Return the smallest number of layers whose plan is predicted to reach the speedup.

    Raises:
        GateError: not even the plan of `most` layers does.
    """
    fastest = 0.0
    for num_skipped in range(1, most + 1):
        speedup = point(num_skipped).predicted_speedup
        fastest = max(fastest, speedup)
        if speedup >= target_speedup:
            return num_skipped
    raise GateError(
        f"--target-speedup {target_speedup:g}: expected a plan that reaches it, found at most {fastest:.2f} x with "
        f"{most} layers skipped; ask for {int(fastest * 100) / 100:.2f}, or name more layers with --prune-layers"
    )


def _curve(lab: PlanLab, order: Sequence[int], num_layers: int) -> tuple[Point, ...]:
    """Return one point per ratio, none skipped first; ratios that come to the same number of layers make one point."""
    counts = sorted({0, *(min(num_skipped_at(ratio, num_layers), len(order)) for ratio in CURVE_RATIOS)})
    points = []
    with progress("measuring damage over ratios", len(counts)) as advance:
        for count in counts:
            points.append(lab.try_plan(order[:count]))
            advance(1)
    return tuple(points)
