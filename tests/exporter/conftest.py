"""Settings and shared exports of the exporter's tests: tracing costs seconds, so what only reads shares one trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from pop_export import ExportConfig, pipeline
from pop_export.bundle import Bundle
from pop_export.graph.build import build_decode_graph, kv_layout
from tests.tiny_models import save_checkpoint, tiny_model

# tiny models are slower with more threads, ten times so on a busy machine
torch.set_num_threads(1)

TINY_PLAN = (1, 3)  # the last layer is kept, so a cut layer is read by a kept one


@pytest.fixture(scope="session")
def llama() -> Any:
    """A tiny re-drawn Llama; do not alter it."""
    return tiny_model()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory, llama: Any) -> Path:
    """The same as a checkpoint folder with a byte tokenizer, under a name that HTML must escape; do not alter it."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny<b>llama", llama)


@pytest.fixture(scope="session")
def llama_decode(llama: Any) -> ir.Model:
    """Its decode graph; clone it before changing it."""
    return build_decode_graph(llama, kv_layout(llama))


@pytest.fixture
def quick_export(
    monkeypatch: pytest.MonkeyPatch, llama_decode: ir.Model, llama_folder: Path, tmp_path: Path
) -> Callable[..., Bundle]:
    """Return an export of the tiny Llama that takes the shared decode graph instead of tracing again."""
    monkeypatch.setattr(pipeline, "build_decode_graph", lambda *_: llama_decode.clone())
    config = ExportConfig(
        model=str(llama_folder),
        out=tmp_path / "bundle",
        calibration_samples=2,
        calibration_length=32,
        tune_steps=2,
        threads=1,
    )
    return lambda **settings: pipeline.export(dataclasses.replace(config, **settings))


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Bundle:
    """A whole export of the tiny Llama with `TINY_PLAN`, nothing replaced; do not alter it."""
    return pipeline.export(
        ExportConfig(
            model=str(llama_folder),
            out=tmp_path_factory.mktemp("export") / "bundle",
            prune_layers=",".join(map(str, TINY_PLAN)),
            calibration_samples=4,
            calibration_length=64,
            sink_tokens=0,  # the default windows are wider than the tests' prompts
            boundary_tokens=1,
            threads=1,
        )
    )


@pytest.fixture(scope="session")
def exported_bundle(tiny_bundle: Bundle) -> Path:
    """The folder of that export; do not alter it."""
    return tiny_bundle.folder
