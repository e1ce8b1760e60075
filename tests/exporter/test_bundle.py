"""Writing a bundle: all or nothing."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from pop_export.bundle import check_space, check_target, save_graphs, staged_folder
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import MANIFEST_NAME


def _bundle(folder, content="old"):
    folder.mkdir()
    (folder / MANIFEST_NAME).write_text(content)
    return folder


def test_a_new_or_empty_target_is_accepted(tmp_path):
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "new", force=False)
    check_target(tmp_path / "empty", force=False)


def test_an_existing_bundle_needs_force(tmp_path):
    target = _bundle(tmp_path / "out")
    with pytest.raises(UsageError, match="a bundle is already there; pass --force"):
        check_target(target, force=False)
    check_target(target, force=True)


def test_a_folder_of_something_else_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="a folder with other files"):
        check_target(tmp_path, force=True)


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="found a file"):
        check_target(tmp_path / "out", force=True)


def test_a_disk_without_room_for_the_weights_is_refused_before_the_work(tmp_path):
    check_space(tmp_path / "not" / "there" / "yet", 1000)
    with pytest.raises(ModelError, match=r"for at least 1000000000000\.0 MB, found [0-9.]+ MB free; clear"):
        check_space(tmp_path / "out", 10**18)


def test_a_write_that_fails_without_a_code_on_a_full_disk_is_called_so(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    with pytest.raises(ModelError, match="the disk is full"), staged_folder(tmp_path / "out"):
        raise OSError("8192 requested and 0 written")


def test_a_finished_folder_takes_its_name_whole(tmp_path):
    with staged_folder(tmp_path / "deep" / "out") as folder:
        (folder / MANIFEST_NAME).write_text("new")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / MANIFEST_NAME).read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_an_old_bundle_is_replaced_whole(tmp_path):
    target = _bundle(tmp_path / "out")
    (target / "left-over.onnx").write_text("old")
    with staged_folder(target) as folder:
        (folder / MANIFEST_NAME).write_text("new")
    assert {path.name: path.read_text() for path in target.iterdir()} == {MANIFEST_NAME: "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_bundle_goes_on_pointing_to_the_new_one(tmp_path):
    _bundle(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with staged_folder(tmp_path / "link") as folder:
        (folder / MANIFEST_NAME).write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / MANIFEST_NAME).read_text() == "new"


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt()])
def test_an_interrupted_export_leaves_nothing_and_keeps_the_old_bundle(tmp_path, error):
    target = _bundle(tmp_path / "out")
    with pytest.raises(type(error)), staged_folder(target) as folder:
        (folder / "weights.bin").write_text("half")
        raise error
    assert (target / MANIFEST_NAME).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    script = (
        "import os, sys, pathlib; from pop_export.bundle import staged_folder\n"
        "with staged_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'weights.bin').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1
    with staged_folder(tmp_path / "out") as folder:
        (folder / MANIFEST_NAME).write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_running_export_beside_this_one_is_left_alone(tmp_path):
    running = tmp_path / f".out.partial-{os.getppid()}"
    running.mkdir()
    with staged_folder(tmp_path / "out"):
        pass
    assert running.is_dir()


def test_a_full_disk_is_named_and_nothing_stays(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", "weights.bin")
    message = r"weights\.bin: cannot write the bundle: the disk is full"
    with pytest.raises(ModelError, match=message), staged_folder(tmp_path / "out") as folder:
        (folder / "weights.bin").write_text("half")
        raise full
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="cannot write the bundle"), staged_folder(tmp_path / "file" / "out"):
        pass


def test_both_graphs_read_the_same_bytes_of_one_file(tiny_bundle):
    places = {}
    for name in ("prefill.onnx", "decode.onnx"):
        model = onnx.load(tiny_bundle.folder / name, load_external_data=False)
        external = [tensor for tensor in model.graph.initializer if tensor.external_data]
        places[name] = {t.name: tuple(entry.value for entry in t.external_data) for t in external}
        assert {place[0] for place in places[name].values()} == {"weights.bin"}
    own = places["prefill.onnx"].keys() - places["decode.onnx"].keys()  # what only prefill needs
    assert all(name.endswith((".refit", ".surrogate")) for name in own), own
    shared = {name: place for name, place in places["prefill.onnx"].items() if name not in own}
    assert shared and shared.items() <= places["decode.onnx"].items()


def test_the_tied_embedding_is_stored_once(tiny_bundle):
    # alignment to pages weighs on tiny tensors: 64 x 4096 bytes at most
    size = tiny_bundle.report["size"]
    assert size["weights_bytes"] <= size["fp32_parameter_bytes"] * 1.05 + 64 * 4096
    model = onnx.load(tiny_bundle.folder / "decode.onnx", load_external_data=False)
    readers = [node.op_type for node in model.graph.node if "lm_head.weight" in node.input]
    assert sorted(readers) == ["Gather", "Gemm"]


# an odd number of large bytes before small weights would put their numbers across the bounds of words
@pytest.mark.parametrize(("num_large", "shares_pages"), [(1 << 17, True), ((1 << 17) + 1, False)])
def test_small_weights_share_pages_where_every_number_can_lie_at_a_multiple_of_its_size(
    tmp_path, num_large, shares_pages
):
    weights = {
        "codes": np.zeros(num_large, np.uint8), "zeros": np.zeros(2001, np.uint8), "norm": np.zeros(701, np.float32),
        "scales": np.zeros(1001, np.float16),
    }  # fmt: skip
    values = [ir.val(name, const_value=ir.tensor(array, name=name)) for name, array in weights.items()]
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 24}), ir_version=11)
    save_graphs(tmp_path, {"decode.onnx": model}, "weights.bin")
    offsets = {}
    for tensor in onnx.load(tmp_path / "decode.onnx", load_external_data=False).graph.initializer:
        offsets[tensor.name] = next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
        assert offsets[tensor.name] % weights[tensor.name].itemsize == 0
    assert (len({offset // 4096 for offset in offsets.values()}) < len(weights)) == shares_pages
