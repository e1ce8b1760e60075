"""One benchmark: what is asked for, checked; which engines run; and everything that was found."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pop_runtime.bench.agreement import LEAST_TOP1, LONGEST_PROBE, TEXT, agreement_of, probes_of
from pop_runtime.bench.engines import Run
from pop_runtime.bench.peers import PEERS
from pop_runtime.bench.processes import Worker
from pop_runtime.bench.rounds import Line, Sample, figures_of, pairs_of, prompt_of, ratios_to_peers, run_rounds
from pop_runtime.errors import UsageError
from pop_runtime.flags import check_windows_have_effect
from pop_runtime.manifest import Manifest, Windows, read_manifest, verify_files
from pop_runtime.open_provider import require_provider
from pop_runtime.prompt_work import PromptWork, speedup_limit
from pop_runtime.providers import CPU, Target
from pop_runtime.sequence import check_prefill, windows_in_force
from pop_runtime.sessions import require_dialect
from pop_runtime.text import encode, open_tokenizer
from pop_runtime.threads import check_threads, visible_cores

MEMORY_TOKENS = 128  # prompt after which memory is read
OURS = "pop-export"  # worker of the bundle
GivenPeer = tuple[str, Path | None]  # key of PEERS, and what it loads
_COUNTS = [field.name for field in dataclasses.fields(PromptWork)]
Limit = Callable[[int], float | None]  # tokens of a prompt -> how much faster a pruned prefill can be


@dataclass(frozen=True)
class Settings:
    """What `pop-bench` was asked for."""

    folder: Path
    prompt_lengths: tuple[int, ...] = (512, 1024, 2048)
    num_new: int = 64
    num_rounds: int = 5
    threads: int | None = None
    prefills: tuple[str, ...] = ("pop", "full")
    peers: tuple[GivenPeer, ...] = ()
    low_memory: bool = False
    target: Target = CPU
    compiled: bool = False  # run what pop-compile made
    clock: str = "wall"  # key of engines.CLOCKS
    sink_tokens: int | None = None  # None: the bundle's
    boundary_tokens: int | None = None  # None: the bundle's

    def check(self, manifest: Manifest) -> None:
        """Raise UsageError for the first setting that cannot be measured, BackendError without the provider."""
        require_dialect(manifest, self.target)
        require_provider(self.target)
        for kind in self.prefills:
            check_prefill(kind)
        check_windows_have_effect(self.sink_tokens, self.boundary_tokens, has_pruned="pop" in self.prefills)
        self.windows(manifest)
        if self.low_memory and (self.compiled or self.target.provider.needs_engine):
            raise UsageError("--low-memory: expected no engine, found one, which runs as it was built; leave it out")
        check_threads(self.threads, "--threads")
        counts = {"--new-tokens": self.num_new, "--repeat": self.num_rounds}
        for flag, count in (*counts.items(), *(("--prompt-lengths", length) for length in self.prompt_lengths)):
            if count < 1:
                raise UsageError(f"{flag}: expected at least 1, found {count}")
        if self.clock == "cpu" and self.threads != 1:
            raise UsageError("--clock cpu: expected --threads 1, since the time of all threads is counted; add it")
        if max(self.prompt_lengths) + self.num_new > manifest.max_positions:
            raise UsageError(
                f"--prompt-lengths: expected at most {manifest.max_positions - self.num_new} tokens, so that "
                f"{self.num_new} more fit, found {max(self.prompt_lengths)}"
            )
        for name, _ in self.peers:
            if name not in PEERS:
                raise UsageError(f"--peers: expected some of {', '.join(PEERS)}, found {name!r}")
        lists = {"--prefill": self.prefills, "--prompt-lengths": self.prompt_lengths, "--peers": self.peers}
        for flag, entries in lists.items():
            if len(set(entries)) < len(entries):  # their times would be taken for those of one
                raise UsageError(f"{flag}: expected each entry once, found one twice; drop it")

    def windows(self, manifest: Manifest) -> Windows:
        """Return the windows of every turn; raise UsageError for any that the bundle cannot have."""
        return windows_in_force(manifest, self.sink_tokens, self.boundary_tokens)


def measure(settings: Settings, say: Callable[[str], None]) -> tuple[dict[str, Any], list[Sample]]:
    """Return everything that was found, and each single sample.

    Args:
        settings: what to measure.
        say: takes one line of progress.

    Raises:
        UsageError: a setting that cannot be measured.
        ModelError: the folder is no bundle.
        BackendError: an engine does not run.
    """
    manifest = read_manifest(settings.folder)
    settings.check(manifest)
    verify_files(settings.folder, manifest)  # once, for all workers
    limit = _limit(settings.folder, settings.windows(manifest), say)
    threads = settings.threads or visible_cores()
    prompts = [prompt_of(length, manifest.vocab_size) for length in settings.prompt_lengths]
    peers = labelled(settings.peers)
    missing = [{"peer": label, "reason": reason} for label, reason in _missing(peers)]
    for entry in missing:
        say(f"missing: {entry['peer']}: {entry['reason']}")
        del peers[entry["peer"]]
    say("memory")
    memory = _memory(settings, manifest, threads)
    lines, specs = _lines(settings, threads, peers)
    with ExitStack() as stack:
        workers = {}
        for name, spec in specs.items():
            say(f"loading {name}")
            workers[name] = stack.enter_context(Worker(spec))

        def ask(line: Line, prompt: list[int], num_new: int = settings.num_new) -> Run:
            answer = workers[line.worker].ask(prompt=prompt, num_new=num_new, prefill=line.prefill)
            return Run(answer["first_ms"], tuple(answer["step_ms"]), tuple(answer["tokens"]))

        def ask_aloud(line: Line, prompt: list[int]) -> Run:
            say(f"{line.label}, {len(prompt)} tokens")
            return ask(line, prompt)

        say("agreement")
        probes = _probes(settings.folder, manifest)
        agreements = agreement_of(ask, lines, Line("full", OURS), probes)
        for found in agreements:
            if found.top1 < LEAST_TOP1:
                say(f"{found.label}: {found.top1:.0%} of the likeliest tokens are the bundle's: is it the same model?")
        samples = run_rounds(ask_aloud, lines, prompts, settings.num_rounds)
        engines = {name: {**worker.facts, **worker.ask()} for name, worker in workers.items()}
    figures = figures_of(samples)
    report = {
        "bundle": str(settings.folder),
        "model": manifest.model,
        "precision": manifest.precision,
        "skipped_layers": list(manifest.plan.skipped_layers),
        "num_layers": manifest.plan.num_layers,
        "windows": dataclasses.asdict(settings.windows(manifest)),
        "threads": threads,
        "clock": settings.clock,
        "num_new_tokens": settings.num_new,
        "num_rounds": settings.num_rounds,
        "low_memory": settings.low_memory,
        "ep": settings.target.ep,
        "device": settings.target.device,
        "cuda_graphs": settings.target.cuda_graphs,
        "engines": engines,
        "missing": missing,
        "agreement": [dataclasses.asdict(found) for found in agreements],
        "figures": [dataclasses.asdict(figure) for figure in figures],
        "pruned_against_full": _ratios(settings, limit, samples),
        "ours_over_peers": [dataclasses.asdict(ratio) for ratio in ratios_to_peers(samples, OURS)],
        "memory": memory,
    }
    return report, samples


def _missing(peers: dict[str, GivenPeer]) -> Iterator[tuple[str, str]]:
    """Yield the peers that cannot be measured, each with what would help."""
    for label, (name, path) in peers.items():
        peer = PEERS[name]
        if importlib.util.find_spec(peer.module) is None:
            yield label, f"the package is not installed; {peer.install}"
        elif path is None or not path.exists():
            found = "no path was given" if path is None else f"there is no {path}"
            yield label, f"{found}; give {name}=PATH, {peer.model}"


def labelled(peers: Sequence[GivenPeer]) -> dict[str, GivenPeer]:
    """Return the peers by what each is called: its engine and the last name of its model, or all of the path.

    All of it where last names are equal: the same engine may be measured with several models.
    """
    short = [name if path is None else f"{name} ({path.name})" for name, path in peers]
    return {
        label if short.count(label) == 1 else f"{name} ({path})": (name, path)
        for label, (name, path) in zip(short, peers, strict=True)
    }


def _lines(
    settings: Settings, threads: int, peers: dict[str, GivenPeer]
) -> tuple[list[Line], dict[str, dict[str, Any]]]:
    """Return the lines to measure and, by worker, what each process loads."""
    lines = [*(_line(kind) for kind in settings.prefills), *(Line(label, label) for label in peers)]
    specs = {OURS: _bundle_spec(settings, threads)}
    most = max(max(settings.prompt_lengths) + settings.num_new, LONGEST_PROBE)
    for label, (name, path) in peers.items():
        own = {"engine": name, "path": str(path), "max_tokens": most}
        specs[label] = {**own, "threads": threads, "clock": settings.clock}
    return lines, specs


def _bundle_spec(settings: Settings, threads: int, graphs: str = "both") -> dict[str, Any]:
    return {
        "engine": "bundle", "path": str(settings.folder), "threads": threads, "low_memory": settings.low_memory,
        "clock": settings.clock, "graphs": graphs, "compiled": settings.compiled,
        "target": dataclasses.asdict(settings.target),
        "sink_tokens": settings.sink_tokens, "boundary_tokens": settings.boundary_tokens,
    }  # fmt: skip


def _probes(folder: Path, manifest: Manifest) -> list[list[int]]:
    """Return prompts of plain text; of random ids where the bundle has no tokenizer."""
    if manifest.tokenizer is None:
        return probes_of(prompt_of(256, manifest.vocab_size), manifest.max_positions)
    tokenizer = open_tokenizer(folder / manifest.tokenizer)
    return probes_of(encode(tokenizer, TEXT, add_special_tokens=False), manifest.max_positions)


def _memory(settings: Settings, manifest: Manifest, threads: int) -> dict[str, Any]:
    """Return the memory of the decode graph alone and of both graphs, each in a process of its own.

    Read before any other engine runs: a page that two processes map counts half for each.
    """
    found: dict[str, Any] = {}
    prompt = prompt_of(min(MEMORY_TOKENS, manifest.max_positions - 2), manifest.vocab_size)
    for name, graphs in (("one_graph", "decode"), ("both_graphs", "both")):
        with Worker(_bundle_spec(settings, threads, graphs)) as worker:
            worker.ask(prompt=prompt, num_new=2, prefill="full")
            if graphs == "both":
                worker.ask(prompt=prompt, num_new=2, prefill="pop")
            found[name] = {**worker.ask(), "load_ms": worker.facts["load_ms"]}
    both, one = (found[name]["proportional_bytes"] for name in ("both_graphs", "one_graph"))
    return {**found, "both_over_one": None if both is None or one is None else both / one}


def _ratios(settings: Settings, limit: Limit, samples: list[Sample]) -> list[dict[str, Any]]:
    """Return full over pruned time to first token by prompt length, and the most that counting work allows.

    A ratio is the median of the rounds' own, so that a machine that drifts between rounds does not count.
    """
    found = []
    for length in settings.prompt_lengths if set(settings.prefills) >= {"pop", "full"} else ():
        pairs = pairs_of(samples, _line("full"), _line("pop"), length)
        measured = median(full.first_ms / pruned.first_ms for full, pruned in pairs)
        found.append({"num_prompt": length, "measured": measured, "limit": limit(length)})
    return found


def _line(kind: str) -> Line:
    """Return the bundle's line with prefill of one kind."""
    return Line(f"pop-export, {kind} prefill", OURS, kind)


def _limit(folder: Path, windows: Windows, say: Callable[[str], None]) -> Limit:
    """Return the cost model of the bundle's report.json under some windows; a bundle without one has no limit.

    One that does not fit is said and counts as none: the times are worth having without it.
    """
    path = folder / "report.json"
    try:
        work = json.loads(path.read_text(encoding="utf-8")).get("work") if path.is_file() else None
        if work is None:
            return lambda num_tokens: None
        full, pruned = (PromptWork(**{key: float(work[kind][key]) for key in _COUNTS}) for kind in ("full", "pruned"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        say(
            f"no limit: {path}: expected the work of both prefills as pop-export counts it, found "
            f"{type(error).__name__}: {error}"
        )
        return lambda num_tokens: None
    return lambda num_tokens: speedup_limit(full, pruned, windows, num_tokens)
