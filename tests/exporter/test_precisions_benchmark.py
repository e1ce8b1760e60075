"""The benchmark of precisions measures what it says, on a tiny model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import precisions
from benchmarks.precisions import foreign_figures, measure, model_scores, row_config
from pop_export.bundle import save_graphs
from pop_export.checkpoint import load_checkpoint


@pytest.fixture
def tiny(monkeypatch, llama, llama_folder):
    """Return a checkpoint, windows with their scores, and text to fit to; windows as short as the tiny model wants."""
    monkeypatch.setattr(precisions, "CONTEXT_TOKENS", 24)
    monkeypatch.setattr(precisions, "TIMED_TOKENS", 32)
    checkpoint = dataclasses.replace(load_checkpoint(str(llama_folder), offline=True), model=llama)
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 256, 40).tolist() for _ in range(2)]
    text = [rng.integers(0, 256, 48) for _ in range(4)]
    return checkpoint, windows, [model_scores(llama, ids) for ids in windows], text


def test_fp32_is_the_checkpoint_and_fewer_bits_are_further_from_it(tiny, llama_decode):
    checkpoint, windows, reference, text = tiny
    fp32, int8, int4 = (
        measure(checkpoint, row_config("x", row), llama_decode.clone(), windows, reference, text, threads=1)
        for row in ("fp32", "int8", "int4")
    )
    assert fp32.kl_weights == 0
    assert fp32.kl_run < 1e-6
    assert 0 < int8.kl_weights < int4.kl_weights
    assert 0 < int8.kl_run < int4.kl_run
    assert fp32.bytes_ratio > int8.bytes_ratio > int4.bytes_ratio


def test_a_graph_of_another_builder_is_measured_as_ours(tiny, llama_decode, tmp_path):
    checkpoint, windows, reference, _ = tiny
    save_graphs(tmp_path, {"model.onnx": llama_decode.clone()}, "model.onnx.data")
    kl_run, bytes_ratio = foreign_figures(checkpoint, tmp_path / "model.onnx", windows, reference, threads=1)
    assert kl_run < 1e-6
    assert bytes_ratio > 0.9


def test_times_are_measured_on_request(tiny, llama_decode):
    checkpoint, windows, reference, text = tiny
    found = measure(
        checkpoint, row_config("x", "int8"), llama_decode.clone(), windows, reference, text, threads=1, timed=True
    )
    assert min(found.prefill_ms, found.full_ms, found.step_ms) > 0


def test_a_row_stands_for_settings_of_an_export():
    config = row_config("x", "int4/rtn/64/symmetric")
    assert (config.precision, config.quantizer, config.block_size, config.symmetric) == ("int4", "rtn", 64, True)
    with pytest.raises(SystemExit, match="fast is no method, block size or symmetry"):
        row_config("x", "int4/fast")
