"""The two ONNX Runtime sessions of a bundle: how they are opened and what is checked before they are trusted."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock

from pop_runtime.chain import ChainedSession, Link
from pop_runtime.device_weights import upload_shared
from pop_runtime.engine import Engine, find_engine
from pop_runtime.errors import BackendError, ModelError, UsageError
from pop_runtime.graph_check import check_graph, check_hidden_states
from pop_runtime.manifest import Manifest, Segment
from pop_runtime.open_provider import nodes_by_provider, onnxruntime, open_on, require_provider
from pop_runtime.providers import CPU, HOST, Place, Target, shape_profiles
from pop_runtime.threads import check_threads, visible_cores

# Settings of each session. Each has its own threads, which spin for work while idle unless told not to.
# - Segments run one after another, dozens of times a second: threads spin while their segment runs and stop with it, or
#   after a millisecond. Without that limit those of a session just opened spin on: 9 sessions took 1005 ms of CPU, 649
#   with it, and runs took no longer (SmolLM2, 2 threads).
# - Of two whole graphs, prefill threads do not spin, so that they cannot take cores from the decode steps that follow.
#   It costs prefill little: 625 ms spinning, 641 ms not (SmolLM2, 511 tokens, 10 of 30 layers skipped, 2 cores).
# - Decode threads spin: a step is short and waking a thread is not. 26 ms a token spinning, 32 ms not.
# - UNPACKED leaves weights in the mapped file, which sessions share, instead of one repacked copy per session: on fp32
#   a little less memory than segments and a decode step 10-20 % slower (docs/experiments.md). Quantised weights stay
#   packed: their fast kernels exist for packed weights alone, a step would take 40 times as long.
SEGMENT_ENTRIES = {"session.force_spinning_stop": "1", "session.intra_op.spin_duration_us": "1000"}
PREFILL_ENTRIES = {"session.intra_op.allow_spinning": "0"}
DECODE_ENTRIES = {"session.intra_op.allow_spinning": "1"}
UNPACKED = {"session.disable_prepacking": "1"}


@dataclass(frozen=True)
class SessionPair:
    """Both graphs of a bundle, loaded."""

    prefill: onnxruntime.InferenceSession | ChainedSession
    decode: onnxruntime.InferenceSession | ChainedSession
    threads: int
    target: Target = CPU
    place: Place = HOST  # of the KV buffers
    nodes_by_provider: dict[str, dict[str, int]] = field(default_factory=dict)  # by graph
    sharing: str = "nothing"  # which weights both hold once, for people
    weights: tuple[onnxruntime.OrtValue, ...] = ()  # on a device, of both sessions: they have to live as long


def open_pair(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    low_memory: bool = False,
    target: Target = CPU,
    engine: Engine | None = None,
) -> SessionPair:
    """Return both graphs, each session with `threads` threads (None: the visible cores).

    Where the provider runs segments, a bundle that has them is two chains of them, which hold the kept layers once.
    With `low_memory` weights that are not quantised are left as they lie in the file, whole graphs sharing all of them.

    Args:
        folder: of the bundle.
        manifest: of the bundle.
        threads: on the CPU.
        low_memory: share all weights that are not quantised, for slower steps.
        target: provider and device.
        engine: what `pop-compile` made for it, in place of the bundle's graphs.

    Raises:
        UsageError: a number of threads out of range, or `low_memory` with an engine.
        ModelError: a graph is missing, or its inputs and outputs are not those of the manifest.
        BackendError: ONNX Runtime cannot load a graph, or not on the target alone.
    """
    check_threads(threads)
    if low_memory and engine is not None:
        raise UsageError("low_memory: expected no engine, found one, which runs as it was built; leave one out")
    count = threads or visible_cores()
    leaves_unpacked = low_memory and not manifest.is_quantized
    if manifest.segments and target.provider.runs_segments and not leaves_unpacked:
        pair = open_segments(folder, manifest, count, target, engine)
        for chain in (pair.prefill, pair.decode):
            check_hidden_states(chain, folder)
        check_graph(pair.prefill, manifest, str(folder / manifest.prefill_graph), has_logits=False)
        check_graph(pair.decode, manifest, str(folder / manifest.decode_graph), has_logits=True)
        return pair
    return open_graphs(folder, manifest, count, low_memory, target, engine)


def open_segments(
    folder: Path, manifest: Manifest, threads: int, target: Target = CPU, engine: Engine | None = None
) -> SessionPair:
    """Return both graphs as chains of segments, each of which is one session; arguments as for `open_pair`.

    Opening one uses a single thread, so as many are opened at once as there are threads.
    """
    place = _place(target, engine)

    def open_segment(segment: Segment) -> onnxruntime.InferenceSession:
        return open_session(folder / segment.graph, threads, SEGMENT_ENTRIES, target, manifest, engine)

    with ThreadPoolExecutor(min(threads, len(manifest.segments))) as pool:
        sessions = list(pool.map(open_segment, manifest.segments))
    opened = list(zip(manifest.segments, sessions, strict=True))
    prefill, decode = (
        ChainedSession(
            tuple(Link(at, part.hidden_in, part.hidden_out, part.graph) for part, at in opened if stage in part.stages),
            manifest.input_ids,
            place,
        )
        for stage in ("prefill", "decode")
    )
    nodes = {segment.graph: nodes_by_provider(session) for segment, session in opened}
    sharing = f"the kept layers, in {len(opened)} segments"
    return SessionPair(prefill, decode, threads, target, place, nodes, sharing)


def open_graphs(
    folder: Path,
    manifest: Manifest,
    threads: int,
    low_memory: bool = False,
    target: Target = CPU,
    engine: Engine | None = None,
) -> SessionPair:
    """Return one session for each of the two whole graphs; arguments as for `open_pair`."""
    sessions = []
    prefill, decode, is_quantized = PREFILL_ENTRIES, DECODE_ENTRIES, manifest.is_quantized
    if low_memory:
        prefill = {**prefill, **UNPACKED}
        decode = decode if is_quantized else {**decode, **UNPACKED}
    place = _place(target, engine)
    names = (manifest.prefill_graph, manifest.decode_graph)
    weights: dict[str, onnxruntime.OrtValue] = {}
    if place.memory != HOST.memory and not target.provider.makes_context:
        require_provider(target)  # says what is missing before anything is uploaded
        opened = [graph_path(folder, name, engine) for name in names]
        weights = upload_shared(opened, folder / manifest.weights, place)
    for name, entries, has_logits in zip(names, (prefill, decode), (False, True), strict=True):
        records = target.cuda_graphs and has_logits
        session = open_session(folder / name, threads, entries, target, manifest, engine, weights, records)
        check_graph(session, manifest, str(folder / name), has_logits)
        sessions.append(session)
    nodes = {name: nodes_by_provider(session) for name, session in zip(names, sessions, strict=True)}
    sharing = "nothing" if not low_memory else "what prefill reads" if is_quantized else "all weights, as in the file"
    if weights:
        sharing = f"what both read, {len(weights)} tensors on {place.memory} {place.device}"
    return SessionPair(sessions[0], sessions[1], threads, target, place, nodes, sharing, tuple(weights.values()))


def _place(target: Target, engine: Engine | None) -> Place:
    """Return where buffers lie, and the sizes that an engine prescribes."""
    return Place(target.provider.memory, target.device, None if engine is None else engine.facts.shapes)


def graph_path(folder: Path, name: str, engine: Engine | None) -> Path:
    """Return the file that is opened for a graph of the bundle: its own or the engine's."""
    return (folder if engine is None else engine.folder) / name


def engine_for(folder: Path, manifest: Manifest, target: Target, wanted: bool, verify: bool = True) -> Engine | None:
    """Return the engine to run: None where none is wanted and the provider runs the bundle's graphs as they are.

    Raises:
        BackendError: no engine fits.
        UsageError: the provider does not take the bundle's dialect.
    """
    require_dialect(manifest, target)
    if not wanted and not target.provider.needs_engine:
        return None
    return find_engine(folder, manifest, target, verify)


def require_dialect(manifest: Manifest, target: Target) -> None:
    """Raise UsageError unless the provider takes the bundle's dialect."""
    if manifest.dialect not in target.provider.dialects:
        raise UsageError(
            f"--ep {target.ep}: expected a bundle of dialect {' or '.join(target.provider.dialects)}, found "
            f"{manifest.dialect}; export it again with --dialect {target.provider.dialects[0]}"
        )


def open_session(
    path: Path,
    threads: int,
    entries: Mapping[str, str],
    target: Target = CPU,
    manifest: Manifest | None = None,
    engine: Engine | None = None,
    weights: Mapping[str, onnxruntime.OrtValue] | None = None,
    records: bool = False,
) -> onnxruntime.InferenceSession:
    """Return a session for one graph file; the provider is the one asked for or none.

    Args:
        path: of the graph in the bundle.
        threads: on the CPU.
        entries: settings of the session.
        target: provider and device.
        manifest: of the bundle; needed with an engine.
        engine: its file of the same name is opened instead.
        weights: initializers that take the place of those in the file, by name; they have to outlive the session.
        records: whether its runs are to be recorded, by a provider that can.

    Raises:
        ModelError: no such file.
        BackendError: ONNX Runtime refuses the file.
    """
    if not path.is_file():
        raise ModelError(f"{path}: expected an ONNX graph, found none; re-run pop-export")
    options = session_options(threads, entries)
    for name, value in (weights or {}).items():
        options.add_initializer(name, value)
    precision, profiles, graph = None, {}, str(graph_path(path.parent, path.name, engine))
    if engine is not None:
        assert manifest is not None
        precision, shapes = engine.facts.precision, engine.facts.shapes
        if shapes is not None:
            profiles = shape_profiles(manifest, shapes, path.name)
        if not target.provider.makes_context:
            # an optimised graph reads the bundle's weights, and needs no second optimisation
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = graph if engine is None or target.provider.makes_context else Path(graph).read_bytes()
    provider_options = target.provider.options(target.device, precision, profiles)
    if records and target.provider.records_runs is not None:
        provider_options[target.provider.records_runs] = "1"
    try:
        return open_on(target, content, options, provider_options)
    except BackendError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no base but Exception
        expected = "a graph that ONNX Runtime loads"
        if records:
            expected += " and whose runs CUDA can record (without --cuda-graphs they need not be)"
        raise backend_error(path.name, expected, error) from error


def session_options(threads: int, entries: Mapping[str, str]) -> onnxruntime.SessionOptions:
    """Return the settings that every session of the runtime has, and `entries`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: warnings would mix with the streamed text's terminal
    options.intra_op_num_threads = threads  # if left to ORT it pins threads, even to cores it may not use
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # kept per input shape, but the mask is longer at every step: never used again
    with _pool_lock:
        _share_memory_pool()
    options.add_session_config_entry("session.use_env_allocators", "1")
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


_pool_lock = Lock()  # sessions are opened by several threads at once


@cache
def _share_memory_pool() -> None:
    """Let sessions of this library take what a run needs in between from one pool, and not each from one of its own.

    Once in a process: a second registration would replace the pool under sessions that are being opened. SmolLM2 in
    int8-dynamic: segments take 1.07 times the memory of one graph, not 1.22 times.
    """
    arena, default = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    with suppress(Exception):  # refused: sessions have pools of their own
        onnxruntime.create_and_register_allocator(
            onnxruntime.OrtMemoryInfo("Cpu", arena, 0, default), onnxruntime.OrtArenaCfg(0, -1, -1, -1)
        )


def backend_error(place: str, expected: str, error: Exception) -> BackendError:
    """Return an error of ONNX Runtime as one line."""
    return BackendError(
        f"{place}: expected {expected}, found {' '.join(str(error).split())}; "
        f"re-run pop-export, or change onnxruntime {onnxruntime.__version__}"
    )
