"""From logits to the next token: the settings in force, the logit processors and the draw.

The processors are those of transformers, in its order: repetition penalty, temperature, top-k, top-p, min-p. The
random numbers are SplitMix64, which fits in a few lines of any language, so that one seed gives one text everywhere.
docs/runtime.md states each step for other languages.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from pop_runtime.errors import BackendError, ModelError, PopError, UsageError

# Settings that change what transformers generates and that this runtime does not apply, with their neutral value.
_UNKNOWN_SETTINGS: dict[str, object] = {
    "num_beams": 1, "typical_p": 1, "top_h": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "min_length": 0,
    "min_new_tokens": 0, "no_repeat_ngram_size": 0, "penalty_alpha": 0, "guidance_scale": 1, "suppress_tokens": (),
    "begin_suppress_tokens": (), "bad_words_ids": (), "sequence_bias": (), "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": (),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingSettings:
    """How the next token is chosen."""

    do_sample: bool = False  # False: greedy, the highest logit
    temperature: float = 1.0  # > 0; divides the logits
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # in (0, 1]; 1: no limit
    repetition_penalty: float = 1.0  # > 0; 1: none
    seed: int = 0  # 0..2^64-1
    min_p: float = 0.0  # in [0, 1], of the highest probability; 0: no limit


def settings_in_force(
    generation_config: Mapping[str, Any],
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> SamplingSettings:
    """Return the settings of `generation_config.json`, overridden by those arguments that are not None.

    A temperature of 0 is greedy, a given temperature above 0 samples; else `do_sample` of the file decides. Without
    a seed one is drawn, so that the settings shown always reproduce the text.

    Raises:
        UsageError: an argument is out of its range.
        ModelError: a value of the file is.
    """
    arguments = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    for name, value in (*arguments.items(), ("seed", seed)):
        if value is not None:
            _check(name, value, name, UsageError)
    stored = {name: generation_config[name] for name in arguments if generation_config.get(name) is not None}
    for name, value in stored.items():
        _check(name, value, f"generation_config.json, {name}", ModelError)
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(
            f"generation_config.json, do_sample: expected true or false, found {do_sample!r}; mend the file"
        )
    merged = {**stored, **{name: value for name, value in arguments.items() if value is not None}}
    heat = float(merged.get("temperature", 1.0))
    sampled = heat > 0 and (bool(do_sample) or temperature is not None)
    if seed is None:
        seed = secrets.randbits(32) if sampled else 0
    return SamplingSettings(
        do_sample=sampled,
        temperature=heat or 1.0,
        top_k=int(merged.get("top_k", 0)),
        top_p=float(merged.get("top_p", 1.0)),
        repetition_penalty=float(merged.get("repetition_penalty", 1.0)),
        seed=int(seed),
        min_p=float(merged.get("min_p", 0.0)),
    )


def unknown_settings(generation_config: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that would change the text in transformers and that this runtime does not apply."""
    return [
        name for name, neutral in _UNKNOWN_SETTINGS.items()
        if generation_config.get(name) not in (None, neutral, [], {}) and generation_config[name] is not False
    ]  # fmt: skip


def process_logits(logits: np.ndarray, seen: np.ndarray, settings: SamplingSettings) -> np.ndarray:
    """Return the logits that softmax turns into the distribution to draw from; removed tokens are -inf.

    Args:
        logits: [V] float32.
        seen: [V] bool, the tokens of prompt and text so far.
        settings: with `do_sample`, else only the repetition penalty is applied.

    Returns:
        [V] float64, shifted so that the highest is 0 when sampling.
    """
    scores = logits.astype(np.float64)
    if settings.repetition_penalty != 1.0:
        penalty, largest = settings.repetition_penalty, sys.float_info.max
        with np.errstate(over="ignore"):
            scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        scores = np.clip(scores, -largest, largest)  # the difference of two infinities is no number
    if not settings.do_sample:
        return scores
    with np.errstate(over="ignore"):  # to -inf, which is what is removed
        scores = (scores - scores.max()) / settings.temperature
    if 0 < settings.top_k < len(scores):
        scores[scores < np.partition(scores, -settings.top_k)[-settings.top_k]] = -np.inf
    if settings.top_p < 1.0:
        ascending = np.argsort(scores, kind="stable")
        removed = np.cumsum(_softmax(scores[ascending])) <= 1.0 - settings.top_p
        removed[-1] = False
        scores[ascending[removed]] = -np.inf
    if settings.min_p > 0:
        scores[scores < math.log(settings.min_p)] = -np.inf  # the highest score is 0
    return scores


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the natural logarithms of the softmax of logits [V] float32, as [V] float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    return scores - math.log(np.exp(scores).sum())


def likeliest(scores: np.ndarray, count: int) -> list[int]:
    """Return the ids of the `count` highest scores [V], highest first, the lowest id first among equals."""
    if count == 0:
        return []
    candidates = np.flatnonzero(scores >= np.partition(scores, -count)[-count])  # more than `count` only by ties
    order = np.argsort(-scores[candidates], kind="stable")[:count]
    return [int(token) for token in candidates[order]]


class Sampler:
    """Chooses the tokens of one row; remembers which ids were seen and where its random numbers are."""

    def __init__(self, settings: SamplingSettings, vocab_size: int, seen: Iterable[int]) -> None:
        self.settings = settings
        self._seen = np.zeros(vocab_size, bool)
        self._seen[list(seen)] = True
        self._state = settings.seed

    def choose(self, logits: np.ndarray) -> int:
        """Return the next token for logits [V] float32, and count it as seen.

        Raises:
            BackendError: a logit is NaN or infinite.
        """
        if not math.isfinite(float(logits.max())):
            raise BackendError(
                "decode graph, logits: expected finite numbers, found NaN or infinity; re-run pop-export"
            )
        if self.settings.do_sample or self.settings.repetition_penalty != 1.0:
            logits = process_logits(logits, self._seen, self.settings)
        token = self._draw(logits) if self.settings.do_sample else int(logits.argmax())
        self._seen[token] = True
        return token

    def _draw(self, scores: np.ndarray) -> int:
        """Return the token at which the running sum of the probabilities, in id order, passes a uniform number."""
        self._state, bits = split_mix_64(self._state)
        running = np.cumsum(np.exp(scores))  # [V]; the highest score is 0
        uniform = (bits >> 11) * 2.0**-53  # [0, 1)
        return int(np.searchsorted(running, uniform * running[-1], side="right"))


_MASK64 = (1 << 64) - 1


def split_mix_64(state: int) -> tuple[int, int]:
    """Return the next state and 64 random bits.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state, bits ^ (bits >> 31)


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Return the probabilities for scores whose highest is 0."""
    weights = np.exp(scores)
    return weights / np.cumsum(weights)[-1]  # summed in order, as in other languages: numpy's sum goes by pairs


def _check(name: str, value: Any, place: str, error: type[PopError]) -> None:
    """Raise `error` unless a sampling value is a finite number in its range."""
    number = isinstance(value, Integral if name in ("top_k", "seed") else Real) and not isinstance(value, bool)
    finite = number and abs(value) <= sys.float_info.max  # no NaN, and no integer too large for a float
    expected, holds = {
        "temperature": ("a number of at least 0", finite and value >= 0),
        "top_k": ("a whole number of at least 0 (0: no limit)", finite and value >= 0),
        "top_p": ("a number above 0 and at most 1", finite and 0 < value <= 1),
        "min_p": ("a number from 0 to 1", finite and 0 <= value <= 1),
        "repetition_penalty": ("a number above 0", finite and value > 0),
        "seed": (f"a whole number of 0..{_MASK64}", finite and 0 <= value <= _MASK64),
    }[name]
    if not holds:
        raise error(f"{place}: expected {expected}, found {value!r}; change it or leave it out")
