"""Leave torch's type promotion out where it would change nothing.

Before it translates a program, torch runs all of it once more under fake tensors to put in the conversions that its
operators imply: a quarter of an export's tracing. Most families' code has none to put in, which the types that tracing
has noted tell without running anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node

_fx_passes: Any
try:  # torch's own, without a public name: where they have moved, torch's pass runs as it always does
    from torch.onnx._internal.exporter import _fx_passes
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable, get_type_promotion_rule
    from torch.onnx._internal.fx.type_utils import from_scalar_type_to_torch_dtype
except ImportError:  # pragma: no cover
    _fx_passes = None


@contextmanager
def promotion_where_needed(module: GraphModule) -> Iterator[None]:
    """Let `torch.onnx.export` leave type promotion out within the context, if `module` has nothing to promote."""
    if _fx_passes is None or needs_promotion(module):
        yield
        return
    own = _fx_passes.insert_type_promotion_nodes
    _fx_passes.insert_type_promotion_nodes = lambda _: None
    try:
        yield
    finally:
        _fx_passes.insert_type_promotion_nodes = own


def needs_promotion(module: GraphModule) -> bool:
    """Return whether an operator computes in another type than one of its inputs, or than its result, has."""
    table = TypePromotionTable()
    return any(_is_promoted(node, table) for node in module.graph.nodes if node.op == "call_function")


def _is_promoted(node: Node, table: Any) -> bool:
    rule = get_type_promotion_rule(node, table)
    if rule is None:
        return False
    args, kwargs = tuple(map(_value, node.args)), {name: _value(arg) for name, arg in node.kwargs.items()}
    wanted = rule.preview_type_promotion(args, kwargs)
    given = [(arg, wanted.args_dtypes.get(index)) for index, arg in enumerate(args)]
    given += [(arg, wanted.kwargs_dtypes.get(name)) for name, arg in kwargs.items()]
    given.append((_value(node), wanted.out_dtype))
    return any(dtype is not None and _dtypes(value) != {dtype} for value, dtype in given)


def _value(arg: Any) -> Any:
    """Return what tracing noted of an argument: a fake tensor or a number."""
    if isinstance(arg, Node):
        return arg.meta["val"]
    return type(arg)(map(_value, arg)) if isinstance(arg, (tuple, list)) else arg


def _dtypes(value: Any) -> set[torch.dtype | None]:
    """Return the types of a tensor, a number or of all in a list; None stands for anything else."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(_dtypes, value))
    return {value.dtype if isinstance(value, torch.Tensor) else from_scalar_type_to_torch_dtype(type(value))}
