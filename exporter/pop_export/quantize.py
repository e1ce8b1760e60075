"""Quantise the weights of both graphs to 8 or 4 bits, each weight once, and say what the stored numbers stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pop_export.channel_matrix import ChannelScheme
from pop_export.decoder import num_layers_of
from pop_export.gptq import gptq
from pop_export.graph.cut import surrogate_name
from pop_export.graph.passes.balance_inputs import balance_inputs, readers_of_norms
from pop_export.graph.passes.exact_head import exact_head
from pop_export.graph.passes.exact_kernels import exact_kernels
from pop_export.graph.passes.multiply_dynamically import multiply_dynamically
from pop_export.graph.passes.narrow_projections import SUFFIX as NARROWED_SUFFIX
from pop_export.graph.passes.narrow_projections import narrowed_weights
from pop_export.graph.passes.quantize_embedding import embedding_table, quantize_embedding
from pop_export.graph.passes.quantize_matmuls import matrix_weight, quantize_matmuls
from pop_export.graph.passes.resolve_markers import marked_value
from pop_export.graph.passes.use_prefill_weights import SUFFIX as REFIT_SUFFIX
from pop_export.input_scales import input_magnitudes, input_means, input_scales
from pop_export.quantize_layers import MAX_TOKENS, quantize_layers
from pop_export.quantized_matrix import QuantizedMatrix, Scheme
from pop_export.reference import PrefillPlan
from pop_export.sensitive_weights import SENSITIVE_SHARE, sensitive_weights
from pop_export.split_matrix import AnyScheme, SplitMatrix, StoredMatrix
from pop_export.stored_weights import dequantized_parameter
from pop_runtime.errors import ModelError


@dataclass(frozen=True)
class Schemes:
    """How each kind of weight is quantised."""

    dense: Scheme | ChannelScheme
    # what prefill has of its own, re-fitted K and V and surrogates, all that it keeps of a layer; sensitive weights
    fine: Scheme | ChannelScheme
    embedding: AnyScheme
    head: AnyScheme | None = None  # and the embedding where both are one matrix; None: as the embedding
    key_value: Scheme | ChannelScheme | None = None  # of the decode graph's K and V projections; None: `fine`
    sensitive_share: float = SENSITIVE_SHARE  # of the weights that are in `fine` for what hangs on them


@dataclass(frozen=True)
class Quantization:
    """What was quantised."""

    schemes: Schemes
    matrices: Mapping[str, StoredMatrix]  # by name of the weight in the graphs, mostly that of a parameter
    kept: tuple[str, ...]  # matrices, and stacks of them as experts are, that stay as they were, of either graph
    kept_bytes: int  # of these and of all other weights that stay as they were: norms, biases
    num_bytes: int  # of all weights of both graphs as they were, each once
    rows: Mapping[str, slice]  # by name of a weight of which prefill has a part alone: which rows of the whole

    @property
    def name(self) -> str:
        """What the manifest calls it: kind of product or block size, and method of the dense weights."""
        dense = self.schemes.dense
        if isinstance(dense, ChannelScheme):
            return f"int8-dynamic-{dense.method}"
        kind = dense.method if dense.method != "rtn" else "symmetric" if dense.symmetric else "asymmetric"
        return f"int{dense.bits}-block{dense.block_size}-{kind}"


def quantize_pair(
    decode: ir.Model,
    prefill: ir.Model,
    model: PreTrainedModel,
    schemes: Schemes,
    samples: Sequence[np.ndarray] = (),
) -> Quantization:
    """Quantise every matrix of both graphs that is a parameter, or stands in for one or a layer in prefill; in place.

    A weight of both graphs is quantised once, also where prefill has a part of it alone. The prefill graph has to be
    cut before: what cutting does to weights it does to plain ones. Weights of any other origin stay as they are.

    Args:
        decode: changed in place.
        prefill: changed in place.
        model: what the graphs compute, unchanged.
        schemes: how each kind of weight is quantised.
        samples: windows of token ids, for methods that look at what the weights are used for.

    Raises:
        ModelError: the graphs hold no such matrix.
    """
    plain = _plain_weights((decode, prefill))
    multiplied: dict[str, NDArray[np.float32]] = {}
    magnitudes = input_magnitudes(model, samples) if samples else {}
    readers = readers_of_norms((decode, prefill))
    found = {norm: input_scales(magnitudes, weights) for norm, weights in readers.items()}
    for graph in (decode, prefill):
        multiplied |= balance_inputs(graph, {norm: scales for norm, scales in found.items() if scales is not None})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    head, of_head = model.get_output_embeddings().weight, schemes.head or schemes.embedding
    key_value = key_value_weights(decode, num_layers_of(model))
    tables = {table.name for node in decode.graph if (table := embedding_table(node)) is not None}

    surrogates = {surrogate_name(layer) for layer in range(num_layers_of(model))}
    sensitive: frozenset[str] = frozenset()

    def scheme_of(name: str) -> AnyScheme | None:
        if name in surrogates:
            return schemes.fine
        if name.removesuffix(NARROWED_SUFFIX).removesuffix(REFIT_SUFFIX) not in parameters:
            return None
        if name in sensitive or name not in parameters:
            return schemes.fine
        if name in key_value:
            return schemes.key_value or schemes.fine
        if parameters[name] is head:
            return of_head
        return schemes.embedding if name in tables else schemes.dense

    matrices: dict[str, StoredMatrix] = {}
    narrowed = narrowed_weights(prefill)
    read = [weight.name or "" for node in decode.graph if (weight := matrix_weight(node)) is not None]
    dense = {name: schemes.dense for name in read if scheme_of(name) is schemes.dense}
    if samples and isinstance(schemes.dense, Scheme) and schemes.fine is not schemes.dense:
        others = (
            dense.keys() - key_value
        )  # K and V have the bits that they are given: those of Q make one product of three
        sensitive = sensitive_weights(model, others, schemes.dense, samples, multiplied, schemes.sensitive_share)
    fitted = {name: scheme for name, scheme in dense.items() if scheme.method == "gptq" and name not in sensitive}
    heads = [name for name in parameters if parameters[name] is head]
    if samples and isinstance(of_head, Scheme) and of_head.method == "gptq":
        fitted_head = _fitted_head(model, of_head, samples)
        matrices |= {name: fitted_head for name in heads if name in {*read, *tables}}
    for graph in (decode, prefill):
        quantize_embedding(graph, scheme_of, matrices)
        if graph is decode and fitted:
            matrices |= quantize_layers(model, fitted, samples, matrices, multiplied)
        if graph is prefill:
            matrices |= _stored_parts(narrowed, matrices)
        multiply_dynamically(graph, scheme_of, matrices)
        quantize_matmuls(graph, scheme_of, matrices)
    loud = next((magnitudes[name] for name in heads if name in magnitudes), None)
    if loud is not None and isinstance(of_head, Scheme) and of_head.bits == 8:
        exact_head(decode, loud, matrices)  # what 4 bits cost is a hundred times what rounding the head's input does
    exact_kernels(prefill)  # over many tokens they are not slower: docs/experiments.md
    if not matrices:
        raise ModelError(
            f"{type(model).__name__}: expected weight matrices to quantise in the decode graph, found none; "
            "export it with --precision fp32"
        )
    for name, matrix in matrices.items():
        if name in multiplied and not isinstance(matrix, SplitMatrix):  # only an embedding is split: no norm feeds it
            matrices[name] = dataclasses.replace(matrix, input_scales=multiplied[name])
    kept = [plain[name] for name in sorted(plain.keys() & _plain_weights((decode, prefill)).keys())]
    return Quantization(
        schemes,
        matrices,
        kept=tuple(weight.name for weight in kept if weight.is_matrix),
        kept_bytes=sum(weight.num_bytes for weight in kept),
        num_bytes=sum(weight.num_bytes for weight in plain.values()),
        rows={name: rows for name, (_, rows) in narrowed.items()},
    )


@dataclass(frozen=True)
class _PlainWeight:
    """A constant of a graph that is not made of integers, without its numbers, which would be kept alive."""

    name: str
    num_bytes: int
    is_matrix: bool  # or a stack of matrices: two axes or more


def _plain_weights(models: Sequence[ir.Model]) -> dict[str, _PlainWeight]:
    """Return the constants of several graphs that are not made of integers, by name."""
    found: dict[str, _PlainWeight] = {}
    for value in (value for model in models for value in model.graph.initializers.values()):
        stored, name = value.const_value, value.name or ""
        if stored is not None and stored.dtype.is_floating_point():
            is_matrix = sum(size > 1 for size in stored.shape.numpy()) > 1
            found[name] = _PlainWeight(name, stored.nbytes, is_matrix)
    return found


def _stored_parts(
    narrowed: Mapping[str, tuple[str, slice]], matrices: Mapping[str, StoredMatrix]
) -> dict[str, StoredMatrix]:
    """Return the rows that prefill has of weights which decode stores whole: one weight has one set of numbers.

    Args:
        narrowed: as `narrowed_weights` gives them; parts of what decode has not are left out.
        matrices: what is stored for decode.
    """
    parts: dict[str, StoredMatrix] = {}
    for name, (whole, rows) in narrowed.items():
        matrix = matrices.get(whole)
        if matrix is not None:
            assert not isinstance(matrix, SplitMatrix)  # only an embedding is split
            parts[name] = matrix.rows(rows)
    return parts


def _fitted_head(model: PreTrainedModel, scheme: Scheme, samples: Sequence[np.ndarray]) -> QuantizedMatrix:
    """Return the head's weight fitted to its inputs; an embedding that is the same matrix has to do with it."""
    head = model.get_output_embeddings()
    (hessian,) = input_means(model, samples, lambda rows: rows.T @ rows, MAX_TOKENS, only=(head,)).values()
    fitted = gptq(head.weight.detach(), hessian, scheme)
    assert isinstance(fitted, QuantizedMatrix)
    return fitted


def key_value_weights(decode: ir.Model, num_layers: int) -> set[str]:
    """Return the names of the weights that project to K and V: the nearest ones above what each layer caches."""
    names: set[str] = set()
    for layer in range(num_layers):
        seen: set[ir.Node] = set()
        pending = [marked_value(decode, f"layers.{layer}.{part}").producer() for part in ("key", "value")]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            weight = matrix_weight(node)
            if weight is not None and weight.name:
                names.add(weight.name)
            else:
                pending += [value.producer() for value in node.inputs if value is not None]
    return names


def stored_plan(plan: PrefillPlan, quantization: Quantization) -> PrefillPlan:
    """Return the plan with what its own quantised weights stand for."""
    weights = {name: _stored_weight(name + REFIT_SUFFIX, weight, quantization) for name, weight in plan.weights.items()}
    surrogates = {
        layer: surrogate
        if (matrix := quantization.matrices.get(surrogate_name(layer))) is None
        else dataclasses.replace(surrogate, matrix=dequantized_parameter(matrix, surrogate.matrix))
        for layer, surrogate in plan.surrogates.items()
    }
    return dataclasses.replace(plan, weights=weights, surrogates=surrogates)


def _stored_weight(name: str, weight: Tensor, quantization: Quantization) -> Tensor:
    """Return a weight of the plan with what is stored for it, or for the rows of it that prefill reads."""
    part = name + NARROWED_SUFFIX
    if part in quantization.matrices:
        return dequantized_parameter(quantization.matrices[part], weight, quantization.rows[part])
    return weight if (matrix := quantization.matrices.get(name)) is None else dequantized_parameter(matrix, weight)
