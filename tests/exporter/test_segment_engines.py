"""Engines of a bundle with segments: what `pop-compile` makes for providers that run them."""

from __future__ import annotations

import json
import shutil

import numpy as np

import pop_runtime
from pop_runtime.bench.cli import main as bench
from pop_runtime.bench.engines import BundleEngine
from pop_runtime.compile.cli import main as compile_bundle
from pop_runtime.manifest import read_manifest

SMALL = ["--prompt-lengths", "8", "--new-tokens", "2", "--repeat", "1", "--threads", "1"]
IDS = np.random.default_rng(0).integers(3, 250, 40).tolist()


def test_an_engine_for_the_cpu_is_of_segments_and_gives_the_same_tokens(exported_bundle, tmp_path):
    folder = shutil.copytree(exported_bundle, tmp_path / "bundle")
    assert compile_bundle([str(folder), "--ep", "cpu"]) == 0
    segments = {segment.graph for segment in read_manifest(folder).segments}
    assert {path.name for path in (folder / "engines").glob("*/*.onnx")} == segments
    models = [pop_runtime.load(folder, threads=1, engine=engine) for engine in (True, False)]
    assert set(models[0].sessions.nodes_by_provider) == segments
    found, wanted = ([token.id for token in model.generate(IDS, max_new_tokens=8)] for model in models)
    assert found == wanted


def test_an_engine_of_segments_is_measured_beside_its_decode_graph_alone(exported_bundle, tmp_path, capsys):
    folder = shutil.copytree(exported_bundle, tmp_path / "bundle")
    assert compile_bundle([str(folder), "--ep", "cpu"]) == 0
    capsys.readouterr()
    assert bench([str(folder), *SMALL, "--engine", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    segments = read_manifest(folder).segments
    assert set(report["engines"]["pop-export"]["nodes_by_provider"]) == {segment.graph for segment in segments}
    alone, pair = (BundleEngine(folder, 1, graphs=graphs, compiled=True) for graphs in ("decode", "both"))
    assert set(alone.nodes_by_provider) == {segment.graph for segment in segments if "decode" in segment.stages}
    assert alone.run(IDS, 4, "pop", lambda: None) == pair.run(IDS, 4, "full", lambda: None)
