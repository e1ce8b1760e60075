"""Writing a folder: all or nothing."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from pop_runtime import staging
from pop_runtime.errors import ModelError
from pop_runtime.staging import staged_folder


def _folder(folder, content="old"):
    folder.mkdir()
    (folder / "manifest.json").write_text(content)
    return folder


def test_a_write_that_fails_without_a_code_on_a_full_disk_is_called_so(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    with pytest.raises(ModelError, match="the disk is full"), staged_folder(tmp_path / "out", "bundle"):
        raise OSError("8192 requested and 0 written")


def test_a_finished_folder_takes_its_name_whole(tmp_path):
    with staged_folder(tmp_path / "deep" / "out", "bundle") as folder:
        (folder / "manifest.json").write_text("new")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "manifest.json").read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_an_old_folder_is_replaced_whole(tmp_path):
    target = _folder(tmp_path / "out")
    (target / "left-over.onnx").write_text("old")
    with staged_folder(target, "bundle") as folder:
        (folder / "manifest.json").write_text("new")
    assert {path.name: path.read_text() for path in target.iterdir()} == {"manifest.json": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_goes_on_pointing_to_the_new_one(tmp_path):
    _folder(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with staged_folder(tmp_path / "link", "bundle") as folder:
        (folder / "manifest.json").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "manifest.json").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt()])
def test_an_interrupted_run_leaves_nothing_and_keeps_the_old_folder(tmp_path, error):
    target = _folder(tmp_path / "out")
    with pytest.raises(type(error)), staged_folder(target, "bundle") as folder:
        (folder / "weights.bin").write_text("half")
        raise error
    assert (target / "manifest.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    script = (
        "import os, sys, pathlib; from pop_runtime.staging import staged_folder\n"
        "with staged_folder(pathlib.Path(sys.argv[1]), 'bundle') as folder:\n"
        "    (folder / 'weights.bin').write_text('half'); os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert killed.returncode == -9
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.iterdir())) == 1
    with staged_folder(tmp_path / "out", "bundle") as folder:
        (folder / "manifest.json").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_named_and_nothing_stays(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", "weights.bin")
    message = r"weights\.bin: cannot write the bundle: the disk is full"
    with pytest.raises(ModelError, match=message), staged_folder(tmp_path / "out", "bundle") as folder:
        (folder / "weights.bin").write_text("half")
        raise full
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="cannot write the bundle"), staged_folder(tmp_path / "file" / "out", "bundle"):
        pass


def test_a_folder_behind_a_link_is_staged_in_its_own_file_system(tmp_path):
    _folder(tmp_path / "there")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    with staged_folder(tmp_path / "here" / "link", "bundle") as folder:
        assert folder.parent == tmp_path


def test_a_name_that_can_be_staged_can_be_replaced_too(tmp_path):
    name = "x" * (255 - len(f"..partial-new-{staging._RUN}"))
    with staged_folder(_folder(tmp_path / name), "bundle") as folder:
        (folder / "manifest.json").write_text("new")
    assert (tmp_path / name / "manifest.json").read_text() == "new"
    with pytest.raises(ModelError, match="File name too long"), staged_folder(tmp_path / f"{name}x", "bundle"):
        pass


def test_a_run_beside_this_one_is_left_alone(tmp_path, monkeypatch):
    with staged_folder(tmp_path / "out", "bundle"):
        (other,) = tmp_path.iterdir()
        monkeypatch.setattr(staging, "_RUN", "00000000")
        with staged_folder(tmp_path / "out", "bundle"):
            pass
        assert other.is_dir()


def test_a_loop_of_links_is_one_line(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ModelError, match="cannot write the bundle"), staged_folder(tmp_path / "a" / "out", "bundle"):
        pass


def test_only_leftovers_of_the_same_name_are_removed(tmp_path):
    for name in (".a[b].partial-0", ".ab.partial-0"):
        (tmp_path / name).mkdir()
    with staged_folder(tmp_path / "a[b]", "bundle"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"a[b]", ".ab.partial-0"}


def test_parents_made_for_nothing_are_removed_and_others_stay(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="bug"), staged_folder(tmp_path / "there" / "a" / "b" / "out", "bundle"):
        raise ValueError("bug")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
