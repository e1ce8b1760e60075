"""Which layers are skipped, and every way to ask for it wrongly."""

import pytest

from pop_export.config import ExportConfig
from pop_export.layer_plan import layer_order, num_skipped_at, parse_layers
from pop_runtime.errors import UsageError


def test_the_layers_of_lowest_prefill_importance_come_first():
    assert layer_order([5.0, 1.0, 4.0, 2.0, 3.0, 0.0]) == (5, 1, 3, 4, 2, 0)


def test_of_equal_layers_the_deeper_one_comes_first():
    assert layer_order([1.0, 1.0, 1.0, 1.0]) == (3, 2, 1, 0)


@pytest.mark.parametrize(
    ("ratio", "num_layers", "num_skipped"),
    [(1 / 3, 30, 10), (1 / 3, 32, 11), (0.25, 30, 8), (0.25, 18, 5), (0.5, 5, 3), (0.0, 30, 0), (0.01, 30, 0)],
)
def test_a_ratio_is_rounded_to_the_nearest_layer_and_halves_up(ratio, num_layers, num_skipped):
    assert num_skipped_at(ratio, num_layers) == num_skipped


def test_the_largest_ratio_keeps_one_layer():
    assert num_skipped_at(0.999, 3) == 2


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(UsageError, match=r"--prune-ratio: expected 0 <= ratio < 1"):
        ExportConfig(model="m", out="out", prune_ratio=ratio)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("20-29", tuple(range(20, 30))),
        ("18,5,12-14", (5, 12, 13, 14, 18)),
        (" 5 , 12 - 14 ", (5, 12, 13, 14)),
        ("7-7", (7,)),
        ("none", ()),
        ("None ", ()),
    ],
)
def test_lists_and_ranges_of_layers_are_understood(text, layers):
    assert parse_layers(text, 30) == layers


@pytest.mark.parametrize("text", ["", "a", "5;6", "5,", "-3", "1-2-3", "5.0", "³", "all"])
def test_a_malformed_list_is_refused(text):
    with pytest.raises(UsageError, match='expected layers such as "20-29"'):
        parse_layers(text, 30)


@pytest.mark.parametrize("text", ["30", "25-30", "0,99999999999999999999"])
def test_a_layer_that_the_model_lacks_is_refused(text):
    with pytest.raises(UsageError, match="expected layers 0 to 29, found"):
        parse_layers(text, 30)


def test_a_reversed_range_is_refused():
    with pytest.raises(UsageError, match="found 9-5; write 5-9"):
        parse_layers("9-5", 30)


@pytest.mark.parametrize("text", ["5,5", "3-6,5"])
def test_a_layer_named_twice_is_refused(text):
    with pytest.raises(UsageError, match="expected each layer once, found 5 more than once"):
        parse_layers(text, 30)


def test_skipping_every_layer_is_refused():
    with pytest.raises(UsageError, match="expected at least one layer to keep, found all 4"):
        parse_layers("0-3", 4)
