"""Choosing a plan: orders, budgets, the curve and the cost model."""

import numpy as np
import pytest
import transformers

from pop_export.config import ExportConfig
from pop_export.cost import layer_costs, predicted_speedup
from pop_export.damage import Protocol
from pop_export.graph.build import kv_layout
from pop_export.plan_lab import PlanLab, Point, TrialSettings
from pop_export.projections import find_kv_projections
from pop_export.search import clearly_lower, search_order
from pop_export.selection import check_plan, choose_plan, fewest_reaching, most_within, price
from pop_runtime.errors import GateError, UsageError
from pop_runtime.manifest import Windows
from tests.exporter.test_refit import CONFIGS
from tests.tiny_models import NUM_LAYERS, TINY, tiny_model

RNG = np.random.default_rng(3)
ONE_TOKEN = Windows(0, 1)
IMPORTANCE = (9.0, 4.0, 2.0, 1.0, 0.0)


def config(**settings):
    return ExportConfig(model="m", out="out", **settings)


@pytest.fixture(scope="module")
def lab():
    model = tiny_model()
    texts = {name: [RNG.integers(0, 250, 40) for _ in range(2)] for name in ("a", "b")}
    settings = TrialSettings(True, True, Protocol(30, 10, Windows()))
    fitting, judging = ([RNG.integers(0, 250, 40) for _ in range(count)] for count in (24, 6))
    return PlanLab(model, kv_layout(model), fitting, judging, texts, settings)


def test_a_ratio_takes_the_least_important_layers(lab):
    choice = choose_plan(config(prune_ratio=0.4, select="gates"), lab, IMPORTANCE)
    assert (choice.skipped_layers, choice.chosen_by, choice.order) == ((3, 4), "gates", (4, 3, 2, 1, 0))


def test_without_any_wish_a_third_of_the_layers_goes(lab):
    assert choose_plan(config(), lab, IMPORTANCE).skipped_layers == (3, 4)


def test_a_list_is_taken_as_it_is_and_the_curve_is_still_drawn(lab):
    choice = choose_plan(config(prune_layers="0,2"), lab, IMPORTANCE)
    assert (choice.skipped_layers, choice.chosen_by) == ((0, 2), "user")
    assert [point.skipped_layers for point in choice.curve] == [(), (4,), (3, 4), (2, 3, 4)]


def test_the_curve_begins_without_damage_and_gets_faster(lab):
    curve = choose_plan(config(), lab, IMPORTANCE).curve
    assert curve[0].kl_mean_nats == 0 and curve[1].kl_mean_nats < 1e-9 < curve[2].kl_mean_nats
    speedups = [point.predicted_speedup for point in curve]
    assert speedups == sorted(speedups)
    assert choose_plan(config(curve=False), lab, IMPORTANCE).curve == ()


def test_search_begins_with_the_layer_that_costs_nothing_and_beats_bad_gates(lab):
    misleading = (0.0, 1.0, 2.0, 3.0, 4.0)
    by_gates = choose_plan(config(prune_ratio=0.4, select="gates"), lab, misleading)
    searched = choose_plan(config(prune_ratio=0.4, select="search"), lab, misleading)
    assert searched.chosen_by == "search"
    assert price(lab.try_plan(searched.skipped_layers)).mean() <= price(lab.try_plan(by_gates.skipped_layers)).mean()


def test_damage_is_searched_unless_the_published_method_is_wanted(lab):
    assert choose_plan(config(curve=False), lab, IMPORTANCE).chosen_by == "search"
    assert choose_plan(config(curve=False, refit=False), lab, IMPORTANCE).chosen_by == "gates"


def test_search_takes_the_cheapest_layer_at_every_step():
    price_of = [5.0, 1.0, 3.0, 0.0, 2.0]
    asked = []

    def price_of_all(layers):
        asked.append(tuple(layers))
        return np.array([sum(price_of[layer] for layer in layers)])

    assert search_order(price_of_all, [0.0, 1.0, 2.0, 3.0, 4.0], 2, breadth=5) == (3, 1, 4, 2, 0)
    assert len(asked) == 5 + 4


def test_search_notices_layers_that_hurt_together():
    """Layers 0 and 1 are cheap alone and dear together; a choice by single damage would take both."""
    single = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 9.0}

    def price_of(layers):
        together = 5.0 if {0, 1} <= set(layers) else 0.0
        return np.array([sum(single[layer] for layer in layers) + together])

    assert search_order(price_of, [0, 0, 0, 0, 9], 2, breadth=5)[:2] == (3, 0)


def test_layers_that_gates_and_depth_agree_on_are_not_measured():
    assert search_order(lambda _layers: 1 / 0, [5.0, 4.0, 3.0, 1.0, 2.0], 3, breadth=2) == (4, 3, 2, 1, 0)


def test_each_step_tries_the_deepest_layer_left_and_the_least_important_by_gates():
    asked = []

    def price_of(layers):
        asked.append(tuple(layers))
        return np.array([-float(layers[-1])])  # the deeper the better

    assert search_order(price_of, [0.0, 1.0, 5.0, 7.0, 9.0], 2, breadth=2) == (4, 3, 2, 1, 0)
    assert asked == [(4,), (0,), (4, 3), (4, 0)]


def test_a_search_of_breadth_one_measures_nothing_and_takes_the_tail():
    assert search_order(lambda _layers: 1 / 0, [0.0, 1.0, 2.0, 3.0], 2, breadth=1) == (3, 2, 1, 0)


def test_a_plan_is_priced_by_its_damage_for_the_time_it_saves():
    slow, fast = (Point((0,), (), 0.02, speedup, (0.01, 0.03)) for speedup in (1.25, 1.5))
    assert price(slow).tolist() == pytest.approx([0.05, 0.15]) and price(fast).tolist() == pytest.approx([0.03, 0.09])
    assert price(Point((0,), (0,), 0.02, 1.0, (0.01, 0.03))).tolist() == [float("inf")] * 2


def test_search_takes_the_deepest_layer_unless_another_is_cheaper_beyond_chance():
    """Layer 0 is cheaper on average than layer 3 either way, but only in the second case on every window."""
    noisy, steady = {0: [1.0, 5.0, 2.0], 3: [3.0, 3.0, 2.3]}, {0: [1.0, 2.0, 1.0], 3: [3.0, 4.1, 3.0]}
    for prices, first in ((noisy, 3), (steady, 0)):
        order = search_order(lambda layers, prices=prices: np.array(prices[layers[-1]]), [0.0, 1.0, 2.0, 3.0], 1, 2)
        assert order[0] == first


def test_a_price_is_clearly_lower_beyond_a_standard_error():
    one, more = np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.6, 0.7])
    assert clearly_lower(one, one + more) and not clearly_lower(one + more, one)
    assert not clearly_lower(one, one) and not clearly_lower(one, one + np.array([3.0, -2.0, 0.5]))
    assert clearly_lower(one[:1], one[1:2]) and clearly_lower(one, np.full(3, np.inf))
    assert not clearly_lower(np.full(3, np.inf), np.full(3, np.inf))


POINTS = [Point((), (), 0.0, 1.0)] + [Point(tuple(range(n)), (), 0.01 * n * n, 1 + 0.2 * n) for n in range(1, 6)]


def test_a_damage_budget_takes_the_largest_plan_within_it():
    assert most_within(POINTS.__getitem__, 5, 0.04) == 2
    assert most_within(POINTS.__getitem__, 5, 9.0) == 5


def test_a_small_dip_in_damage_does_not_end_the_walk():
    kls = [0.0, 0.01, 0.05, 0.03, 0.2]
    assert most_within(lambda n: Point((), (), kls[n], 1.0), 4, 0.04) == 3


def test_a_damage_budget_below_any_plan_names_the_least_damage():
    with pytest.raises(GateError, match=r"--max-kl 0\.001: .* found that the least one does 0\.01 nats"):
        most_within(POINTS.__getitem__, 5, 0.001)


def test_a_speed_budget_takes_the_fewest_layers_that_reach_it():
    assert fewest_reaching(POINTS.__getitem__, 5, 1.4) == 2


def test_a_speed_budget_out_of_reach_names_what_can_be_reached():
    with pytest.raises(GateError, match=r"--target-speedup 3: .* at most 2\.00 x with 5 layers skipped; ask for 2\.00"):
        fewest_reaching(POINTS.__getitem__, 5, 3.0)


@pytest.mark.parametrize("flag", ["--max-kl", "--target-speedup"])
def test_a_budget_for_a_single_layer_says_that_there_is_none_to_skip(flag):
    """It said that the least plan does inf nats per token, or reaches at most 0.00 x with 0 layers skipped."""
    settings = {flag.removeprefix("--").replace("-", "_"): 1.1}
    for ask in (lambda wish: check_plan(wish, 1), lambda wish: choose_plan(wish, None, (1.0,))):
        with pytest.raises(UsageError, match=f"{flag}: expected a model that has a layer to skip, found one of a sing"):
            ask(config(**settings, select="gates", curve=False))
    assert check_plan(config(**settings), 2) is None and check_plan(config(), 1) is None


def test_budgets_go_through_the_choice(lab):
    assert choose_plan(config(max_kl=1e-6, curve=False), lab, IMPORTANCE).skipped_layers == (4,)
    assert len(choose_plan(config(target_speedup=1.5, curve=False), lab, IMPORTANCE).skipped_layers) == 2
    with pytest.raises(GateError, match="--target-speedup 50"):
        choose_plan(config(target_speedup=50.0, curve=False), lab, IMPORTANCE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(prune_ratio=0.2, max_kl=0.1), "--prune-ratio and --max-kl: expected one way"),
        (dict(prune_layers="1", target_speedup=2.0), "--prune-layers and --target-speedup: expected one way"),
        (dict(max_kl=0.0), "--max-kl: expected a number above 0"),
        (dict(max_kl=float("nan")), "--max-kl: expected a number above 0"),
        (dict(target_speedup=1.0), "--target-speedup: expected a number above 1"),
        (dict(prune_ratio=1.0), "--prune-ratio: expected 0 <= ratio < 1"),
        (dict(select="search", prune_layers="1"), "--select search and --prune-layers"),
        (dict(refit=False, surrogate="auto"), "--surrogate auto and --no-refit"),
        (dict(search_breadth=0), "--search-breadth: expected at least 1"),
        (dict(refit_length=8), "--refit-length: expected at least 16"),
        (dict(refit_samples=0), "--refit-samples: expected at least 1"),
    ],
)
def test_contradictions_are_refused_before_any_work(settings, message):
    with pytest.raises(UsageError, match=message):
        config(**settings)


def test_no_refit_means_no_surrogates_either():
    assert config().uses_surrogates and not config(refit=False).uses_surrogates
    assert not config(surrogate="off").uses_surrogates


def test_the_cost_of_a_layer_is_that_of_its_weights():
    model = tiny_model()
    (cost, *_) = layer_costs(model, find_kv_projections(model), kv_layout(model))
    attention, mlp = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128
    assert cost.linear == 2 * (attention + mlp) and cost.kv == 2 * 64 * 32 * 2
    assert cost.attention == 2 * 4 * (16 + 16) and cost.surrogate == 2 * 64 * 64


def test_k_and_v_cost_the_same_fused_or_not():
    apart, fused = (tiny_model(CONFIGS[family]()) for family in ("llama", "fused"))
    costs = [layer_costs(model, find_kv_projections(model), kv_layout(model)) for model in (apart, fused)]
    assert costs[0] == costs[1]


def test_every_expert_counts_as_the_graph_computes_them_all():
    settings = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, decoder_sparse_step=1)
    model = tiny_model(transformers.Qwen3MoeConfig(**TINY, **settings))
    (cost, *_) = layer_costs(model, find_kv_projections(model), kv_layout(model))
    attention, router, experts = 64 * 64 * 2 + 64 * 32 * 2, 64 * 4, 4 * 3 * 64 * 32
    assert cost.linear == 2 * (attention + router + experts)


def test_predicted_speedup_prices_windows_and_surrogates():
    model = tiny_model()
    costs = layer_costs(model, find_kv_projections(model), kv_layout(model))

    def speedup(skipped, surrogates=(), windows=ONE_TOKEN):
        return predicted_speedup(costs, skipped, surrogates, windows)

    assert speedup({4}) == pytest.approx(NUM_LAYERS / (NUM_LAYERS - 1), rel=0.05)  # the last layer never attends
    assert speedup(()) == speedup({4})
    assert speedup({2, 3, 4}) > speedup({2, 3, 4}, {2}) > speedup({3, 4})
    assert speedup({3, 4}, windows=Windows(4, 32)) < speedup({3, 4})
    assert speedup({3, 4}, windows=Windows(0, 5000)) == pytest.approx(1.0)
