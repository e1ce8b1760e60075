"""What `ExportConfig` takes, and what it refuses before any work is done."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pop_export.cli import main
from pop_export.config import ExportConfig
from pop_runtime.errors import UsageError


def test_paths_may_be_given_as_text():
    config = ExportConfig(model="m", out="out/x", calibration="calibration.json")
    assert (config.out, config.calibration) == (Path("out/x"), Path("calibration.json"))


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--fisher", "empirical"), ("--calibration", "c.json")),
        (("--tune-steps", "20"), ("--no-refit",)),
        (("--self-samples", "8"), ("--no-refit",)),
        (("--search-breadth", "3"), ("--no-refit",)),
        (("--search-breadth", "3"), ("--prune-layers", "20-29")),
        (("--search-breadth", "3"), ("--select", "gates")),
    ],
)
def test_a_flag_that_another_leaves_without_effect_is_refused(flags, cause, tmp_path, capsys):
    assert main(["--model", "m", "--out", str(tmp_path / "out"), *flags, *cause]) == 2
    named = " ".join(cause) if cause[0] == "--select" else cause[0]
    message = f"{flags[0]} and {named}: the one has no effect beside the other; drop one of them"
    assert capsys.readouterr().err == f"pop-export: error: {message}\n"


@pytest.mark.parametrize(
    "settings",
    [
        dict(refit=False, tune_steps=0, self_samples=0),  # asks for none, and gets none
        dict(refit=False, refit_samples=8),  # what is left of the text is measured on
        dict(calibration="c.json", calibration_samples=8, calibration_length=64),  # of the text that is verified with
        dict(refit=False, select="search", search_breadth=3),
        dict(max_kl=0.1, search_breadth=3, tune_steps=20, self_samples=8),
    ],
)
def test_flags_that_have_an_effect_together_are_taken(settings):
    ExportConfig(model="m", out="out", **settings)


def test_a_setting_without_effect_names_its_cause_from_python_too():
    with pytest.raises(UsageError, match="--fisher and --calibration: the one has no effect"):
        ExportConfig(model="m", out="out", calibration="c.json", fisher="empirical")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(precision="int4", quantizer="awq"), "--quantizer: expected one of gptq, rtn, k_quant, hqq, found awq"),
        (dict(precision="fp8"), "--precision: expected one of fp32, fp16, bf16, int8, int4, int8-dynamic, found fp8"),
        (dict(dialect="onnx"), "--dialect: expected one of ort, standard, found onnx"),
        (dict(fisher="true labels"), "--fisher: expected one of sampled, empirical, found true labels"),
        (dict(select="best"), "--select: expected one of gates, search, found best"),
        (dict(surrogate="none"), "--surrogate: expected one of auto, off, found none"),
        (dict(surrogate=["off"]), r"--surrogate: expected one of auto, off, found \['off'\]"),
        (dict(fisher=None), "--fisher: expected one of sampled, empirical, found None"),
        (dict(prune_ratio="0.3"), "--prune-ratio: expected a number, found 0.3"),
        (dict(max_kl=True), "--max-kl: expected a number, found True"),
        (dict(max_kl=10**400), "--max-kl: expected a number, found 1000"),
        (dict(prune_layers=[1]), r"--prune-layers: expected text, found \[1\]"),
        (dict(model=None), "--model: expected text, found None"),
        (dict(out=3), "--out: expected a path, found 3"),
        (dict(calibration=b"c.json"), "--calibration: expected a path, found b'c.json'"),
        (dict(calibration_data=7), "--calibration-data: expected texts, found 7"),
        (dict(calibration_data=("notes.txt", 7)), "--calibration-data: expected texts, found "),
        (dict(calibration_samples="8"), "--calibration-samples: expected a whole number, found 8"),
        (dict(calibration_length=3), "--calibration-length: expected at least 4 tokens, found 3"),
        (dict(refit_length=256.0), "--refit-length: expected a whole number, found 256.0"),
        (dict(tune_steps=True), "--tune-steps: expected a whole number, found True"),
        (dict(self_samples=10**20), "--self-samples: expected at most 9007199254740991, found 1000"),
        (dict(block_size="32", precision="int4"), "--block-size: expected a whole number, found 32"),
        (dict(refit=0), "--refit: expected true or false, found 0"),
        (dict(symmetric="no", precision="int4"), "--symmetric: expected true or false, found no"),
        (dict(threads=2.0), "--threads: expected a whole number, found 2.0"),
        (dict(threads=100_000), "--threads: expected at most "),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_the_name_of_its_setting(settings, message):
    """From Python no parser checks: quantizer="awq" ran k_quant and wrote `int4-block32-awq` into the manifest."""
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        ExportConfig(**{"model": "m", "out": "out", **settings})
    assert "\n" not in str(caught.value)


def test_every_default_is_of_its_own_kind():
    config = ExportConfig(model="m", out=Path("out"))
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            assert getattr(config, field.name) == field.default


@pytest.mark.parametrize("data", ["notes.txt", Path("notes.txt"), ["notes.txt"], (Path("notes.txt"),)])
def test_one_source_of_text_is_not_read_letter_by_letter(data):
    assert ExportConfig(model="m", out="out", calibration_data=data).calibration_data == ("notes.txt",)


def test_numbers_of_numpy_are_taken_as_plain_ones():
    config = ExportConfig(model="m", out="out", calibration_samples=np.int64(8), prune_ratio=np.float64(0.25))
    assert (type(config.calibration_samples), type(config.prune_ratio)) == (int, float)
