"""Find by what to divide the inputs of quantised weights, so that rounding in blocks treats their channels alike.

A block of weights, or of activations, has one step: its largest number. Where a few channels of an input are much
larger than their neighbours, their rounding error swamps the neighbours, and the error of the weights that they meet
counts most. Dividing the input and multiplying the weights by the root of each channel's magnitude shares the
differences out between both sides. The division goes into the norm before, so that it costs nothing.

Source: Xiao et al., "SmoothQuant", arXiv:2211.10438, and Lin et al., "AWQ", arXiv:2306.00978, with the magnitude alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pop_export.full_pass import batches
from pop_export.progress import progress
from pop_export.projections import linear_modules
from pop_export.quantize_layers import spread

MAX_TOKENS = 4096  # of the samples, spread evenly over them
EXPONENT = 0.5  # of the magnitude: 0 leaves inputs as they are, 1 makes all channels alike; docs/experiments.md
SMALLEST = 1e-3  # of the mean magnitude: channels below it, dead ones too, count as that


def input_scales(magnitudes: Mapping[str, NDArray[np.float32]], readers: Sequence[str]) -> NDArray[np.float32] | None:
    """Return the scales [K] of the tensor that several weights read; their geometric mean is 1.

    Args:
        magnitudes: as `input_magnitudes` gives them.
        readers: names of the weights.

    Returns:
        None where none of the weights has a magnitude, or where all of its channels are 0.
    """
    known = [magnitudes[name] for name in readers if name in magnitudes]
    floor = float(known[0].mean()) * SMALLEST if known else 0.0
    if floor == 0:
        return None
    logarithms = EXPONENT * np.log(np.maximum(known[0], floor))
    scales: NDArray[np.float32] = np.exp(logarithms - logarithms.mean()).astype(np.float32)
    return scales


@torch.no_grad()
def input_magnitudes(model: PreTrainedModel, samples: Sequence[np.ndarray]) -> dict[str, NDArray[np.float32]]:
    """Return, by name of the weight, the mean magnitude over tokens of each channel that linear modules read, [K].

    Of those inside decoder layers, and of the head; modules that the text does not reach are left out.

    Args:
        model: in fp32; unchanged.
        samples: windows of token ids.
    """
    means = input_means(model, samples, lambda rows: rows.abs().sum(0), MAX_TOKENS)
    return {name: mean.numpy() for name, mean in means.items()}


@torch.no_grad()
def input_means(
    model: PreTrainedModel,
    samples: Sequence[np.ndarray],
    of: Callable[[Tensor], Tensor],
    max_tokens: int,
    only: Collection[nn.Module] | None = None,
) -> dict[str, Tensor]:
    """Return, by name of the weight, what `of` gives for the inputs [tokens, K] of linear modules, over the tokens.

    Args:
        model: in fp32; unchanged.
        samples: windows of token ids.
        of: a sum over tokens.
        max_tokens: of the samples.
        only: modules to look at; None: all inside decoder layers and the head.
    """
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if module is head} | linear_modules(model)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> Any:
            if not args:
                return None
            rows = args[0].flatten(0, -2)
            sums[name] = sums[name] + of(rows) if name in sums else of(rows)
            counts[name] = counts.get(name, 0) + len(rows)
            return (args[0][:, -1:],) if module is head else None  # the logits themselves are not wanted

        return hook

    chosen = batches(spread(samples, max_tokens))
    with ExitStack() as stack, progress("measuring the inputs of weights", len(chosen)) as advance:
        for name, module in modules.items():
            if only is None or module in only:
                stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        for ids in chosen:
            model(input_ids=ids, use_cache=False)
            advance(1)
    return {f"{name}.weight": sums[name] / counts[name] for name in sums}
