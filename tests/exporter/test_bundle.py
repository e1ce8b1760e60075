"""Where a bundle may be written, and its graphs over one file of weights."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from pop_export.bundle import check_space, check_target, save_graphs
from pop_runtime.errors import ModelError, UsageError
from pop_runtime.manifest import MANIFEST_NAME


def _bundle(folder, content='{"format": "pop-bundle"}'):
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


@pytest.mark.parametrize(
    ("name", "content"),
    [("thesis.txt", "years of work"), ("manifest.json", '{"name": "of a web page"}'), ("manifest.json", "[")],
)
def test_a_folder_of_something_else_is_never_replaced(tmp_path, name, content):
    (tmp_path / name).write_text(content)
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


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "out", ["file/out", "file/deep/out", "/proc/none/out", "x" * 250, "x" * 300, "deep/" + "x" * 300]
)
def test_a_target_that_cannot_be_made_is_refused_before_the_work(tmp_path, out, force):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        UsageError, match=r"^--out .*: expected a folder that can be made, found [A-Z].* \(.*\); choose another"
    ):
        check_target(tmp_path / out, force)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_check_of_the_target_leaves_nothing_behind(tmp_path):
    check_target(tmp_path / "deep" / "deeper" / "out", force=False)
    assert list(tmp_path.iterdir()) == []


def test_the_room_is_that_of_the_disk_which_a_link_points_to(tmp_path, monkeypatch):
    (tmp_path / "there" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there/real")
    measured = []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: measured.append(folder) or type("Usage", (), {"free": 9}))
    check_space(tmp_path / "link", 9)
    assert measured == [tmp_path / "there"]


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
