"""A long-context task made on the spot: a key hidden in filler text, asked for at the end.

The answer is begun for the model ("The secret number for the harbour is"), because small models otherwise answer in
ways that say nothing of whether they can see the key: the full model has to be well above chance for the comparison
to mean anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pop_export.evaluation.scores import log_softmax
from pop_export.evaluation.sides import Side
from pop_export.evaluation.text import Document
from pop_runtime.errors import UsageError
from pop_runtime.model import Model
from pop_runtime.text import decode, encode

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NOUNS = ("harbour", "library", "garden", "castle", "station", "museum", "bridge", "market", "theatre", "island")
_FILLER = "\x00filler\x00"  # stands for the text in the rendered prompt, which is cut there


@dataclass(frozen=True)
class Task:
    """One prompt and the key it hides."""

    depth: float  # 0 is the start of the filler, 1 its end
    key: str  # five digits
    prompt: np.ndarray  # [S] int64; every task of a run has the same S
    answer: np.ndarray  # [n] int64, the key as the tokenizer writes it after the prompt


@dataclass(frozen=True)
class DepthResult:
    """One depth's tasks, both sides."""

    depth: float
    num_keys: int
    accuracy_full: float  # share of greedy answers that begin with the key
    accuracy_pruned: float
    key_logprob_full: float  # mean log-probability of the whole key, nats
    key_logprob_pruned: float


@dataclass(frozen=True)
class Retrieval:
    """The task over all depths."""

    length_tokens: int
    format: str  # "chat": through the bundle's template; "raw": as one text
    accuracy_full: float
    accuracy_pruned: float
    depths: tuple[DepthResult, ...]


def frame(model: Model, noun: str) -> tuple[str, str]:
    """Return what stands before the filler and what after it, up to where the key has to come."""
    question = f"What is the secret number for the {noun}?"
    lead = f"The secret number for the {noun} is"
    if model.chat_template is None:
        return "There is a secret number hidden in this text.\n\n", f"\n\nQuestion: {question}\nAnswer: {lead}"
    content = f"There is a secret number hidden in this text. Remember it.\n\n{_FILLER}\n\n{question}"
    before, found, after = model.render_prompt(content).partition(_FILLER)
    if not found:
        raise UsageError("retrieval: expected a chat template that keeps the message, found none; add --no-retrieval")
    return before, after + lead


def make_tasks(model: Model, documents: Sequence[Document], length: int, keys_per_depth: int, seed: int) -> list[Task]:
    """Return `keys_per_depth` tasks for each of `DEPTHS`, prompts of `length` tokens exactly.

    Raises:
        UsageError: the prompt leaves no room for filler, or no document is long enough to fill it.
    """
    assert model.tokenizer is not None
    random, tasks = np.random.default_rng(seed), list[Task]()
    for turn in range(keys_per_depth):
        for place, depth in enumerate(DEPTHS):
            document = documents[(turn + place) % len(documents)]  # each depth in each document in turn
            noun, key = NOUNS[random.integers(len(NOUNS))], str(random.integers(10_000, 100_000))
            tasks.append(_task(model, document, length, depth, noun, key, random))
    return tasks


def _task(
    model: Model, document: Document, length: int, depth: float, noun: str, key: str, random: np.random.Generator
) -> Task:
    """Return one task; pieces are encoded one by one, so that the prompt has the length asked for."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    before, after = frame(model, noun)
    first = [] if model.chat_template is not None else list(document.first)
    head, tail = first + encode(tokenizer, before, False), encode(tokenizer, after, False)
    needle = encode(tokenizer, f"\n\nThe secret number for the {noun} is {key}.\n\n", False)
    num_filler = length - len(head) - len(tail) - len(needle)
    least = length - num_filler + len(DEPTHS)
    if length < least:
        raise UsageError(f"--retrieval-length: expected at least {least} tokens, found {length}")
    if len(document.ids) < num_filler:
        raise UsageError(
            f"--data {document.name}: expected {num_filler} tokens of filler for the retrieval task, found "
            f"{len(document.ids)}; give a longer file, lower --retrieval-length or add --no-retrieval"
        )
    start = int(random.integers(0, len(document.ids) - num_filler + 1))
    filler = document.ids[start : start + num_filler].tolist()
    cut = round(depth * num_filler)
    prompt = head + filler[:cut] + needle + filler[cut:] + tail
    return Task(depth, key, np.array(prompt, np.int64), _key_ids(tokenizer, after, key))


def _key_ids(tokenizer: Tokenizer, after: str, key: str) -> np.ndarray:
    """Return the ids that the key adds to the prompt's end; at least its last token is counted."""
    whole, tail = encode(tokenizer, f"{after} {key}", False), encode(tokenizer, after, False)
    same = 0
    while same < min(len(tail), len(whole) - 1) and tail[same] == whole[same]:
        same += 1
    return np.array(whole[same:], np.int64)


def run_tasks(
    side: Side, tasks: Sequence[Task], tokenizer: Tokenizer, batch: int, advance: Callable[[int], None]
) -> list[tuple[bool, float]]:
    """Return for each task whether the greedy answer begins with the key, and the key's log-probability in nats."""
    results: list[tuple[bool, float]] = []
    for at in range(0, len(tasks), batch):
        group = tasks[at : at + batch]
        longest = max(len(task.answer) for task in group)
        first = side.start(np.stack([task.prompt for task in group]), longest + 1)  # [B, V]
        texts = _greedy_texts(side, first, longest + 1, tokenizer)
        side.rewind()
        logprobs = _key_logprobs(side, first, [task.answer for task in group])
        found = [text.lstrip().startswith(task.key) for text, task in zip(texts, group, strict=True)]
        results += list(zip(found, logprobs, strict=True))
        advance(len(group))
    return results


def _greedy_texts(side: Side, logits: np.ndarray, num_new: int, tokenizer: Tokenizer) -> list[str]:
    """Return the greedy continuation of each row as text."""
    chosen = []
    for index in range(num_new):
        chosen.append(logits.argmax(axis=1))
        if index < num_new - 1:
            logits = side.step(chosen[-1])
    return [decode(tokenizer, row.tolist()) for row in np.stack(chosen, axis=1)]


def _key_logprobs(side: Side, logits: np.ndarray, answers: Sequence[np.ndarray]) -> list[float]:
    """Return the log-probability of each row's answer; shorter ones are followed by tokens that do not count."""
    longest = max(len(answer) for answer in answers)
    tokens = np.stack([np.pad(answer, (0, longest - len(answer))) for answer in answers])  # [B, n]
    total = np.zeros(len(answers))
    for index in range(longest):
        if index:
            logits = side.step(tokens[:, index - 1])
        scored = log_softmax(logits)[np.arange(len(tokens)), tokens[:, index]]
        total += np.where([index < len(answer) for answer in answers], scored, 0.0)
    return total.tolist()


def summarise_tasks(
    tasks: Sequence[Task], full: Sequence[tuple[bool, float]], pruned: Sequence[tuple[bool, float]], format_name: str
) -> Retrieval:
    """Return accuracy and mean log-probability of both sides, by depth and over all tasks."""

    def mean(results: Sequence[tuple[bool, float]], part: int, depth: float | None = None) -> float:
        chosen = zip(tasks, results, strict=True)
        return float(np.mean([result[part] for task, result in chosen if depth in (None, task.depth)]))

    depths = tuple(
        DepthResult(
            depth, sum(task.depth == depth for task in tasks), mean(full, 0, depth), mean(pruned, 0, depth),
            mean(full, 1, depth), mean(pruned, 1, depth),
        )
        for depth in DEPTHS
    )  # fmt: skip
    return Retrieval(len(tasks[0].prompt), format_name, mean(full, 0), mean(pruned, 0), depths)
