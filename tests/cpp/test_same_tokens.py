"""Python and C++ give the same tokens: 200 greedy ones of every family, seeded ones, every kind of window."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

import pop_runtime
from pop_runtime.manifest import Windows, describe_files, write_manifest
from pop_runtime.model import Model
from pop_runtime.sessions import open_pair
from tests.cpp.conftest import PopRun, ids_text
from tests.exporter.families.page import proven_families
from tests.runtime.tiny_bundle import PROMPT, make_bundle, with_generation_config

pytestmark = pytest.mark.cpp

# One for each way in which families differ (tests/exporter/families/test_families.py says which); all else is slow.
CORE = ("llama", "gemma3_text", "gpt2", "gpt_oss", "bloom", "deepseek_v3")
WINDOWS = ("sink_tokens", "boundary_tokens")


def _family_bundle(model_type: str, folder: Path) -> Model:
    """Export a tiny model of a family as a whole bundle and return it, loaded."""
    proof = pytest.importorskip("tests.exporter.families.proof")
    from tests.exporter.families.configs import tiny_family_model

    manifest = proof.export_pair(tiny_family_model(model_type), folder).manifest
    files = describe_files(folder, ["prefill.onnx", "decode.onnx", "weights.bin"])
    manifest = dataclasses.replace(manifest, files=files, windows=Windows(2, 3))
    write_manifest(folder, manifest)
    return Model(folder, manifest, open_pair(folder, manifest, threads=1))


def _compare_family(pop_run: PopRun, model: Model) -> None:
    """Compare 200 greedy tokens; some tiny models repeat one token for ever, so with a penalty on that too."""
    compare(pop_run, model, PROMPT, 200, must_differ=False)
    compare(pop_run, model, PROMPT, 200, repetition_penalty=1.5)


def compare(
    pop_run: PopRun, model: Model, prompt: list[int], num_new: int, must_differ: bool = True, **options: Any
) -> None:
    """Assert that both runtimes give the same tokens, pruned and full, and that pruning changes some."""
    answers = []
    for prefill in ("pop", "full"):
        generation = model.generate(prompt, max_new_tokens=num_new, ignore_eos=True, prefill=prefill, **options)
        wanted = [token.id for token in generation]
        has_windows = prefill == "pop"  # the commands refuse windows that have no effect
        given = {name: value for name, value in options.items() if has_windows or name not in WINDOWS}
        flags = [(f"--{name.replace('_', '-')}", value) for name, value in given.items()]
        found = pop_run(
            model.folder, "--ids", ids_text(prompt), "--json", "--max-new-tokens", num_new, "--ignore-eos",
            "--prefill", prefill, *itertools.chain.from_iterable(flags),
        ).json  # fmt: skip
        assert found["new_token_ids"] == wanted
        assert len(wanted) == num_new
        assert found["num_pruned_tokens"] == generation.stats.num_pruned_tokens
        answers.append(wanted)
    assert answers[0] != answers[1] or not must_differ, "the pruned prefill changed nothing: this shows too little"


@pytest.mark.parametrize("model_type", CORE)
def test_200_greedy_tokens_of_a_core_family_are_the_same(tmp_path: Path, pop_run: PopRun, model_type: str) -> None:
    _compare_family(pop_run, _family_bundle(model_type, tmp_path))


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", proven_families())
def test_200_greedy_tokens_of_every_family_are_the_same(tmp_path: Path, pop_run: PopRun, model_type: str) -> None:
    from tests.exporter.families.sweep import TEXT_PARTS

    _compare_family(pop_run, _family_bundle(TEXT_PARTS.get(model_type, model_type), tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("segmented", [False, True])
def test_every_kv_type_gives_the_same_tokens(tmp_path: Path, pop_run: PopRun, dtype: str, segmented: bool) -> None:
    model = pop_runtime.load(make_bundle(tmp_path, dtype=dtype, segmented=segmented), threads=1)
    compare(pop_run, model, PROMPT, 24)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2**64 - 1, "top_k": 20},
        {"temperature": 1.3, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 2.0, "seed": 4, "top_k": 100, "top_p": 0.5},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 1.5, "seed": 5, "min_p": 0.1},
        {"sink_tokens": 7, "boundary_tokens": 9},
        {"sink_tokens": 2, "boundary_tokens": 3, "prefill_chunk_tokens": 7},
        {"sink_tokens": 0, "boundary_tokens": 38},
        {"sink_tokens": 7, "boundary_tokens": 9, "prefill_chunk_tokens": 20},
    ],
)
@pytest.mark.parametrize("segmented", [False, True])
def test_one_seed_gives_the_same_tokens(
    tmp_path_factory: pytest.TempPathFactory, pop_run: PopRun, segmented: bool, options: dict[str, Any]
) -> None:
    model = pop_runtime.load(make_bundle(tmp_path_factory.mktemp("seeded"), segmented=segmented), threads=1)
    compare(pop_run, model, PROMPT, 24, **options)


@pytest.mark.parametrize("segmented", [False, True])
def test_low_memory_gives_the_same_tokens(tmp_path: Path, pop_run: PopRun, segmented: bool) -> None:
    make_bundle(tmp_path, segmented=segmented)
    flags = (tmp_path, "--ids", ids_text(PROMPT), "--json", "--ignore-eos", "--max-new-tokens", 20)
    assert pop_run(*flags).json["new_token_ids"] == pop_run(*flags, "--low-memory").json["new_token_ids"]


def test_generation_config_decides_what_is_not_given(tmp_path: Path, pop_run: PopRun) -> None:
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "num_beams": 3}
    model = pop_runtime.load(make_bundle(tmp_path, text_files=with_generation_config(**settings)), threads=1)
    generation = model.generate(PROMPT, max_new_tokens=20, seed=9, ignore_eos=True)
    wanted = [token.id for token in generation]
    done = pop_run(
        tmp_path, "--ids", ids_text(PROMPT), "--json", "--max-new-tokens", 20, "--seed", 9, "--ignore-eos"
    )  # fmt: skip
    assert done.json["new_token_ids"] == wanted
    assert done.json["ignored_settings"] == model.ignored_settings == ["num_beams"]
    assert "num_beams" in done.err
    assert done.json["settings"] == generation.stats.settings


@pytest.mark.real
@pytest.mark.parametrize("prefill", ["pop", "full"])
def test_200_greedy_tokens_of_smollm2_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, pop_run: PopRun, prefill: str
) -> None:
    folder = _smollm2(tmp_path_factory)
    model = pop_runtime.load(folder, threads=1)
    text = "The history of the sea is written by those who sailed it, and by the winds that carried them. " * 10
    prompt = model.encode_prompt(text)
    generation = model.generate(prompt, max_new_tokens=200, ignore_eos=True, prefill=prefill)  # type: ignore[arg-type]
    wanted = [token.id for token in generation]
    found = pop_run(
        folder, "--ids", ids_text(prompt), "--json", "--max-new-tokens", 200, "--ignore-eos", "--prefill", prefill
    ).json
    assert found["new_token_ids"] == wanted
    assert (found["num_pruned_tokens"] > 100) == (prefill == "pop")


_made: list[Path] = []


def _smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of the real model, exported once for all tests: what its fits are worth is no matter here."""
    if not _made:
        from pop_export import ExportConfig, export

        out = tmp_path_factory.mktemp("smollm2") / "bundle"
        config = ExportConfig(
            model="smollm2-135m", out=out, prune_layers="20-29", calibration_samples=2, calibration_length=32,
            refit_samples=4, self_samples=0, tune_steps=0, curve=False,
        )  # fmt: skip
        _made.append(export(config).folder)
    return _made[0]
