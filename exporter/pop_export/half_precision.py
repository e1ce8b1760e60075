"""16-bit weights: which of them this machine can run, and where a model's numbers leave their range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor
from transformers import PreTrainedModel

from pop_export.decoder import decoder_layers, last_position_head, replaced_outputs
from pop_runtime.errors import BackendError, GateError

ONNX_TYPES = {torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}


def require_kernels(dtype: torch.dtype) -> None:
    """Refuse a dtype that ONNX Runtime cannot multiply matrices of on this machine.

    Raises:
        BackendError: it cannot, so nothing that is exported could be verified.
    """
    values = [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], [2, 2]) for name in "abc"]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "probe", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the refusal is the answer, not a fault
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors share no base but Exception
        name = str(dtype).removeprefix("torch.")
        raise BackendError(
            f"--precision: expected {name} kernels in onnxruntime {onnxruntime.__version__} for CPU, found none for "
            "MatMul, so a bundle could not be verified; use --precision fp16 or fp32"
        ) from error


@contextmanager
def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Let the model hold its weights in `dtype` while the context is open; buffers, as rope's, keep theirs."""
    yield from _replaced(model, lambda weight: weight.to(dtype))


@contextmanager
def rounded_weights(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Let the model compute in fp32 with weights rounded to `dtype` while the context is open."""
    yield from _replaced(model, lambda weight: weight.to(dtype).float())


def _replaced(model: PreTrainedModel, change: object) -> Iterator[None]:
    originals = [(parameter, parameter.data) for parameter in model.parameters() if parameter.is_floating_point()]
    try:
        for parameter, weight in originals:
            parameter.data = change(weight)  # type: ignore[operator]
        yield
    finally:
        for parameter, weight in originals:
            parameter.data = weight


@torch.no_grad()
def require_finite(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Refuse a model some layer of which gives Inf or NaN for this text, in the dtype its weights have now.

    Args:
        model: whose weights are 16-bit.
        ids: [S] token ids.

    Raises:
        GateError: the first such layer.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    bad: list[int] = []

    def note(layer: int, _: Tensor, left: Tensor) -> Tensor:
        if not bad and not bool(left.isfinite().all()):
            bad.append(layer)
        return left

    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise GateError(_overflow(name, dtype))
    with replaced_outputs(model, note), last_position_head(model):
        logits = model(input_ids=torch.tensor([ids])).logits  # [1, 1, V]
    if bad:
        raise GateError(_overflow(f"layer {bad[0]} of {len(decoder_layers(model))}", dtype))
    if not bool(logits.isfinite().all()):
        raise GateError(_overflow("logits", dtype))


def _overflow(place: str, dtype: str) -> str:
    return (
        f"verification, {place}: expected finite numbers in {dtype}, found Inf or NaN; the model's numbers leave the "
        "range of this type: export it with --precision fp32, int8 or int4"
    )
