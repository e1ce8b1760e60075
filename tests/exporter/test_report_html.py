"""`report.html`: its numbers are report.json's, its texts are escaped, and it needs nothing from outside."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pop_export.cli import parser
from pop_export.config import ExportConfig
from pop_export.report import NOT_FLAGS, command_line
from pop_export.report_html import look_up, render_html
from pop_runtime.manifest import read_manifest


class _Page(HTMLParser):
    """Collects `<data>` elements, references, and the text outside `<data>`, `<svg>` and `<style>`."""

    def __init__(self, text):
        super().__init__()
        self.figures, self.references, self.rest, self.tags = [], [], "", []
        self._inside = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("href", "src", "srcset", "xlink:href", "action")]
        if tag == "data":
            self.figures.append([given["data-path"], given["value"], ""])
        if tag in ("data", "svg", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        if self._inside and self._inside[-1] == "data":
            self.figures[-1][2] += data
        elif not self._inside:
            self.rest += data


@pytest.fixture(scope="module")
def report(exported_bundle):
    return json.loads((exported_bundle / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(report):
    """A report with every optional section."""
    curve = [
        {"ratio": share / 5, "skipped_layers": list(range(5 - share, 5)), "kl_mean_nats": 0.01 * share**2,
         "predicted_speedup": 1 + 0.2 * share} for share in range(4)
    ]  # fmt: skip
    damage = {"kl_mean_nats": 0.0123, "kl_p95_nats": 0.05, "top1_agreement": 0.97, "num_positions": 1024}
    layers = [
        {"layer": layer, "projection": part, "held_out_before": 0.5, "held_out_after": after, "kept": after < 0.5}
        for layer in (1, 3) for part, after in (("key", 0.2), ("value", 0.6))
    ]  # fmt: skip
    return {
        **copy.deepcopy(report),
        "quality": {
            "protocol": {"context_tokens": 384, "continuation_tokens": 128},
            "chosen": {**damage, "per_source": {"a.txt": {**damage, "kl_mean_nats": 0.5}, "b~1": damage}},
            "curve": curve,
        },
        "ablation": {
            "variants": [{"name": "as published", "sink_tokens": 0, "boundary_tokens": 1, **damage}],
            "windows": [{"sink_tokens": 4, "boundary_tokens": size, **damage} for size in (1, 64)],
        },
        "refit": {"layers": layers},
        "surrogate": {"layers": [{**layers[0], "projection": "surrogate"}]},
    }


@pytest.mark.parametrize("which", ["report", "whole"])
def test_every_number_shown_is_that_of_report_json(which, request):
    report = json.loads(json.dumps(request.getfixturevalue(which)))
    page = _Page(render_html(report))
    assert len(page.figures) > 40
    for path, value, shown in page.figures:
        wanted = look_up(report, path)
        assert json.loads(value) == wanted, path
        if isinstance(wanted, int | float):
            digits = re.match(r"[-\d.,e+]+", shown)[0].replace(",", "")
            mantissa, _, exponent = digits.partition("e")
            last_place = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
            scale = 100 if "%" in shown else 1
            assert float(digits) == pytest.approx(wanted * scale, rel=1e-9, abs=0.501 * last_place), path


def test_the_bundle_holds_the_page_of_its_report(exported_bundle, report):
    assert (exported_bundle / "report.html").read_text(encoding="utf-8") == render_html(report)
    assert {"report.html", "report.json"} <= set(read_manifest(exported_bundle).files)


def test_sections_without_data_are_left_out(report, whole):
    def sections(content):
        return set(re.findall(r'<section id="(\w+)"', render_html(content)))

    always = {"importance", "windows", "verification", "speed", "samples", "repeat"}
    assert sections(report) - {"quality", "ablation", "refit", "surrogate"} == always
    assert sections(whole) == always | {"quality", "ablation", "refit", "surrogate"}
    absent = {"samples": [], "quality": None, "ablation": None, "refit": None, "surrogate": None}
    assert sections({**report, **absent}) == always - {"samples"}


def test_a_plan_that_skips_nothing_has_a_page(report):
    bare = copy.deepcopy(report)
    bare["plan"]["skipped_layers"] = []
    bare["calibration"]["prefill_importance"] = [0.0] * 5
    assert "leaves no layer out" in render_html(bare)


def test_text_from_the_model_is_escaped(whole):
    hostile = copy.deepcopy(whole)
    attack = "</p><script>alert('x')</script>\"'&"
    hostile["model"]["name"] = hostile["model"]["license"] = hostile["command_line"] = attack
    hostile["ablation"]["variants"][0]["name"] = hostile["verification"]["checks"][0]["name"] = attack
    hostile["refit"]["layers"][0]["projection"] = attack
    hostile["settings"] = {attack: attack}
    hostile["samples"] = [{"prompt": attack, "full": attack, "pruned": attack, "common_tokens": 3}]
    page = _Page(render_html(hostile))
    assert "script" not in page.tags
    assert page.rest.count(attack) >= 9


def test_the_page_refers_to_nothing_outside_itself(whole):
    text = render_html(whole)
    page = _Page(text)
    assert all(reference.startswith("#") for reference in page.references)
    assert not {"link", "script", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    for number, svg in enumerate(re.findall(r"<svg.*?</svg>", text, re.DOTALL)):
        ids = set(re.findall(r'id="([^"]+)"', svg))
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) <= ids, number


def test_plots_take_their_colours_from_the_page(whole):
    text = render_html(whole)
    assert text.count("<svg") == 5
    assert "var(--kept)" in text and "var(--skipped)" in text and "prefers-color-scheme: dark" in text
    assert "#030303" not in text and "#ffffff;" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)


def test_one_report_gives_one_page(whole):
    assert render_html(whole) == render_html(whole)


def test_the_report_tells_standard_errors_and_the_command_line(report, llama_folder):
    assert len(report["calibration"]["prefill_standard_error"]) == 5
    assert report["command_line"].startswith("pop-export --model ")
    assert report["command_line"].endswith(
        "--calibration-samples 4 --calibration-length 64 --prune-layers 1,3 "
        "--sink-tokens 0 --boundary-tokens 1 --threads 1"
    )


def test_the_command_line_gives_the_settings_again_and_leaves_defaults_out(tmp_path):
    config = ExportConfig(
        model="my model", out=tmp_path, force=True, calibration_data=("a b.txt", "c.txt"), calibration_batch=7, seed=3
    )
    line = command_line(config)
    assert line == f"pop-export --model 'my model' --out {tmp_path} --force --calibration-data 'a b.txt' c.txt --seed 3"
    arguments = vars(parser().parse_args(shlex.split(line)[1:]))
    del arguments["json"]
    again = ExportConfig(**{**arguments, "calibration_data": tuple(arguments["calibration_data"])})
    assert dataclasses.replace(again, calibration_batch=7) == config


OTHERS = {
    "model": "other", "out": Path("else"), "force": True, "revision": "v2", "offline": True, "trust_remote_code": True,
    "allow_pickle": True, "calibration": Path("a b.json"), "calibration_data": ("notes.txt",), "calibration_samples": 5,
    "calibration_length": 99, "fisher": "empirical", "seed": 1, "prune_ratio": 0.0, "prune_layers": "5,12-14",
    "max_kl": 0.01, "target_speedup": 1.5, "select": "gates", "search_breadth": 3, "curve": False, "refit": False,
    "surrogate": "off", "refit_samples": 5, "self_samples": 0, "refit_length": 99, "tune_steps": 0, "sink_tokens": 0,
    "boundary_tokens": 1, "dialect": "standard", "precision": "int8", "block_size": 64, "quantizer": "rtn",
    "symmetric": False, "threads": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [*OTHERS.items(), ("prune_layers", "none"), ("select", "search"), ("symmetric", True)]
)
def test_the_command_line_gives_every_setting_again(name, value):
    needed = {"precision": "int8"} if name in ("block_size", "quantizer", "symmetric") else {}
    config = ExportConfig(**{"model": "m", "out": Path("out"), **needed, name: value})
    arguments = vars(parser().parse_args(shlex.split(command_line(config))[1:]))
    del arguments["json"]
    assert ExportConfig(**{**arguments, "calibration_data": tuple(arguments["calibration_data"])}) == config


def test_every_setting_but_those_named_is_a_flag():
    flags = {action.dest for action in parser()._actions}
    assert {field.name for field in dataclasses.fields(ExportConfig)} - flags == set(NOT_FLAGS)
    assert flags >= OTHERS.keys() and len(OTHERS) == len(dataclasses.fields(ExportConfig)) - len(NOT_FLAGS)


def test_samples_hold_both_answers_and_how_far_they_agree(report):
    assert [set(sample) for sample in report["samples"]] == [{"prompt", "full", "pruned", "common_tokens"}]
    assert report["samples"][0]["prompt"].endswith("why the sky is blue.")  # the others are too long for a tiny model
    assert 0 <= report["samples"][0]["common_tokens"] <= 48
