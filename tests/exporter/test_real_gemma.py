"""Gemma-3-270M, the second real model: windows of 512 tokens, two rope bases, a prompt beyond the window."""

from __future__ import annotations

import pytest

import pop_runtime
from pop_export.bundle import Bundle
from tests.exporter.real_export import export_briefly

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("real") / "gemma3"
    return export_briefly("gemma3-270m", folder, calibration_samples=8, fitting_samples=6)


def test_full_model_and_pair_equal_pytorch_beyond_the_window(bundle):
    verification = bundle.report["verification"]
    assert verification["num_prompt_tokens"] >= 700
    logits = {check["name"]: check["largest_difference"] / check["largest_logit"] for check in verification["checks"]}
    assert len(logits) == 5
    assert max(logits.values()) <= 1e-3, logits


def test_a_third_of_the_layers_is_skipped(bundle):
    assert bundle.manifest.plan.num_layers == 18
    assert len(bundle.manifest.plan.skipped_layers) == 6


def test_it_answers_in_words(bundle):
    model = pop_runtime.load(bundle.folder)
    answer = "".join(token.text for token in model.generate("The capital of France is", max_new_tokens=12, raw=True))
    assert "France" in answer or "Paris" in answer  # a small base model: it stays on the subject
