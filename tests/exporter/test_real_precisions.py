"""SmolLM2-135M in 8 and 4 bits: the figures of docs/results.md, held loosely, on less text than the default takes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from benchmarks.precisions import CONTEXT_TOKENS, SCORED_TOKENS, Figures, measure, model_scores, row_config
from pop_export.calibration.corpus import Samples, calibration_samples
from pop_export.checkpoint import Checkpoint, load_checkpoint
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_runtime.threads import visible_cores

pytestmark = [pytest.mark.real, pytest.mark.slow]  # fitting takes minutes
MODEL = "smollm2-135m"


@pytest.fixture(scope="module", autouse=True)
def _threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(visible_cores())
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return load_checkpoint(MODEL)


@pytest.fixture(scope="module")
def decode(smollm2: Checkpoint) -> ir.Model:
    return build_decode_graph(smollm2.model, kv_layout(smollm2.model))


@pytest.fixture(scope="module")
def text(smollm2: Checkpoint) -> Samples:
    """Windows to fit to, and four kept aside to measure on."""
    return calibration_samples(
        smollm2.tokenizer,
        num_samples=16,
        length=CONTEXT_TOKENS + SCORED_TOKENS,
        seed=0,
        num_held_out=4,
        with_docstrings=True,
    )


def _figures(checkpoint: Checkpoint, decode: ir.Model, text: Samples, row: str) -> Figures:
    windows = [ids.tolist() for ids in text.held_out]
    reference: list[np.ndarray] = [model_scores(checkpoint.model, ids) for ids in windows]
    config = row_config(MODEL, row)
    return measure(checkpoint, config, decode.clone(), windows, reference, text.ids, threads=visible_cores())


def test_eight_bits_are_hardly_to_be_told_from_fp32(smollm2, decode, text):
    found = _figures(smollm2, decode, text, "int8")
    assert found.kl_weights <= 0.0015
    assert found.kl_run <= 0.003
    assert found.bytes_ratio <= 0.29


def test_four_bits_fitted_to_text_stay_close_in_a_sixth_of_the_bytes(smollm2, decode, text):
    found = _figures(smollm2, decode, text, "int4")
    assert found.kl_run <= 0.12
    assert found.bytes_ratio <= 0.17
