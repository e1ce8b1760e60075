"""The report's plots as inline SVG, drawn from report.json's numbers alone.

Colours and text colour are left to the page's CSS variables, so that a plot follows light and dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (4.4, 2.9)  # 9 pt text stays readable where the page gives a plot 330 px
INK, GRID, KEPT, SKIPPED = "#010101", "#020202", "#030303", "#040404"  # stand for the CSS colours below
_CSS = {INK: "currentColor", GRID: "var(--grid)", KEPT: "var(--kept)", SKIPPED: "var(--skipped)"}
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "pop", "font.family": "sans-serif", "font.size": 9,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


def importance_plot(report: dict[str, Any], stage: str) -> str:
    """Return bars of each layer's importance in a stage, with standard errors; skipped layers in another colour."""
    calibration, skipped = report["calibration"], set(report["plan"]["skipped_layers"])
    scores = calibration[f"{stage}_importance"]
    errors = calibration.get(f"{stage}_standard_error") or [None] * len(scores)
    positive = [score for score in scores if score > 0]

    def draw(axes: Axes) -> None:
        for group, colour, label in ((False, KEPT, "kept"), (True, SKIPPED, "skipped in prefill")):
            layers = [layer for layer in range(len(scores)) if (layer in skipped) == group]
            if layers:
                axes.bar(layers, [scores[layer] for layer in layers], 0.8, color=colour, label=label)
        lower = min(positive) / 3 if positive else 0.1
        for layer, (score, error) in enumerate(zip(scores, errors, strict=True)):
            if error:  # drawn by hand: on a log axis the lower end must stay above 0
                axes.plot([layer, layer], [max(score - error, lower), score + error], color=INK, linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylim(bottom=lower)
        axes.grid(axis="x", visible=False)
        axes.set(xlabel="layer", ylabel="importance (nats², log)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return _svg(draw, f"{stage}-importance", f"Importance of each layer in {stage}")


def curve_plot(report: dict[str, Any]) -> str:
    """Return predicted KL against predicted speed-up over the ratios, and what the chosen plan measured."""
    curve = sorted(report["quality"]["curve"], key=lambda point: point["ratio"])
    chosen = measured_point(report)
    values = [point["kl_mean_nats"] for point in curve] + ([chosen[1]] if chosen else [])
    smallest = min((value for value in values if value > 0), default=1e-3)

    def draw(axes: Axes) -> None:
        speedups = [point["predicted_speedup"] for point in curve]
        divergences = [point["kl_mean_nats"] for point in curve]
        axes.plot(speedups, divergences, color=KEPT, marker="o", markersize=4, linewidth=1.4, label="predicted")
        for point in curve:
            place = (point["predicted_speedup"], point["kl_mean_nats"])
            axes.annotate(f"{point['ratio']:.0%}", place, (0, 6), textcoords="offset points", ha="right", fontsize=8)
        if chosen:
            axes.plot(*chosen, color=SKIPPED, marker="D", markersize=7, linestyle="none", label="chosen, measured")
        axes.set_yscale("symlog", linthresh=smallest)  # the full model lies at 0
        axes.set_ylim(bottom=0)
        axes.set(xlabel="speed-up of a prompt with its windows", ylabel="mean KL (nats, log)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return _svg(draw, "curve", "Quality against speed")


def measured_point(report: dict[str, Any]) -> tuple[float, float] | None:
    """Return the measured speed-up of a turn and mean KL of the chosen plan, or None if its KL was not measured."""
    chosen = report["quality"].get("chosen")
    return None if chosen is None else (report["speed"]["turn_speedup"], chosen["kl_mean_nats"])


def fit_plot(report: dict[str, Any], kind: str) -> str:
    """Return the error of each fit of a kind, "refit" or "surrogate", on text kept aside: after over before."""
    records = report[kind]["layers"]
    names = sorted({record["projection"] for record in records})

    def draw(axes: Axes) -> None:
        for name, colour, marker in zip(names, (KEPT, SKIPPED, INK, GRID), "osD^", strict=False):
            chosen = [record for record in records if record["projection"] == name and record["held_out_before"] > 0]
            ratios = [record["held_out_after"] / record["held_out_before"] for record in chosen]
            axes.plot([record["layer"] for record in chosen], ratios, color=colour, marker=marker, markersize=5,
                      linestyle="none", label=name)  # fmt: skip
        axes.axhline(1, color=INK, linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="skipped layer", ylabel="held-out error, after / before")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))

    return _svg(draw, kind, f"What each {kind} gains on text kept aside")


def _svg(draw: Callable[[Axes], None], name: str, title: str) -> str:
    """Return a drawing as an `<svg>` element that refers to nothing outside itself; `name` keeps its ids apart."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'<path d="[^"]*" style="fill: #ffffff[^"]*"/>', "", svg)  # backgrounds
    svg = re.sub(r'(id="|"#|url\(#)', rf"\g<1>{name}-", svg)
    for stand_in, colour in _CSS.items():
        svg = svg.replace(stand_in, colour)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
