"""Build the engine of a bundle for one device: all or nothing, with a log of the build beside it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pop_runtime.engine import Engine, engine_folder, graph_names, make_facts, read_record, write_record
from pop_runtime.errors import BackendError, GateError
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.machine import describe_machine
from pop_runtime.manifest import Manifest, describe_files
from pop_runtime.open_provider import nodes_by_provider, open_on
from pop_runtime.providers import CAPACITY, Shapes, Target, shape_profiles
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import backend_error, open_pair, require_dialect, session_options
from pop_runtime.staging import staged_folder
from pop_runtime.threads import visible_cores

LOG = "build.log"
HEARTBEAT_S = 15.0
Say = Callable[[str], None]


def build_engine(
    bundle: Path,
    manifest: Manifest,
    target: Target,
    precision: str | None,
    shapes: Shapes | None,
    force: bool,
    say: Say,
) -> tuple[Engine, bool]:
    """Return the engine of these facts, and whether it was built now; one that is there already is kept.

    Args:
        bundle: folder of the bundle.
        manifest: of it, its files verified.
        target: provider and device.
        precision: for the provider to compute in; None: the bundle's own.
        shapes: that the engine is built for; None: any.
        force: build it again.
        say: takes lines of progress.

    Raises:
        UsageError: the provider does not take the bundle's dialect.
        BackendError: provider or device are missing, or the build fails; nothing is left of it.
        GateError: the engine gives no finite numbers; nothing is left of it.
        ModelError: the folder cannot be written.
    """
    require_dialect(manifest, target)
    machine = describe_machine(target)
    facts = make_facts(manifest, target, machine, precision, shapes)
    folder = engine_folder(bundle, facts, machine)
    if folder.is_dir() and not force:
        return read_record(folder), False
    started = time.monotonic()
    with staged_folder(folder, "engine") as staging:
        nodes = {}
        for name in graph_names(manifest, target):
            with _progress(f"{name} for {target.ep} on {machine.device}", say), _logged(staging / LOG):
                nodes[name] = _build_graph(bundle, manifest, name, staging, target, precision, shapes)
        seconds = round(time.monotonic() - started, 2)
        names = [path.name for path in staging.iterdir()]
        engine = Engine(staging, facts, describe_files(staging, names), seconds, nodes)
        with _progress("a first run", say):
            _try(bundle, manifest, target, engine)
        write_record(engine, staging)
    return read_record(folder), True


def _build_graph(
    bundle: Path,
    manifest: Manifest,
    name: str,
    staging: Path,
    target: Target,
    precision: str | None,
    shapes: Shapes | None,
) -> dict[str, int]:
    """Write the engine's file of one graph and return how many nodes each provider runs."""
    options = session_options(visible_cores(), {})
    options.log_severity_level = 1  # into the log
    profiles = {}
    if shapes is not None:
        profiles = shape_profiles(manifest, shapes, name)
        # TensorRT updates KV buffers in place if their length is a constant
        options.add_free_dimension_override_by_name(CAPACITY, shapes.max_seq_len)
    if target.provider.makes_context:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", str(staging / name))
        options.add_session_config_entry("ep.context_embed_mode", "0")  # a graph is limited to 2 GB, its engine is not
    else:
        options.optimized_model_filepath = str(staging / name)
    provider_options = target.provider.options(target.device, precision, profiles)
    try:
        session = open_on(target, str(bundle / name), options, provider_options)
    except BackendError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no base but Exception
        raise backend_error(name, f"a graph that {target.provider.ort_name} builds", error) from error
    if not (staging / name).is_file():
        raise BackendError(f"{name}: expected an engine of {target.provider.ort_name}, found that it wrote none")
    return nodes_by_provider(session)


def _try(bundle: Path, manifest: Manifest, target: Target, engine: Engine) -> None:
    """Run both graphs of an engine once, as the runtime will."""
    pair = open_pair(bundle, manifest, None, target=target, engine=engine)
    sequence = Sequence(pair, allocate_cache(manifest, 1, min(8, manifest.max_positions), pair.place))
    ids = [1 % manifest.vocab_size] * min(3, sequence.capacity - 1)
    sequence.feed(ids, "prefill")
    logits = sequence.feed(ids[:1], "decode")
    if logits is None or not np.isfinite(logits).all():
        raise GateError(f"--ep {target.ep}: expected finite logits of a first run, found none; use another --precision")


@contextmanager
def _logged(log: Path) -> Iterator[None]:
    """Append what libraries write to the process's stderr to a file while the context is open."""
    sys.stderr.flush()
    saved = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextmanager
def _progress(what: str, say: Say) -> Iterator[None]:
    """Say that work begins, that it goes on every quarter of a minute, and how long it took."""
    done, started = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            say(f"{what}: {time.monotonic() - started:.0f} s so far")

    say(f"{what} ...")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
        say(f"{what}: {time.monotonic() - started:.1f} s")
    finally:
        done.set()
        thread.join()
