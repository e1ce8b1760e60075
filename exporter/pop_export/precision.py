"""What `--precision` does to an export: the weights that are traced, those that are stored, their twin in PyTorch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from pop_export.channel_matrix import ChannelScheme
from pop_export.config import NUM_BITS, QUANTIZED, ExportConfig
from pop_export.half_precision import cast_weights, require_kernels, rounded_weights
from pop_export.quantize import Quantization, Schemes, quantize_pair, stored_plan
from pop_export.quantized_matrix import Method, Scheme
from pop_export.reference import PrefillPlan
from pop_export.split_matrix import SplitScheme
from pop_export.stored_weights import stored_weights

_LOG = logging.getLogger(__name__)
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# fitting gains nothing in 8 bits
DEFAULT_QUANTIZER: dict[str, Method] = {"int8": "rtn", "int4": "gptq", "int8-dynamic": "rtn"}
FITTED_SHARE = 1 / 24  # of symmetric int4's weights keep 8 bits for their sensitivity
LARGEST_KEPT_SHARE = 0.1  # of the weights' bytes may stay in fp32 unsaid: norms and biases have far less
FINE_BITS: Literal[8] = 8  # of what int4 spares: K and V of a skipped layer are all that the prompt leaves there


@dataclass(frozen=True)
class StoredPrecision:
    """In which numbers a pair is stored, and what PyTorch has to compute with to be its twin."""

    name: str  # as the manifest calls it
    half: torch.dtype | None = None  # 16-bit type of all weights and of K and V
    quantization: Quantization | None = None

    @property
    def kv_dtype(self) -> str:
        """Element type of the KV buffers."""
        return str(self.half or torch.float32).removeprefix("torch.")

    def twin(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Return a context in which the model computes, in fp32, with the weights as they are stored."""
        if self.half is not None:
            return rounded_weights(model, self.half)
        return nullcontext() if self.quantization is None else stored_weights(model, self.quantization.matrices)

    def twin_plan(self, plan: PrefillPlan) -> PrefillPlan:
        """Return the plan with its own weights as they are stored."""
        return plan if self.quantization is None else stored_plan(plan, self.quantization)

    def summary(self) -> dict[str, Any] | None:
        """Return what report.json says of the weights that are not quantised; None where none is meant to be."""
        if self.quantization is None:
            return None
        found = self.quantization
        return {
            "unquantised_bytes": found.kept_bytes,
            "unquantised_share": found.kept_bytes / found.num_bytes,  # of the bytes of all weights in fp32
            "unquantised_matrices": found.kept,
        }


def least_bytes(config: ExportConfig, model: PreTrainedModel) -> int:
    """Return the least that a bundle's weights take: of quantised ones the codes alone, of all but matrices fp32."""
    num_all = sum(parameter.numel() for parameter in model.parameters())
    num_in_matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    bits = NUM_BITS[config.precision]
    other_bits = NUM_BITS["fp32"] if config.precision in QUANTIZED else bits
    return (num_in_matrices * bits + (num_all - num_in_matrices) * other_bits) // 8


def require_precision(config: ExportConfig) -> None:
    """Refuse a precision that this machine cannot verify, before any work is done.

    Raises:
        BackendError: ONNX Runtime has no kernels for it.
    """
    if config.precision in HALF:
        require_kernels(HALF[config.precision])


def traced_weights(config: ExportConfig, model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which the model holds the weights that its graph is traced with."""
    return cast_weights(model, HALF[config.precision]) if config.precision in HALF else nullcontext()


def store_precision(
    config: ExportConfig, model: PreTrainedModel, decode: ir.Model, prefill: ir.Model, samples: Sequence[np.ndarray]
) -> StoredPrecision:
    """Quantise both graphs in place if the settings ask for it, and return in which numbers they are.

    Args:
        config: the settings.
        model: what the graphs compute.
        decode: whole.
        prefill: cut.
        samples: windows of token ids that quantised weights may be fitted to.

    Raises:
        ModelError: there is nothing to quantise.
    """
    schemes = schemes_for(config)
    if schemes is None:
        return StoredPrecision(config.precision, HALF.get(config.precision))
    quantization = quantize_pair(decode, prefill, model, schemes, samples)
    if quantization.kept_bytes > LARGEST_KEPT_SHARE * quantization.num_bytes:
        _LOG.warning(_kept_line(config, quantization))
    return StoredPrecision(quantization.name, quantization=quantization)


def _kept_line(config: ExportConfig, quantization: Quantization) -> str:
    """Return in a line what stays in fp32."""
    share = quantization.kept_bytes / quantization.num_bytes
    names = f" ({quantization.kept[0]}, {len(quantization.kept)} in all)" if quantization.kept else ""
    return (
        f"--precision {config.precision}: {share:.0%} of the weights' bytes stay in fp32{names}; experts that lie in "
        "one stack are not quantised"
    )


def schemes_for(config: ExportConfig) -> Schemes | None:
    """Return how each kind of weight is quantised; None where none is.

    int8 is for those who want to see no difference. int4 has zero points, which take a fifth off the squared error, and
    keeps 8 bits where they bring most: in K and V, in sensitive weights, and in the embedding's rows of frequent
    tokens. The head is fitted, without zero points: a fifth of a step is spent there. Symmetric int4 has the form that
    decodes fastest instead: no zero points anywhere, Q, K and V alike, so that they are one product.
    """
    if config.precision not in QUANTIZED:
        return None
    method = config.quantizer or DEFAULT_QUANTIZER[config.precision]
    if config.precision == "int8-dynamic":
        channels = ChannelScheme("gptq" if method == "gptq" else "rtn")
        return Schemes(channels, channels, Scheme(8, 32))  # the head reads one position: it has time to be exact
    size = config.block_size or 32
    if config.precision == "int8":
        dense = Scheme(8, size, method, config.symmetric is not False)
        return Schemes(dense, dense, Scheme(8, size, symmetric=dense.symmetric))
    fine = Scheme(FINE_BITS, size)
    dense = Scheme(4, size, method, config.symmetric is True)
    embedding = SplitScheme(fine, dataclasses.replace(dense, method="rtn"))
    if method != "gptq":
        return Schemes(dense, fine, embedding)
    head = dataclasses.replace(dense, symmetric=True)
    if dense.symmetric:
        return Schemes(dense, fine, embedding, head, key_value=dense, sensitive_share=FITTED_SHARE)
    return Schemes(dense, fine, embedding, head)
