"""The GPU benchmarks' logic, on the CPU: what they would print on a GPU is in their hands alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.fixture
def llama8b(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_llama8b

    return gpu_llama8b


@torch.no_grad()
def test_layers_that_only_write_k_and_v_leave_the_reference_s_cache(llama8b):
    model = llama8b.random_model(llama8b.SMALL, torch.float32)
    assert llama8b.largest_difference(model, (2, 5, 7), 24) <= llama8b.SAME
    ids = torch.arange(24)[None]
    full, pruned = (llama8b.prefill(model, ids, skipped).layers[6].keys for skipped in ((), (2, 5)))
    assert float((full - pruned).abs().max()) > 100 * llama8b.SAME * float(full.abs().max())


def test_the_dry_run_of_the_8b_shape_times_both_prefills():
    done = _run("gpu_llama8b.py", "--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["num_tokens"] for row in rows] == [32, 64] and all(row["pruned_ms"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["gpu_llama8b.py", "gpu_check.py"])
def test_without_a_gpu_they_end_with_exit_4_and_no_figure(script):
    arguments = ["--tiny", "--families", "llama"] if script == "gpu_check.py" else []
    done = _run(script, *arguments)
    assert done.returncode == 4 and "error" in done.stderr and "{" not in done.stdout


@pytest.mark.slow
def test_the_dry_run_of_the_check_passes_in_every_case_of_the_cpu():
    done = _run("gpu_check.py", "--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(check["passed"] for check in result["checks"]) and len(result["checks"]) == 5 * 3 + 1
    assert [row["case"] for row in result["model"]] == ["LlamaForCausalLM float16 ort"]
