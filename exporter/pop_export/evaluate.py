"""Measure a bundle's quality: what pop-eval does, from a loaded bundle and texts to figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pop_export.evaluation.retrieval import Retrieval, Task, make_tasks, run_tasks, summarise_tasks
from pop_export.evaluation.scores import Quality, joined, score_windows, split, summarise, work
from pop_export.evaluation.sides import BundleSide, Side
from pop_export.evaluation.text import Document, cut_windows
from pop_export.progress import progress
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Windows
from pop_runtime.model import Model
from pop_runtime.sequence import Prefill, windows_in_force

DEFAULT_RETRIEVAL_TOKENS = 512


@dataclass(frozen=True)
class EvalConfig:
    """What to measure; the defaults are those of `pop-eval`."""

    context: int = 384  # prompt tokens
    continuation: int = 128  # tokens scored after them
    windows: int = 8  # per file
    prefill: Prefill = "pop"
    sink_tokens: int | None = None  # None: the bundle's
    boundary_tokens: int | None = None  # None: the bundle's
    retrieval: bool = True
    retrieval_length: int | None = None  # tokens; None: 512, or as many as the model takes
    retrieval_keys: int = 8  # per depth
    batch: int = 8  # windows stepped together; changes speed and memory, not what is measured
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that no bundle could make sense of."""
        least = {"context": 2, "continuation": 1, "windows": 1, "retrieval_keys": 1, "batch": 1, "seed": 0}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag}: expected at least {minimum}, found {getattr(self, name)}")
        if self.retrieval_length is not None and self.retrieval_length < 1:
            raise UsageError(f"--retrieval-length: expected at least 1, found {self.retrieval_length}")


@dataclass(frozen=True)
class Evaluation:
    """Figures over everything and for each file."""

    overall: Quality
    files: dict[str, Quality]
    retrieval: Retrieval | None
    num_pruned_tokens: int  # of each prompt
    windows: Windows

    def as_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what `pop-eval --json` prints: the overall figures also at the top."""
        figures = dataclasses.asdict(self)
        return {
            **figures["overall"],
            "overall": figures["overall"],
            "files": figures["files"],
            "retrieval": figures["retrieval"],
            "num_pruned_tokens": self.num_pruned_tokens,
            "windows": figures["windows"],
            "settings": settings,
        }


def evaluate(model: Model, documents: Sequence[Document], config: EvalConfig, full: Side | None = None) -> Evaluation:
    """Return how far the bundle, its prompts read as `config.prefill` says, is from the full model.

    Args:
        model: the loaded bundle, with a tokenizer.
        documents: at least one; those it was calibrated on would flatter it.
        config: what to measure.
        full: the full side; None is the same bundle with `prefill="full"`.

    Raises:
        UsageError: a document is too short, or the windows do not fit the model's positions.
        BackendError: a session fails or gives no numbers.
    """
    windows = windows_in_force(model.manifest, config.sink_tokens, config.boundary_tokens, config.prefill)
    _check_positions(model, config)
    length = config.context + config.continuation
    cut = [cut_windows(document, length, config.windows, config.seed) for document in documents]
    tasks: list[Task] = []
    if config.retrieval:
        tasks = make_tasks(model, documents, _retrieval_length(model, config), config.retrieval_keys, config.seed)
    pruned, full = BundleSide(model, config.prefill, windows), full or BundleSide(model, "full", windows)
    rows = np.concatenate(cut)  # [N, context + continuation], of all files
    batches = [rows[at : at + config.batch] for at in range(0, len(rows), config.batch)]
    with progress("scoring", work(config.continuation) * len(batches)) as advance:
        scores = joined(score_windows(full, pruned, batch, config.context, advance) for batch in batches)
    of_files = split(scores, [len(windows) for windows in cut])
    num_pruned, retrieval = pruned.num_pruned, None
    if tasks:
        assert model.tokenizer is not None
        with progress("retrieval", 2 * len(tasks)) as advance:
            of_full = run_tasks(full, tasks, model.tokenizer, config.batch, advance)
            of_pruned = run_tasks(pruned, tasks, model.tokenizer, config.batch, advance)
        retrieval = summarise_tasks(tasks, of_full, of_pruned, "raw" if model.chat_template is None else "chat")
    files = {document.name: summarise(of_file) for document, of_file in zip(documents, of_files, strict=True)}
    return Evaluation(summarise(scores), files, retrieval, num_pruned, windows)


def _check_positions(model: Model, config: EvalConfig) -> None:
    limit, asked = model.manifest.max_positions, config.context + config.continuation
    if asked > limit:
        raise UsageError(
            f"--context, --continuation: expected at most {limit} tokens together (manifest.json), found {asked}"
        )


def _retrieval_length(model: Model, config: EvalConfig) -> int:
    """Return the prompt length of the retrieval task; the answer has to fit behind it."""
    limit = model.manifest.max_positions - 16
    length = config.retrieval_length or min(DEFAULT_RETRIEVAL_TOKENS, limit)
    if length > limit:
        raise UsageError(f"--retrieval-length: expected at most {limit} tokens (manifest.json), found {length}")
    return length
