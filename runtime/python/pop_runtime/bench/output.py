"""A benchmark's findings for people: table, samples as CSV, plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pop_runtime.bench.agreement import NUM_NEW
from pop_runtime.bench.rounds import Sample


def table(report: dict[str, Any]) -> str:
    """Return the findings as text."""
    rows = [f"{'engine':36} {'prompt':>6}  {'first token ms':>24}  {'ms per token':>22}  {'tokens/s':>8}"]
    for figure in report["figures"]:
        speed = "-" if figure["tokens_per_second"] is None else f"{figure['tokens_per_second']:.1f}"
        rows.append(
            f"{figure['label']:36} {figure['num_prompt']:>6}  {_spread(figure['first_ms']):>24}  "
            f"{_spread(figure['step_ms']):>22}  {speed:>8}"
        )
    for ratio in report["pruned_against_full"]:
        limit = "-" if ratio["limit"] is None else f"{ratio['limit']:.2f}"
        rows.append(
            f"{ratio['num_prompt']} tokens: pruned {ratio['measured']:.2f} x as fast to the first token as full; "
            f"counting work allows {limit}"
        )
    for ratio in report["ours_over_peers"]:
        step = "" if ratio["per_token"] is None else f", a token {ratio['per_token']:.2f}"
        rows.append(
            f"{ratio['num_prompt']} tokens: {ratio['label']} over {ratio['peer']}: first token "
            f"{ratio['first_token']:.2f}{step}"
        )
    for found in report["agreement"]:
        rows.append(
            f"{found['label']}: {found['top1']:.0%} of {found['num_probes']} likeliest tokens are the exact bundle's, "
            f"{found['common_tokens']:.1f} of {NUM_NEW} greedy tokens in common"
        )
    memory = report["memory"]
    over = "" if memory["both_over_one"] is None else f": {memory['both_over_one']:.2f} x"
    rows.append(
        f"memory: both graphs {_mb(memory['both_graphs'])}, the decode graph alone {_mb(memory['one_graph'])}{over}"
    )
    for name, engine in report["engines"].items():
        rows.append(f"{name}: {engine['version']}, loaded in {engine['load_ms']:.0f} ms, memory {_mb(engine)}")
    rows += [f"missing: {entry['peer']}: {entry['reason']}" for entry in report["missing"]]
    rows.append(
        f"{report['threads']} threads, {report['num_rounds']} rounds, {report['clock']} time: median (least - greatest)"
    )
    return "\n".join(rows)


def _spread(values: dict[str, float] | None) -> str:
    if values is None:
        return "-"
    return f"{values['median']:.1f} ({values['least']:.1f} - {values['greatest']:.1f})"


def _mb(memory: dict[str, Any]) -> str:
    if memory["proportional_bytes"] is None or memory["peak_bytes"] is None:
        return "not known on this system"
    return f"{memory['proportional_bytes'] / 1e6:.0f} MB (peak {memory['peak_bytes'] / 1e6:.0f})"


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    """Write one row per sample."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["engine", "prompt_tokens", "round", "first_token_ms", "median_ms_per_token"])
        for sample in samples:
            step = median(sample.run.step_ms) if sample.run.step_ms else ""
            writer.writerow([sample.label, sample.num_prompt, sample.round, sample.run.first_ms, step])


def plot_endings() -> list[str]:
    """Return the endings of the files that `plot` can write."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.filetypes)


def plot(path: Path, report: dict[str, Any]) -> None:
    """Draw the median time to first token over the prompt length, one line per engine, spread as bars."""
    from matplotlib.figure import Figure

    lines: dict[str, list[dict[str, Any]]] = {}
    for figure in report["figures"]:
        lines.setdefault(figure["label"], []).append(figure)
    drawing = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawing.subplots()
    for label, figures in lines.items():
        figures = sorted(figures, key=lambda figure: figure["num_prompt"])
        middle = [figure["first_ms"]["median"] for figure in figures]
        below = [figure["first_ms"]["median"] - figure["first_ms"]["least"] for figure in figures]
        above = [figure["first_ms"]["greatest"] - figure["first_ms"]["median"] for figure in figures]
        lengths = [figure["num_prompt"] for figure in figures]
        axes.errorbar(lengths, middle, yerr=[below, above], marker="o", markersize=4, capsize=3, label=label)
    axes.set(xlabel="prompt, tokens", ylabel="time to first token, ms", title=str(report["model"].get("name", "")))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    drawing.savefig(path, dpi=150)
