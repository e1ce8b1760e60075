"""Calibration text: read it, cut it into windows of tokens, and put some of them aside.

Windows never overlap and each is used once, so what is kept aside is text that nothing was fitted on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from pop_export.calibration.sources import Source, Text, default_source, docstring_source, read_source
from pop_runtime.errors import UsageError

MIN_WINDOW_TOKENS = 4  # as --calibration-length: less has no prompt and response worth the name
PASSAGE_CHARS_PER_TOKEN = 16  # a passage holds about four windows of English, so windows spread over long texts
MAX_PASSAGES = 4096  # per source: what is read of a large data set at most


@dataclass(frozen=True)
class Samples:
    """Windows of token ids to calibrate on, and others kept aside to measure with; 1-D int64 each."""

    ids: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]  # shares no token position with `ids`
    description: str  # for the report: sources and counts
    sha256: str  # of all ids
    held_out_sources: tuple[str, ...] = ()  # where each of `held_out` comes from


def calibration_samples(
    tokenizer: Any,
    *,
    data: tuple[str, ...] = (),
    num_samples: int,
    length: int,
    seed: int,
    num_held_out: int = 0,
    offline: bool = False,
    with_docstrings: bool = False,
    length_flag: str = "--calibration-length",
) -> Samples:
    """Return windows of text as token ids, taken evenly from all sources, and further ones kept aside.

    The same arguments give the same samples, and `num_held_out` does not change which ones are calibrated on. Full
    windows are preferred; texts of less than `length` tokens are used, longest first, when those run out. Where there
    is too little text for all, fewer are returned, in the proportion asked for, and the description says so.

    Args:
        tokenizer: a transformers tokenizer. If it puts a bos token before text by itself, each sample begins with one.
        data: `.txt` or `.jsonl` files or data set ids (see `sources`); empty: the default corpus.
        num_samples: windows to calibrate on.
        length: tokens per window at most, bos included.
        seed: chooses the passages and the windows in them.
        num_held_out: windows kept aside.
        offline: refuse a source that would need the network.
        with_docstrings: let the default corpus hold docstrings as well.
        length_flag: what `length` comes from, for messages.

    Raises:
        UsageError: a source cannot be read, or has too little text for one sample (and one to keep aside, if asked).
    """
    sources = [read_source(item, tokenizer, offline=offline) for item in data] or [default_source(tokenizer)]
    if with_docstrings and not data:
        sources.append(docstring_source(tokenizer))
    sources = _without_repetition(sources)
    wanted = num_samples + num_held_out
    found = [
        list(islice(_windows(tokenizer, source, length, np.random.default_rng([seed, index])), wanted))
        for index, source in enumerate(sources)
    ]
    for source, of_source in zip(sources, found, strict=True):
        if not of_source:
            raise UsageError(
                f"{source.name}: too little text for one calibration sample of {MIN_WINDOW_TOKENS} tokens; add text"
            )
    chosen = _take_in_turns(found, wanted)  # (source, window)
    held_out = min(num_held_out, -(-num_held_out * len(chosen) // wanted))
    if held_out and held_out == len(chosen):
        raise UsageError(
            f"{', '.join(source.name for source in sources)}: enough text for one sample of {length} tokens, none to "
            f"keep aside for measuring; add text or lower {length_flag}"
        )
    num_used = len(chosen) - held_out
    windows = tuple(window for _, window in chosen)
    counts = [sum(index == source for source, _ in chosen) for index in range(len(sources))]
    return Samples(
        ids=windows[:num_used],
        held_out=windows[num_used:],
        description=_describe(sources, counts, num_used, held_out, length, wanted),
        sha256=_sha256(windows),
        held_out_sources=tuple(sources[index].name for index, _ in chosen[num_used:]),
    )


def _without_repetition(sources: Sequence[Source]) -> list[Source]:
    """Return the sources without texts that an earlier one has too: what is kept aside must not be fitted on."""
    seen: set[Text] = set()
    distinct = []
    for source in sources:
        texts = tuple(text for text in source.texts if text not in seen)
        if not texts:
            raise UsageError(
                f"--calibration-data {source.name}: expected text of its own, found only what is given before it; "
                "drop it"
            )
        seen.update(texts)
        distinct.append(Source(source.name, texts))
    return distinct


def _take_in_turns(found: Sequence[Sequence[np.ndarray]], wanted: int) -> list[tuple[int, np.ndarray]]:
    """Return up to `wanted` windows, one of each source in turn while it has any, with the source's index."""
    longest = max(len(windows) for windows in found)
    in_turns = (
        (index, windows[turn]) for turn in range(longest) for index, windows in enumerate(found) if turn < len(windows)
    )
    return list(islice(in_turns, wanted))


def _windows(tokenizer: Any, source: Source, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield disjoint windows: one of each passage in random order, then a second of each; short texts at the end."""
    passages = [passage for text in source.texts for passage in _passages(text, length * PASSAGE_CHARS_PER_TOKEN)]
    later: list[list[np.ndarray]] = []
    short: list[np.ndarray] = []
    for index in rng.permutation(len(passages))[:MAX_PASSAGES]:
        prefix, tokens = _encode(tokenizer, passages[index])
        step = length - len(prefix)
        if len(tokens) < step:
            short.append(np.concatenate([prefix, tokens]))
            continue
        # A random start, so that not every window begins where a passage begins.
        starts = np.arange(rng.integers(len(tokens) % step + 1), len(tokens) - step + 1, step)
        windows = [np.concatenate([prefix, tokens[start : start + step]]) for start in rng.permutation(starts)]
        later.append(windows[1:])
        yield windows[0]
    while later := [windows for windows in later if windows]:
        yield from (windows.pop() for windows in later)
    yield from sorted((tokens for tokens in short if len(tokens) >= MIN_WINDOW_TOKENS), key=len, reverse=True)


def _passages(text: Text, num_chars: int) -> Iterator[Text]:
    """Yield the text in pieces of at most `num_chars` characters, cut at white space where there is some."""
    start = 0
    while start < len(text.text):
        end = start + num_chars
        if end < len(text.text):
            space = max(text.text.rfind(mark, start + num_chars // 2, end) for mark in (" ", "\n"))
            end = space if space > 0 else end
        yield Text(text.text[start:end], text.with_bos)
        start = end


def _encode(tokenizer: Any, text: Text) -> tuple[np.ndarray, np.ndarray]:
    """Return what every window of the text begins with (a bos token or nothing) and the text's tokens, both int64."""
    tokens = tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    prefix = [tokenizer.bos_token_id] if text.with_bos else []
    return np.array(prefix, dtype=np.int64), np.array(tokens, dtype=np.int64)


def _describe(
    sources: Sequence[Source], counts: Sequence[int], used: int, held_out: int, length: int, wanted: int
) -> str:
    """Return one line for the report: what text, how many windows, and whether it was less than asked for."""
    names = ", ".join(
        source.name if len(sources) == 1 else f"{source.name} ({count})"
        for source, count in zip(sources, counts, strict=True)
    )
    short = "" if used + held_out == wanted else f"; {wanted} were asked for, the text holds no more"
    return f"{names}; {used} samples of up to {length} tokens, {held_out} kept aside{short}"


def _sha256(windows: Sequence[np.ndarray]) -> str:
    """Return the sha256 of all token ids; lengths count, so that windows cannot run into each other unseen."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(np.array([len(window), *window], dtype="<i8").tobytes())
    return digest.hexdigest()
