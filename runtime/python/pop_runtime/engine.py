"""Engines: what `pop-compile` made of a bundle for one device, and how the runtime finds the one that fits.

An engine lies in `engines/<ep>-<device>-<key>/` of its bundle. The key is a digest of all that it depends on; an engine
of which any of it has changed is stale or foreign, and is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pop_runtime.errors import BackendError, ModelError
from pop_runtime.machine import Machine, describe_machine
from pop_runtime.manifest import FileEntry, Manifest, verify_entries
from pop_runtime.providers import Shapes, Target

ENGINES = "engines"  # folder in the bundle
RECORD = "engine.json"
RECORD_VERSION = 1
PROVIDER_VERSION = 2  # raise it when what is built, or its options, change: engines of before are then stale


@dataclass(frozen=True)
class Facts:
    """All that an engine depends on."""

    ep: str
    device: str
    driver: str | None
    versions: dict[str, str]
    bundle: dict[str, str]  # sha256 of the graphs and of the weights: the plan and the precision are in them
    precision: str | None  # that the provider was told to compute in; None: the bundle's own
    shapes: Shapes | None  # None: any
    builder: int = PROVIDER_VERSION

    @property
    def key(self) -> str:
        """Digest of the facts, 16 hex digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Engine:
    """A finished engine: its folder holds one file for each graph, named as the graph is."""

    folder: Path
    facts: Facts
    files: dict[str, FileEntry]
    build_seconds: float
    nodes_by_provider: dict[str, dict[str, int]]  # by graph


def make_facts(
    manifest: Manifest, target: Target, machine: Machine, precision: str | None, shapes: Shapes | None
) -> Facts:
    """Return the facts of an engine of this bundle for this machine."""
    bundle = {name: manifest.files[name].sha256 for name in (*graph_names(manifest, target), manifest.weights)}
    return Facts(target.ep, machine.device, machine.driver, machine.versions, bundle, precision, shapes)


def graph_names(manifest: Manifest, target: Target) -> tuple[str, ...]:
    """Return the files of the graphs that a target runs: segments where the provider runs them and there are any."""
    if manifest.segments and target.provider.runs_segments:
        return tuple(segment.graph for segment in manifest.segments)
    return manifest.prefill_graph, manifest.decode_graph


def engine_folder(bundle: Path, facts: Facts, machine: Machine) -> Path:
    """Return where an engine with these facts lies."""
    return bundle / ENGINES / f"{facts.ep}-{machine.slug}-{facts.key}"


def write_record(engine: Engine, folder: Path) -> None:
    """Write `engine.json`, which makes a folder an engine, into `folder`."""
    record = {"record_version": RECORD_VERSION, "key": engine.facts.key, **dataclasses.asdict(engine)}
    del record["folder"]
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Engine:
    """Return the engine in a folder.

    Raises:
        ModelError: its record is missing, damaged, newer than this package, or not the one that names the folder.
    """
    place = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        if record["record_version"] > RECORD_VERSION:
            raise ModelError(
                f"{place}, record_version: expected at most {RECORD_VERSION}, found {record['record_version']}; update "
                "the pop-export package"
            )
        facts = dict(record["facts"])
        if facts["shapes"] is not None:
            lengths = tuple(facts["shapes"]["prompt_lengths"])
            facts["shapes"] = Shapes(**{**facts["shapes"], "prompt_lengths": lengths})
        files = {name: FileEntry(**entry) for name, entry in record["files"].items()}
        engine = Engine(folder, Facts(**facts), files, record["build_seconds"], record["nodes_by_provider"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{place}: expected the record of an engine, found {error}; delete it and run pop-compile"
        ) from error
    if not folder.name.endswith(f"-{engine.facts.key}"):
        raise ModelError(
            f"{place}: expected the key {engine.facts.key} in the folder's name, found {folder.name}; "
            "delete it and run pop-compile"
        )
    return engine


def find_engine(bundle: Path, manifest: Manifest, target: Target, verify: bool = True) -> Engine:
    """Return the engine that fits this bundle and this machine; of several the one with most room.

    Args:
        bundle: folder of the bundle.
        manifest: of it.
        target: provider and device to run on.
        verify: whether to compare the sha256 of its files with its record.

    Raises:
        BackendError: there is none, or only stale and foreign ones (says what differs); the provider is missing.
        ModelError: the fitting one is damaged, or there is none and the record of another cannot be read.
    """
    machine = describe_machine(target)
    folders = sorted((bundle / ENGINES).glob(f"{target.ep}-*"))
    fitting, reasons = [], []
    unreadable: ModelError | None = None
    for folder in folders:
        try:
            engine = read_record(folder)
        except ModelError as error:  # of another package version, or a leftover: the one that fits may lie beside it
            unreadable = unreadable or error
            continue
        wanted = make_facts(manifest, target, machine, engine.facts.precision, engine.facts.shapes)
        if engine.facts == wanted:
            fitting.append(engine)
        else:
            reasons.append(f"{folder.name} ({_first_difference(engine.facts, wanted)})")
    if not fitting and unreadable is not None:
        raise unreadable
    if not fitting:
        found = f"only {'; '.join(reasons)}" if reasons else "none"
        raise BackendError(
            f"{bundle / ENGINES}: expected an engine for --ep {target.ep} on {machine.device}, found {found}; run "
            f"pop-compile {bundle} --ep {target.ep}"
        )
    best = max(fitting, key=_room)
    if verify:
        verify_entries(best.folder, best.files, "pop-compile --force")
    return best


def _room(engine: Engine) -> tuple[int, int, str]:
    shapes = engine.facts.shapes
    return (0, 0, engine.folder.name) if shapes is None else (shapes.max_seq_len, shapes.batch, engine.folder.name)


def _first_difference(found: Facts, wanted: Facts) -> str:
    """Return the first fact in which an engine differs from what would fit."""
    for field in dataclasses.fields(Facts):
        ours, theirs = getattr(wanted, field.name), getattr(found, field.name)
        if ours == theirs:
            continue
        if field.name == "bundle":
            return "made from other graphs or weights"
        if isinstance(ours, dict):
            name = next(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))
            return f"made with {name} {theirs.get(name, 'none')}, here is {ours.get(name, 'none')}"
        return f"made for {field.name} {theirs}, here is {ours}"
    raise AssertionError("engines do not differ")
