"""What `ExportConfig` takes, and what it refuses before any work is done."""

from __future__ import annotations

from pathlib import Path

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
