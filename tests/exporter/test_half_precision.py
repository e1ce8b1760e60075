"""16-bit pairs, and models whose numbers do not fit into 16 bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers

import pop_runtime
from pop_export import ExportConfig, pipeline, speed
from pop_export.bundle import Bundle
from pop_export.half_precision import cast_weights, require_finite, require_kernels, rounded_weights
from pop_runtime.errors import GateError
from tests.tiny_models import TINY, save_checkpoint, tiny_model

IDS = [7, 200, 13, 90, 41, 5]


@pytest.fixture(scope="module")
def half_bundle(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the tiny Llama exported in fp16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "PROMPT_TOKENS", 64)
        return pipeline.export(
            ExportConfig(
                model=str(llama_folder), out=tmp_path_factory.mktemp("half") / "bundle", precision="fp16", threads=1,
                prune_layers="1,3", calibration_samples=2, calibration_length=32,
            )
        )  # fmt: skip


def test_an_fp16_pair_is_half_as_large_and_within_its_tolerance(half_bundle):
    report = half_bundle.report
    assert report["precision"] == "fp16" and half_bundle.manifest.kv_dtype == "float16"
    assert all(check["passed"] and check["tolerance"] == 2e-2 for check in report["verification"]["checks"])
    assert report["size"]["weights_bytes"] <= 0.5 * report["size"]["fp32_parameter_bytes"] + 64 * 4096
    assert 0 < report["precision_damage"]["quantisation_kl_nats"] < 1e-2
    assert json.loads((half_bundle.folder / "report.json").read_text())["precision_damage"]["num_windows"] == 8


def test_weights_of_an_fp16_pair_are_fp16_and_the_tied_embedding_is_stored_once(half_bundle):
    model = onnx.load(half_bundle.folder / "decode.onnx", load_external_data=False)
    weights = {tensor.name: tensor.data_type for tensor in model.graph.initializer if tensor.name.endswith("weight")}
    assert len(weights) > 30 and set(weights.values()) == {onnx.TensorProto.FLOAT16}
    readers = [node.op_type for node in model.graph.node if "lm_head.weight" in node.input]
    assert sorted(readers) == ["Gather", "Gemm"]


def test_an_fp16_bundle_runs_over_half_precision_buffers(half_bundle, llama):
    model = pop_runtime.load(half_bundle.folder, threads=1)
    found = [token.id for token in model.generate(IDS, max_new_tokens=6, prefill="full", ignore_eos=True)]
    expected = llama.generate(torch.tensor([IDS]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert found == expected[0, len(IDS) :].tolist()


def test_onnx_runtime_has_half_precision_kernels_on_this_machine():
    require_kernels(torch.float16)


def test_norms_that_compute_in_fp32_are_those_of_the_model_in_fp16_too(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "PROMPT_TOKENS", 64)
    save_checkpoint(
        tmp_path / "gemma", tiny_model(transformers.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=8))
    )
    bundle = pipeline.export(
        ExportConfig(
            model=str(tmp_path / "gemma"), out=tmp_path / "out", precision="fp16", threads=1, prune_layers="1",
            calibration_samples=2, calibration_length=32,
        )
    )  # fmt: skip
    assert all(check["passed"] for check in bundle.report["verification"]["checks"])


def test_a_layer_whose_numbers_leave_fp16_is_named(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(3e4)
    save_checkpoint(tmp_path / "large", model)
    with pytest.raises(GateError, match=r"layer 2 of 5: expected finite numbers in float16, found Inf or NaN"):
        pipeline.export(
            ExportConfig(
                model=str(tmp_path / "large"), out=tmp_path / "out", precision="fp16", threads=1, prune_layers="1",
                calibration_samples=2, calibration_length=32,
            )
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_weight_beyond_fp16_is_named():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    with cast_weights(model, torch.float16), pytest.raises(GateError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        require_finite(model, IDS)


def test_a_model_within_range_passes_and_gets_its_weights_back():
    model = tiny_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with cast_weights(model, torch.float16):
        assert model.dtype == torch.float16
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        require_finite(model, IDS)
    with rounded_weights(model, torch.float16):
        assert model.dtype == torch.float32
        assert np.isclose(model.lm_head.weight.detach(), before["lm_head.weight"], atol=1e-3).all()
        assert not model.lm_head.weight.equal(before["lm_head.weight"])
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
