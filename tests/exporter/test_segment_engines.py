"""Engines of a bundle with segments: what `pop-compile` makes for providers that run them."""

from __future__ import annotations

import shutil

import numpy as np

import pop_runtime
from pop_runtime.compile.cli import main as compile_bundle
from pop_runtime.manifest import read_manifest

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
