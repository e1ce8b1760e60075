"""Trial B01: windows are on the layers that the config says, and nowhere else."""

import pytest

from pop_export.graph.attention_form import choose_attention
from tests.exporter.families import proof
from tests.exporter.families.configs import tiny_family_model

CASES = {
    "a": ("mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
    "b": ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2}, (None,) * 4),
    "c": ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 8, 8)),
    "d": ("gemma3_text", {}, (8, 8, 8, None)),  # the tiny config has three windows and a full layer
}


@pytest.mark.parametrize("case", CASES)
def test_the_recorded_windows_are_those_of_the_config(case):
    model_type, changes, windows = CASES[case]
    model = tiny_family_model(model_type, **changes)
    assert choose_attention(model).windows == windows
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * 4
    assert [window is not None for window in windows] == [kind == "sliding_attention" for kind in types]


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "d" else pytest.mark.slow) for case in CASES])
def test_an_export_with_windows_computes_what_pytorch_does(export_of, case):
    model_type, changes, windows = CASES[case]
    exported, ids = export_of(model_type, **changes), proof.prompt_ids()
    assert proof.prove_unpruned(exported, ids) <= proof.TOLERANCE
    assert proof.prove_pruned(exported, ids) <= proof.TOLERANCE
    without = tiny_family_model(model_type, **{**changes, "sliding_window": 256})
    effect = proof.relative(proof.true_logits(without, ids), proof.true_logits(exported.model, ids))
    assert effect > 10 * proof.TOLERANCE if any(windows) else effect == 0
