"""Virtual gates: how much the loss would rise if a layer were left out of one stage.

Each layer's residual update is multiplied by a gate that stands at 1, `h_out = h_in + g * (layer(h_in) - h_in)`, one
gate per sample, layer and stage, so that one backward pass gives every per-sample gradient. POP, arXiv:2602.03295.

Where the stages meet, for a sample of n tokens with `boundary = n // 2`:

- positions `0 .. boundary - 1` carry the prefill gates;
- positions `boundary .. n - 1` carry the decode gates. Position `boundary` is the last prompt token: the runtime feeds
  it through the full graph, because its logits predict the first response token;
- the loss is the sum over positions `boundary .. n - 2` of the negative log-likelihood of the token that follows.

Prompt positions therefore reach the loss through K and V alone, and nothing reads what the last layer leaves there:
its prefill gradient is exactly 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pop_export.decoder import frozen, num_layers_of, replaced_outputs
from pop_runtime.errors import ModelError

Fisher = Literal["sampled", "empirical"]

BOUNDARY_RULE = "half of each sample's tokens, rounded down; the token at the boundary is the last of the prompt"
MIN_SAMPLE_TOKENS = 3  # one prefill position, the last prompt token, one token to predict
ROWS_AT_A_TIME = 32  # response positions whose probabilities are held at once: 64 MB of noise for 262,144 tokens


@dataclass(frozen=True)
class GateGradients:
    """Gradient of each sample's loss in each gate at gate = 1: [N, L] float64 per stage, loss in nats."""

    prefill: np.ndarray
    decode: np.ndarray


def boundary_of(num_tokens: int) -> int:
    """Return the first decode position of a sample: the position of its last prompt token."""
    return num_tokens // 2


def gate_importance(gate_grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how much the loss should rise if each layer's gate were shut, and the standard error of that.

    Args:
        gate_grads: [N, L]; row n holds d loss_n / d gate at gate = 1, loss in nats, one stage only.

    Returns:
        Importance `mean_n(g^2)` and standard error `std_n(g^2) / sqrt(N)`, each [L] float64, >= 0. They rank layers of
        one model on one corpus and are not comparable across either; the factor 1/2 of the expansion is left out. The
        standard error of a single sample is unknown: NaN.

    Raises:
        ModelError: a gradient is not finite (names the sample and the layer).

    Source: POP, arXiv:2602.03295, section 3 (Fisher approximation of the second-order term).
    """
    broken = np.argwhere(~np.isfinite(gate_grads))
    if len(broken):
        sample, layer = broken[0]
        raise ModelError(
            f"calibration sample {sample}, layer {layer}: expected a finite gate gradient, found "
            f"{gate_grads[sample, layer]}; the checkpoint's weights are damaged or overflow its dtype"
        )
    squares = np.asarray(gate_grads, dtype=np.float64) ** 2  # [N, L]
    num_samples = len(squares)
    if num_samples == 1:
        return squares[0], np.full(squares.shape[1], np.nan)
    return squares.mean(axis=0), squares.std(axis=0, ddof=1) / num_samples**0.5


def gate_gradients(
    model: Any,
    samples: Sequence[np.ndarray],
    *,
    fisher: Fisher = "sampled",
    seed: int = 0,
    batch_size: int = 4,
    advance: Callable[[int], None] = lambda _count: None,
) -> GateGradients:
    """Return every sample's gate gradients, from one forward and one backward pass per batch.

    Samples of like length share a batch, padded on the right; neither batch nor padding changes a result beyond
    rounding. The model's weights, mode and gradient flags are as before afterwards.

    Args:
        model: a Hugging Face causal language model.
        samples: 1-D int64 token ids, at least `MIN_SAMPLE_TOKENS` each.
        fisher: what the loss is taken on: tokens "sampled" from the model's own distribution at each position (the
            Fisher information), or the tokens that really follow ("empirical").
        seed: with a sample's index it fixes the tokens drawn for that sample.
        batch_size: samples per pass; a matter of speed and memory.
        advance: called with the number of samples done after each batch.
    """
    num_layers = num_layers_of(model)
    grads = np.empty((2, len(samples), num_layers))
    by_length = sorted(range(len(samples)), key=lambda index: (-len(samples[index]), index))
    with _only_gates_learn(model):
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            targets = [_target_rule(samples[index], fisher, seed, index) for index in batch]
            grads[:, batch] = _batch_gradients(model, [samples[index] for index in batch], targets, num_layers)
            advance(len(batch))
    return GateGradients(prefill=grads[0], decode=grads[1])


# ([R, V] probabilities, which R of the sample's response positions they are) -> [R] tokens whose likelihood is the loss
TargetRule = Callable[[Tensor, slice], Tensor]


def _target_rule(sample: np.ndarray, fisher: Fisher, seed: int, index: int) -> TargetRule:
    """Return how to choose the target tokens of one sample; the choice knows nothing of batches."""
    if fisher == "empirical":
        following = torch.from_numpy(sample[boundary_of(len(sample)) + 1 :])
        return lambda _probabilities, rows: following[rows]
    generator = np.random.default_rng([seed, index])
    return lambda probabilities, _rows: draw(probabilities, generator)


def draw(probabilities: Tensor, generator: np.random.Generator) -> Tensor:
    """Return one token id per row [R], drawn with the row's probabilities [R, V].

    An exponential race, `argmin(e / p)`: a change of 1e-5 in the logits (another batch shape) moves a draw only if the
    two fastest lie within 1e-5 of each other. Inverting the cumulative sum moved one in a thousand, because there the
    changes of all earlier tokens add up. The noise is float64: the float32 generator returns 0 too often for a race of
    50,000.
    """
    noise = torch.from_numpy(generator.standard_exponential(tuple(probabilities.shape)))  # [R, V]
    return noise.div_(probabilities).argmin(dim=-1)


def _batch_gradients(model: Any, samples: list[np.ndarray], targets: list[TargetRule], num_layers: int) -> np.ndarray:
    """Return the gate gradients [2, B, L] of one batch."""
    lengths = [len(sample) for sample in samples]
    boundaries = torch.tensor([boundary_of(length) for length in lengths])
    positions = torch.arange(max(lengths))
    # Right padding: with causal attention no real position sees it. Any id will do; 0 is in every vocabulary.
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(sample) for sample in samples], batch_first=True)  # [B, S]
    mask = (positions < torch.tensor(lengths)[:, None]).long()  # [B, S]
    in_decode = positions >= boundaries[:, None]  # [B, S]
    gates = torch.ones(2, len(samples), num_layers, dtype=model.dtype, requires_grad=True)

    def gated(layer: int, entered: Tensor, left: Tensor) -> Tensor:
        gate = torch.where(in_decode, gates[1, :, layer, None], gates[0, :, layer, None])  # [B, S]
        return entered + gate[..., None] * (left - entered)  # [B, S, E]

    first = int(boundaries.min())
    with replaced_outputs(model, gated):
        logits = _logits_from(model, ids, mask, first)  # [B, S - first, V]
    slopes = torch.zeros_like(logits)
    for row, (length, rule) in enumerate(zip(lengths, targets, strict=True)):
        response = slice(int(boundaries[row]) - first, length - 1 - first)
        _nll_slope(logits[row, response], rule, out=slopes[row, response])
    (grads,) = torch.autograd.grad(logits, gates, slopes)
    return grads.double().numpy()


def _logits_from(model: Any, ids: Tensor, mask: Tensor, first: int) -> Tensor:
    """Return the logits [B, S - first, V] of positions `first` and later; the head runs on those alone if it can."""
    accepts = inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": ids.shape[1] - first} if "logits_to_keep" in accepts else {}
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **keep).logits
    return logits[:, logits.shape[1] - (ids.shape[1] - first) :]


@torch.no_grad()
def _nll_slope(logits: Tensor, rule: TargetRule, out: Tensor) -> None:
    """Write the derivative in the logits of the summed negative log-likelihood of the rule's targets, each [R, V].

    It is `softmax(logits) - onehot(target)`. By hand, because the probabilities are needed for the draw anyhow and
    autograd would keep two more arrays of the logits' size.
    """
    for start in range(0, len(logits), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        probabilities = logits[rows].softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        chosen = rule(probabilities, rows)
        out[rows] = probabilities
        out[start + torch.arange(len(chosen)), chosen] -= 1


@contextmanager
def _only_gates_learn(model: nn.Module) -> Iterator[None]:
    """Run in eval mode without weight gradients, which would more than double the cost of the backward pass."""
    was_training = model.training
    model.eval()
    try:
        with frozen(model):
            yield
    finally:
        model.train(was_training)
