"""Compare two sides on the same tokens, and sum the comparison up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pop_export.evaluation.sides import Side
from pop_runtime.errors import BackendError


@dataclass(frozen=True)
class Scores:
    """What was found on N windows of C scored tokens each; nats."""

    kl: np.ndarray  # [N, C] float64, KL(p_full || p_pruned) of the next token
    agrees: np.ndarray  # [N, C] bool, whether both find the same token likeliest
    nll_full: np.ndarray  # [N, C] float64, negative log-likelihood of the true token
    nll_pruned: np.ndarray  # [N, C]
    common: np.ndarray  # [N] int64, equal leading tokens of both greedy continuations, at most C


@dataclass(frozen=True)
class Quality:
    """How far the pruned side is from the full one, over all scored positions alike."""

    kl_mean_nats: float
    kl_p95_nats: float  # 95th percentile over positions
    top1_agreement: float  # share of positions, 0..1
    perplexity_full: float  # on the text's own tokens
    perplexity_pruned: float
    common_greedy_tokens: float  # mean over windows, at most the continuation's length
    num_windows: int
    num_scored_tokens: int


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return KL(p || q) over the last axis, in nats; a token that p rules out counts nothing."""
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    return terms.sum(axis=-1)


def work(num_scored: int) -> int:
    """Return how many units `score_windows` advances by."""
    return num_scored + 2 * (num_scored - 1)


def score_windows(
    full: Side, pruned: Side, windows: np.ndarray, context: int, advance: Callable[[int], None]
) -> Scores:
    """Return the comparison on windows [N, context + C] int64.

    Both sides read the first `context` tokens, then take the text's own tokens, and are compared before each of the C;
    then both go back and continue greedily, each its own way, until no row agrees any more. Progress is `work(C)` units
    in all: reading the prompts is counted as C, about what it takes.

    Raises:
        BackendError: a side gives logits that are no numbers.
    """
    prompts, truth = windows[:, :context], windows[:, context:]  # [N, context], [N, C]
    num_scored = truth.shape[1]
    logits = full.start(prompts, num_scored), pruned.start(prompts, num_scored)
    advance(num_scored)
    after_prompt, columns = logits, []
    for index in range(num_scored):
        if index:
            token = truth[:, index - 1]
            logits = full.step(token), pruned.step(token)
            advance(1)
        columns.append(_compare(*logits, truth[:, index]))
    kl, agrees, nll_full, nll_pruned = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    return Scores(kl, agrees, nll_full, nll_pruned, _common_run(full, pruned, after_prompt, num_scored, advance))


def _compare(full: np.ndarray, pruned: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return KL, agreement and both sides' negative log-likelihood of `truth` [N] for logits [N, V], each [N]."""
    for name, logits in (("full", full), ("pruned", pruned)):
        if np.isnan(logits).any():
            raise BackendError(f"{name} side: expected logits that are numbers, found NaN; re-run pop-export")
    log_full, log_pruned, rows = log_softmax(full), log_softmax(pruned), np.arange(len(truth))
    agrees = full.argmax(axis=1) == pruned.argmax(axis=1)
    return kl_divergence(log_full, log_pruned), agrees, -log_full[rows, truth], -log_pruned[rows, truth]


def _common_run(
    full: Side, pruned: Side, logits: tuple[np.ndarray, np.ndarray], limit: int, advance: Callable[[int], None]
) -> np.ndarray:
    """Return how many leading tokens of the greedy continuations are equal, [N] int64, at most `limit`."""
    full.rewind()
    pruned.rewind()
    common = np.zeros(len(logits[0]), np.int64)
    together = np.ones(len(common), bool)
    for index in range(limit):
        chosen = logits[0].argmax(axis=1), logits[1].argmax(axis=1)
        together &= chosen[0] == chosen[1]
        common += together
        if not together.any() or index == limit - 1:
            break
        logits = full.step(chosen[0]), pruned.step(chosen[1])
        advance(1)
    advance(limit - 1 - index)
    return common


def joined(parts: Iterable[Scores]) -> Scores:
    """Return the scores of all windows together."""
    parts = list(parts)
    names = Scores.__dataclass_fields__
    return Scores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def split(scores: Scores, counts: Sequence[int]) -> list[Scores]:
    """Return the scores in parts of so many windows, in order."""
    bounds = np.cumsum(counts)[:-1]
    names = Scores.__dataclass_fields__
    parts = zip(*(np.split(getattr(scores, name), bounds) for name in names), strict=True)
    return [Scores(*part) for part in parts]


def summarise(scores: Scores) -> Quality:
    """Return the figures for people and programs."""
    return Quality(
        kl_mean_nats=float(scores.kl.mean()),
        kl_p95_nats=float(np.percentile(scores.kl, 95)),
        top1_agreement=float(scores.agrees.mean()),
        perplexity_full=float(np.exp(scores.nll_full.mean())),
        perplexity_pruned=float(np.exp(scores.nll_pruned.mean())),
        common_greedy_tokens=float(scores.common.mean()),
        num_windows=len(scores.kl),
        num_scored_tokens=scores.kl.size,
    )
