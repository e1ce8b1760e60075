"""Settings of every exporter test, and a bundle that many of them only read."""

from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_checkpoint

# tiny models are slower with more threads, ten times so on a busy machine
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The folder of a tiny Llama with tokenizer and chat template; do not alter it."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny<b>llama")


@pytest.fixture(scope="session")
def exported_bundle(tiny_checkpoint, tmp_path_factory) -> Path:
    """That model exported with layers 1 and 3 skipped, once for all tests: tracing takes seconds. Do not alter it."""
    from pop_export import ExportConfig, export

    out = tmp_path_factory.mktemp("exported") / "bundle"
    config = ExportConfig(
        model=str(tiny_checkpoint), out=out, prune_layers="1,3", calibration_samples=4, calibration_length=32,
        sink_tokens=0, boundary_tokens=1, threads=1,
    )  # fmt: skip
    return export(config).folder
