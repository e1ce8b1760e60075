"""genai_config.json holds what the manifest and the graphs say."""

from __future__ import annotations

import dataclasses
import json

import onnx

from pop_export.genai_config import genai_config
from pop_runtime.manifest import KvLayer

STAGE_FLAGS = {"prefill": (True, False), "decode": (False, True)}


def test_every_stage_lists_the_inputs_and_outputs_its_graph_has(tiny_bundle):
    config = json.loads((tiny_bundle.folder / "genai_config.json").read_text())["model"]
    stages = {name: stage for entry in config["decoder"]["pipeline"] for name, stage in entry.items()}
    assert set(stages) == {"prefill", "decode"}
    for name, stage in stages.items():
        graph = onnx.load(tiny_bundle.folder / stage["filename"], load_external_data=False).graph
        assert set(stage["inputs"]) == {value.name for value in graph.input}
        assert set(stage["outputs"]) == {value.name for value in graph.output}
        assert (stage["run_on_prompt"], stage["run_on_token_gen"]) == STAGE_FLAGS[name]


def test_sizes_and_special_tokens_are_those_of_the_manifest(tiny_bundle):
    model, manifest = json.loads((tiny_bundle.folder / "genai_config.json").read_text())["model"], tiny_bundle.manifest
    assert model["vocab_size"] == manifest.vocab_size
    assert model["context_length"] == manifest.max_positions
    assert model["eos_token_id"] == list(manifest.eos_token_ids)
    assert model["bos_token_id"] == manifest.bos_token_id
    assert model["decoder"]["head_size"] == 16
    assert model["decoder"]["num_key_value_heads"] == 2
    assert model["decoder"]["num_hidden_layers"] == 5


def test_a_cache_that_genai_cannot_hold_gets_no_config(tiny_bundle):
    manifest = tiny_bundle.manifest
    assert genai_config(manifest) is not None
    for odd in (KvLayer(2, 16, 8), KvLayer(1, 16, 16)):
        layers = (*manifest.kv_layers[:-1], odd)
        assert genai_config(dataclasses.replace(manifest, kv_layers=layers)) is None
    alike = (KvLayer(2, 16, 8),) * len(manifest.kv_layers)
    assert genai_config(dataclasses.replace(manifest, kv_layers=alike)) is None
