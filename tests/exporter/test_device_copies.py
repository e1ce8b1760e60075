"""A decode step can be recorded by CUDA only if no value is copied between CPU and GPU in a run."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from tests.exporter.device_copies import copied_values
from tests.exporter.families import proof
from tests.exporter.families.configs import tiny_family_model


def _copies(family: str, folder: Path, dialect: str = "ort") -> list[str]:
    proof.export_pair(tiny_family_model(family), folder, dialect=dialect)  # type: ignore[arg-type]
    return copied_values(ir.load(folder / "decode.onnx"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "mixtral"])
def test_steps_of_families_with_the_rotary_embedding_in_the_operator_copy_nothing(family: str, tmp_path: Path) -> None:
    assert _copies(family, tmp_path) == []


def test_positions_that_come_from_sizes_are_copied(tmp_path: Path) -> None:
    """What docs/tensorrt.md says cannot be recorded, and that the test above can see it."""
    assert any(copy.startswith("Sub") for copy in _copies("llama", tmp_path, "standard"))
