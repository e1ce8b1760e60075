"""A whole export in ONNX operators alone, in 32 and in 16 bits, run by the runtime that runs dialect `ort`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

import pop_runtime
from pop_export import ExportConfig, pipeline, speed
from pop_export.bundle import Bundle
from pop_export.graph import trace
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.ort_attention import group_query_attention
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import read_manifest

IDS = [7, 200, 13, 90, 41, 5, 66, 120]


@pytest.fixture(scope="module")
def standard_export(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """Return an export of the tiny Llama with `TINY_PLAN` in dialect `standard`."""
    config = ExportConfig(
        model=str(llama_folder), out=Path(), dialect="standard", prune_layers="1,3", calibration_samples=4,
        calibration_length=64, sink_tokens=0, boundary_tokens=1, threads=1,
    )  # fmt: skip

    def export(**settings: object) -> Bundle:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speed, "PROMPT_TOKENS", 64)
            out = tmp_path_factory.mktemp("standard") / "bundle"
            return pipeline.export(dataclasses.replace(config, out=out, **settings))  # type: ignore[arg-type]

    return export


@pytest.fixture(scope="module")
def bundle(standard_export: Callable[..., Bundle]) -> Bundle:
    return standard_export()


def test_the_manifest_says_the_dialect_and_no_graph_has_another_domain_s_operators(bundle):
    assert read_manifest(bundle.folder).dialect == "standard"
    for name in ("prefill.onnx", "decode.onnx"):
        graph = ir.load(bundle.folder / name)
        assert {node.domain for node in graph.graph} == {""} and set(graph.opset_imports) == {""}
    assert not (bundle.folder / "genai_config.json").exists()


@pytest.mark.parametrize("prefill", ["pop", "full"])
def test_both_dialects_choose_the_same_tokens(bundle, tiny_bundle, prefill):
    answers = []
    for folder in (bundle.folder, tiny_bundle.folder):
        generation = pop_runtime.load(folder, threads=1).generate(
            IDS, max_new_tokens=24, prefill=prefill, ignore_eos=True
        )
        assert len(list(generation)) == 24
        answers.append(generation.token_ids)
    assert answers[0] == answers[1] and len(set(answers[0])) > 4


def test_a_batch_of_unequal_rows_gives_each_row_its_own_answer(bundle):
    model = pop_runtime.load(bundle.folder, threads=1)
    prompts = [IDS[:3], IDS]
    together = [completion.token_ids for completion in model.generate_batch(prompts, max_new_tokens=12)]
    alone = []
    for prompt in prompts:
        generation = model.generate(prompt, max_new_tokens=12)
        list(generation)
        alone.append(generation.token_ids)
    assert together == alone


def test_an_fp16_pair_is_within_its_tolerance(standard_export):
    half = standard_export(precision="fp16")
    assert half.manifest.kv_dtype == "float16"
    assert all(check["passed"] and check["tolerance"] == 2e-2 for check in half.report["verification"]["checks"])


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_products_that_only_onnx_runtime_has_are_refused(precision, tmp_path):
    with pytest.raises(UsageError, match=f"expected fp32, fp16 or bf16 with --dialect standard, found {precision}"):
        ExportConfig(model="x", out=tmp_path, dialect="standard", precision=precision)


def test_a_graph_with_an_operator_of_another_domain_is_refused(llama, monkeypatch):
    monkeypatch.setitem(trace.ATTENTION, "standard", group_query_attention)
    with pytest.raises(ModelError, match=r"expected ONNX operators alone .* found com.microsoft.GroupQueryAttention"):
        build_decode_graph(llama, kv_layout(llama), "standard")
