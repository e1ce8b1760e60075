"""What one answer is made with: the options a caller gives, and the request with every default filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pop_runtime.checks import check_least
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Manifest, Windows
from pop_runtime.sampling import SamplingSettings, settings_in_force
from pop_runtime.sequence import CHUNK_TOKENS, Prefill, check_prefill, windows_in_force
from pop_runtime.stop_strings import checked_strings, stored_strings

DEFAULT_NEW_TOKENS = 256


class Options(TypedDict, total=False):
    """The keyword arguments of everything that generates; what is left out or None takes the default.

    max_new_tokens: 256; fewer fit if prompt and answer reach the capacity.
    prefill: "pop" (default) leaves the planned layers out while reading the prompt, "full" does not.
    sink_tokens, boundary_tokens: first tokens of the sequence and last of the turn read at full depth; the bundle's.
    prefill_chunk_tokens: longest piece that is read at once; changes memory and speed, not what is computed.
    raw: takes text as it is, without the chat template.
    temperature: 0 is greedy, above 0 samples; generation_config.json decides.
    top_p, top_k, min_p: which tokens may be drawn; generation_config.json's, else no limit.
    repetition_penalty: above 0; 1 is none. Counts the prompt's tokens too; generation_config.json's.
    seed: of the random numbers, 0..2^64-1; one is drawn, which `Generation.stats` shows.
    stop: text that ends the answer and is not part of it, one string or several; generation_config.json's.
    logprobs: give each token its log-probability and those of so many likeliest ids; None gives none.
    prompt_logprobs: the prompt's log-probabilities too, one step per token; needs prefill="full".
    ignore_eos: goes on past end tokens, for measuring.
    """

    max_new_tokens: int | None
    prefill: Prefill
    sink_tokens: int | None
    boundary_tokens: int | None
    prefill_chunk_tokens: int | None
    raw: bool
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: bool
    ignore_eos: bool


@dataclass(frozen=True)
class Request:
    """Everything that decides an answer, defaults filled in."""

    prompt_token_ids: tuple[int, ...]  # the turn's new tokens; none: the answer goes on from the sequence as it is
    max_new_tokens: int  # what was asked for
    limit_tokens: int  # what the sequence has room for, at most `max_new_tokens`
    prefill: Prefill
    windows: Windows
    prefill_chunk_tokens: int
    sampling: SamplingSettings
    stop: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: bool
    end_token_ids: frozenset[int]  # empty when end tokens are ignored
    threads: int

    def in_force(self) -> dict[str, Any]:
        """Return the settings for people and programs to read."""
        return {
            "prefill": self.prefill,
            **dataclasses.asdict(self.windows),
            "prefill_chunk_tokens": self.prefill_chunk_tokens,
            **dataclasses.asdict(self.sampling),
            "max_new_tokens": self.max_new_tokens,
            "end_token_ids": sorted(self.end_token_ids),
            "stop": list(self.stop),
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "threads": self.threads,
        }


@dataclass(frozen=True)
class Defaults:
    """What a bundle and how it was loaded say about every request."""

    manifest: Manifest
    generation_config: Mapping[str, Any]
    has_tokenizer: bool
    threads: int


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError, as Python does, for a keyword argument that does not exist."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"got an unexpected keyword argument {name!r}; known: {', '.join(Options.__annotations__)}")


def make_request(
    defaults: Defaults, options: Options, ids: Sequence[int], num_past: int = 0, capacity: int | None = None
) -> Request:
    """Return the request for a turn, with every default filled in and every limit checked.

    Args:
        defaults: of the loaded bundle.
        options: what the caller gave.
        ids: the turn's new tokens, checked.
        num_past: tokens of the sequence before them.
        capacity: of the sequence; None: as many as the model has positions.

    Raises:
        UsageError: an option out of range, windows that the bundle's fit does not cover, or a prompt that does not fit.
        ModelError: generation_config.json holds a value out of range.
    """
    manifest = defaults.manifest
    asked = _given(options, "max_new_tokens", DEFAULT_NEW_TOKENS)
    check_least("max_new_tokens", asked, 1)
    prefill = options.get("prefill") or "pop"
    check_prefill(prefill)
    windows = windows_in_force(manifest, options.get("sink_tokens"), options.get("boundary_tokens"), prefill)
    chunk_tokens = _given(options, "prefill_chunk_tokens", CHUNK_TOKENS)
    check_least("prefill_chunk_tokens", chunk_tokens, 1)
    logprobs = options.get("logprobs")
    if logprobs is not None:
        check_least("logprobs", logprobs, 0)
        if logprobs > manifest.vocab_size:
            raise UsageError(f"logprobs: expected at most the vocabulary's {manifest.vocab_size}, found {logprobs}")
    if options.get("prompt_logprobs") and prefill == "pop":
        raise UsageError(
            "prompt_logprobs: expected prefill='full', found 'pop'; the pruned graph has no head and its positions "
            "predict nothing; read the prompt in full to have them"
        )
    room = manifest.max_positions if capacity is None else min(capacity, manifest.max_positions)
    total = num_past + len(ids)
    check_room(total, room)
    sampling = settings_in_force(
        defaults.generation_config, temperature=options.get("temperature"), top_k=options.get("top_k"),
        top_p=options.get("top_p"), min_p=options.get("min_p"), seed=options.get("seed"),
        repetition_penalty=options.get("repetition_penalty"),
    )  # fmt: skip
    return Request(
        prompt_token_ids=tuple(ids), max_new_tokens=asked, limit_tokens=min(asked, room - total), prefill=prefill,
        windows=windows, prefill_chunk_tokens=chunk_tokens, sampling=sampling, stop=_stop(defaults, options),
        logprobs=logprobs, prompt_logprobs=bool(options.get("prompt_logprobs")), threads=defaults.threads,
        end_token_ids=frozenset() if options.get("ignore_eos") else frozenset(manifest.eos_token_ids),
    )  # fmt: skip


def check_room(num_tokens: int, room: int) -> None:
    """Raise UsageError unless at least one more token fits behind so many."""
    if num_tokens >= room:
        raise UsageError(
            f"prompt: expected fewer than {room} tokens, so that one more fits, found {num_tokens}; shorten it"
        )


def _given(options: Options, name: str, default: int) -> int:
    """Return an option, or the default if it is left out or None."""
    value = options.get(name)
    return default if value is None else value  # type: ignore[return-value]


def _stop(defaults: Defaults, options: Options) -> tuple[str, ...]:
    """Return the stop strings in force; those of generation_config.json need a tokenizer to have any effect."""
    given = options.get("stop")
    if given is not None:
        strings = checked_strings(given, "stop", UsageError)
        if strings and not defaults.has_tokenizer:
            raise UsageError("stop: expected a tokenizer to match text with, found none; end at ids instead")
        return strings
    return stored_strings(defaults.generation_config) if defaults.has_tokenizer else ()
