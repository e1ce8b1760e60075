"""What `ExportConfig` takes, and what it refuses before any work is done."""

from __future__ import annotations

from pathlib import Path

from pop_export.config import ExportConfig


def test_paths_may_be_given_as_text():
    config = ExportConfig(model="m", out="out/x", calibration="calibration.json")
    assert (config.out, config.calibration) == (Path("out/x"), Path("calibration.json"))
