"""Find where the files of a `--model` lie: a known name, a folder, a .gguf file, or a Hugging Face id."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pop_export.known_models import fetched, known_models
from pop_export.quiet import first_line
from pop_runtime.errors import ModelError, UsageError

# the files of a hub repository that an export may need; the weights of other frameworks are left out
_HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "README.md"]
_HUB_IGNORED = ["original/*", "onnx/*", "*.msgpack", "*.h5", "openvino/*"]


@dataclass(frozen=True)
class Location:
    """Where a checkpoint's files lie and where they came from."""

    path: Path  # a folder, or a .gguf file
    name: str  # short name for reports
    source: str  # as the user gave it; for known models the pinned package it came from
    revision: str | None
    license: str | None  # None: the files may say


def locate(
    model: str, *, offline: bool, trust_remote_code: bool, allow_pickle: bool, revision: str | None = None
) -> Location:
    """Return where the checkpoint lies on disk, fetching it first if it is a known name or a Hugging Face id.

    Raises:
        ModelError: nothing of that name exists, or it could not be fetched.
        UsageError: a revision of something that has none.
    """
    known = known_models()
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name that no file can have; the home of nobody
        found = getattr(error, "strerror", None) or first_line(error)
        raise ModelError(f"{model}: expected a folder or a file, found: {found}; give another path") from error
    if revision is not None and (model in known or exists):
        raise UsageError(f"--revision {revision}: expected a Hugging Face id with it, found {model}; leave it out")
    if model in known:
        entry = known[model]
        file = fetched(entry, offline=offline)
        return Location(file, entry.title, f"{entry.name} ({entry.revision})", entry.revision, entry.license)
    if path.is_dir():
        name = path.resolve().name if path.name in ("", ".", "..") else path.name
        return Location(path, name, model, _snapshot_revision(path), None)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model}: expected a folder, a .gguf file, a known name or a hub id, found another file")
        return Location(path, path.stem, model, None, None)
    if not _is_hub_id(model):
        raise ModelError(
            f"{model}: no such folder or .gguf file, and not a Hugging Face id; known names: {', '.join(sorted(known))}"
        )
    folder = _hub_snapshot(
        model, revision, offline=offline, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle
    )
    return Location(folder, model.rsplit("/", 1)[-1], model, folder.name, None)


def _is_hub_id(model: str) -> bool:
    """Return whether the text could be a Hugging Face id: `name` or `owner/name`, and not the path of a .gguf file."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model, re.ASCII) is not None and not model.lower().endswith(".gguf")


def _snapshot_revision(folder: Path) -> str | None:
    """Return the commit that a folder of the hub's cache (.../snapshots/COMMIT) stands for, or None."""
    real = folder.resolve()
    return real.name if real.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", real.name) else None


def _hub_snapshot(
    model: str, revision: str | None, *, offline: bool, trust_remote_code: bool, allow_pickle: bool
) -> Path:
    """Return the folder of the model in the hub's local cache, downloaded first unless offline.

    `revision` is a branch, a tag or a commit; None is the default branch.
    """
    from huggingface_hub import snapshot_download  # slow to import, and most exports do not need it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = _HUB_PATTERNS + (["*.py"] if trust_remote_code else []) + (["*.bin"] if allow_pickle else [])
    if not offline:
        print(f"Fetching {model} from the Hugging Face hub, unless its cache holds it", file=sys.stderr)
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED, local_files_only=offline
        )
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelError(
                f"{model}: no such folder, not in the Hugging Face cache, and --offline forbids fetching it; "
                "run once without --offline, or give a folder"
            ) from error
        reason = first_line(error.__cause__ or error)
        raise ModelError(
            f"{model}: no such folder, not in the Hugging Face cache, and the hub cannot be reached ({reason}); "
            f"give a folder, a .gguf file or one of {', '.join(sorted(known_models()))}"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"{model}: the Hugging Face hub did not deliver it: {first_line(error)}") from error
    return Path(folder)
