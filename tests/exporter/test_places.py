"""Bundles and checkpoints in unusual places (trial B19), and graphs that caches can tell apart (B22)."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest

import pop_runtime
from pop_export.checkpoint import load_checkpoint

ODD_NAME = "a folder, é 模型"


def _tokens(folder: Path) -> list[int]:
    model = pop_runtime.load(folder, threads=1)
    return [token.id for token in model.generate([7, 200, 13, 90], max_new_tokens=6, ignore_eos=True)]


@pytest.fixture
def moved(tiny_bundle, tmp_path: Path) -> Path:
    """Return the tiny bundle under another, odd name."""
    return Path(shutil.copytree(tiny_bundle.folder, tmp_path / ODD_NAME / "bundle"))


def test_a_moved_bundle_runs_from_a_folder_of_any_name(tiny_bundle, moved, monkeypatch, tmp_path):
    wanted = _tokens(tiny_bundle.folder)
    assert _tokens(moved) == wanted
    monkeypatch.chdir(moved.parent)
    assert _tokens(Path("bundle")) == wanted
    assert _tokens(Path("bundle/")) == wanted


def test_a_folder_of_links_as_hub_caches_have_runs(tiny_bundle, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(tiny_bundle.folder.iterdir())):
        shutil.copy(path, tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert _tokens(tmp_path / "snapshot") == _tokens(tiny_bundle.folder)


def test_a_read_only_bundle_runs(moved, tiny_bundle):
    for path in (*moved.iterdir(), moved):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert _tokens(moved) == _tokens(tiny_bundle.folder)
    finally:
        moved.chmod(0o755)


def test_a_checkpoint_of_links_under_an_odd_name_is_loaded(llama_folder, tmp_path):
    (tmp_path / "blobs").mkdir()
    linked = tmp_path / ODD_NAME
    linked.mkdir()
    for number, path in enumerate(sorted(llama_folder.iterdir())):
        shutil.copy(path, tmp_path / "blobs" / str(number))
        (linked / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert load_checkpoint(str(linked), offline=True).model.config.num_hidden_layers == 5


def test_an_export_goes_to_a_folder_of_any_name(quick_export, tmp_path):
    bundle = quick_export(out=tmp_path / ODD_NAME / "out", prune_layers="1,3")
    assert len(_tokens(bundle.folder)) == 6


def test_no_two_graphs_share_a_name_that_an_engine_cache_could_mix_up(quick_export, tmp_path):
    folders = [
        quick_export(out=tmp_path / "plan", prune_layers="1,3", refit=False, tune_steps=0).folder,
        quick_export(out=tmp_path / "other plan", prune_layers="2", refit=False, tune_steps=0).folder,
        quick_export(out=tmp_path / "int8", prune_layers="1,3", precision="int8").folder,
    ]
    files_of: dict[str, set[bytes]] = {}
    for path in (path for folder in folders for path in folder.glob("*.onnx")):
        files_of.setdefault(onnx.load(path, load_external_data=False).graph.name, set()).add(path.read_bytes())
    assert {"prefill.onnx", "decode.onnx"} < {path.name for path in folders[0].glob("*.onnx")}  # and segments
    assert all(len(files) == 1 for files in files_of.values())
