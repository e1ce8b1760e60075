"""Which traced programs torch's type promotion would change, and that the others come out as with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pop_export.graph import type_promotion
from pop_export.graph.build import build_decode_graph, kv_layout
from tests.exporter.families.configs import tiny_family_model


class _Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def _program(function, dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    return torch.export.export(_Module(function), (torch.ones(2, 3, dtype=dtype),)).graph_module


@pytest.mark.parametrize(
    ("function", "dtype", "needed"),
    [
        (lambda x: x * 2.0 + x, torch.float32, False),
        (lambda x: torch.cat([x, x], 1).softmax(-1), torch.float32, False),
        (lambda x: x + 1, torch.int64, False),
        (lambda x: x * torch.arange(3), torch.float32, True),  # integers become floats
        (lambda x: torch.cat([x, torch.arange(3)[None]], 0), torch.float32, True),
        (lambda x: x / 2, torch.int64, True),
        (lambda x: x * 0.5, torch.float16, True),  # a number, which Python keeps in another type
    ],
)
def test_a_program_needs_promotion_where_types_meet(function, dtype, needed):
    module = _program(function, dtype)
    assert type_promotion.needs_promotion(module) == needed
    before = len(module.graph.nodes)
    type_promotion._fx_passes.insert_type_promotion_nodes(module)
    assert (len(module.graph.nodes) > before) == needed  # what torch itself finds to do


def test_leaving_it_out_gives_the_same_graph(monkeypatch):
    model = tiny_family_model("gpt2")
    left_out = build_decode_graph(model, kv_layout(model))
    monkeypatch.setattr(type_promotion, "needs_promotion", lambda _: True)
    run = build_decode_graph(model, kv_layout(model))
    assert [node.op_type for node in left_out.graph] == [node.op_type for node in run.graph]
    assert [value.name for value in left_out.graph.initializers.values()] == [
        value.name for value in run.graph.initializers.values()
    ]


def test_torchs_own_pass_is_back_afterwards():
    own = type_promotion._fx_passes.insert_type_promotion_nodes
    with type_promotion.promotion_where_needed(_program(lambda x: x + x)):
        assert type_promotion._fx_passes.insert_type_promotion_nodes is not own
    assert type_promotion._fx_passes.insert_type_promotion_nodes is own
