"""`report.html`: the report for people, one self-contained file made from report.json's content alone.

Every figure is written as `<data value="..." data-path="...">`: the exact value and where report.json has it, so that a
test can hold one against the other.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from pop_export.report_plots import curve_plot, fit_plot, importance_plot

TEMPLATE = "report.html.j2"
CHOSEN_BY = {"gates": "their importance for prefill", "search": "the damage they do", "user": "hand"}
NOTHING = "\N{EN DASH}"


def write_html(path: Path, report: dict[str, Any]) -> None:
    """Write the report as HTML."""
    path.write_text(render_html(report), encoding="utf-8")


def render_html(report: dict[str, Any]) -> str:
    """Return the report as one HTML page; sections whose data are absent are left out.

    Args:
        report: what report.json holds (`report.build_report`); texts in it may come from the model and are escaped.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8"))
    quality = report.get("quality") or {}
    fits = {name: (report.get(name) or {}).get("layers") for name in ("refit", "surrogate")}
    return template.render(
        report=report,
        quality=quality,
        fits=fits,
        number=partial(number, report),
        layers=partial(layers, report),
        chosen_by=CHOSEN_BY,
        key=key,
        plain=plain,
        plots={
            "prefill": Markup(importance_plot(report, "prefill")),
            "decode": Markup(importance_plot(report, "decode")),
            "curve": Markup(curve_plot(report)) if quality.get("curve") else None,
            **{name: Markup(fit_plot(report, name)) if layers else None for name, layers in fits.items()},
        },
    )


def number(report: dict[str, Any], path: str, form: str = "", unit: str = "") -> Markup:
    """Return the value at a dotted path, such as "speed.full_prefill_ms", as a `<data>` element.

    Args:
        report: where to look.
        path: keys and list indices.
        form: format specification of the text shown; the element's value is exact. None is shown as a dash.
        unit: written after the number.
    """
    value = look_up(report, path)
    return _data(value, path, NOTHING if value is None else f"{value:{form}}{unit}")


def layers(report: dict[str, Any], path: str) -> Markup:
    """Return the layers at a dotted path as a `<data>` element that shows ranges, such as "5, 12-14"."""
    numbers: list[int] = list(look_up(report, path))
    starts = [layer for layer in numbers if layer - 1 not in numbers]
    ends = [layer for layer in numbers if layer + 1 not in numbers]
    shown = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return _data(numbers, path, shown or NOTHING)


def look_up(report: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path of keys (see `key`) and list indices."""
    value: Any = report
    for part in path.split("."):
        name = part.replace("~1", ".").replace("~0", "~")
        value = value[int(name)] if isinstance(value, list | tuple) else value[name]
    return value


def key(name: str) -> str:
    """Return a key as a part of a dotted path; it may hold dots itself."""
    return name.replace("~", "~0").replace(".", "~1")


def _data(value: Any, path: str, shown: str) -> Markup:
    return Markup('<data value="{}" data-path="{}">{}</data>').format(escape(json.dumps(value)), path, shown)


def plain(value: Any) -> str:
    """Return a setting as text: a dash for none, items with commas."""
    if value is None or value == "" or value in ([], ()):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
