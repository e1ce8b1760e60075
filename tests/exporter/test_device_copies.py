"""A decode step can be recorded by CUDA only if no value is copied between CPU and GPU in a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from tests.exporter.families import proof
from tests.exporter.families.configs import tiny_family_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _copies(family: str, folder: Path, dialect: str = "ort") -> list[str]:
    proof.export_pair(tiny_family_model(family), folder, dialect=dialect)  # type: ignore[arg-type]
    return _copied_values()(ir.load(folder / "decode.onnx"))


def _copied_values() -> Callable[[ir.Model], list[str]]:
    """Return the function of benchmarks/, where it says what `gpu_check.py` can record."""
    specification = importlib.util.spec_from_file_location("device_copies", BENCHMARKS / "device_copies.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.copied_values  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "mixtral"])
def test_steps_of_families_with_the_rotary_embedding_in_the_operator_copy_nothing(family: str, tmp_path: Path) -> None:
    assert _copies(family, tmp_path) == []


def test_positions_that_come_from_sizes_are_copied(tmp_path: Path) -> None:
    """What docs/tensorrt.md says cannot be recorded, and that the test above can see it."""
    assert any(copy.startswith("Sub") for copy in _copies("llama", tmp_path, "standard"))
