import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pop_runtime.errors import BackendError, ModelError, UsageError
from pop_runtime.sampling import (
    Sampler,
    SamplingSettings,
    likeliest,
    log_probabilities,
    process_logits,
    settings_in_force,
    split_mix_64,
    unknown_settings,
)

FILE = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3, "min_p": 0.02}


def _logits(seed: int = 0, size: int = 300) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 4).astype(np.float32)


def _transformers(logits: np.ndarray, seen: list[int], settings: SamplingSettings) -> np.ndarray:
    """Return the probabilities that transformers would draw from."""
    steps: list[Any] = [RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)]
    if settings.do_sample:
        steps.append(TemperatureLogitsWarper(settings.temperature))
        steps += [TopKLogitsWarper(settings.top_k)] if settings.top_k else []
        steps += [TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else []
        steps += [MinPLogitsWarper(settings.min_p)] if settings.min_p else []
    scores = torch.tensor(logits)[None]
    for step in steps:
        scores = step(torch.tensor([seen]), scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(True, 0.7, 20, 0.9, 1.3),
        SamplingSettings(True, 1.0, 0, 1.0, 1.0),
        SamplingSettings(True, 2.0, 5, 1.0, 0.8),
        SamplingSettings(True, 0.3, 0, 0.5, 1.0),
        SamplingSettings(True, 1.0, 1000, 0.01, 1.0),
        SamplingSettings(False, 1.0, 0, 1.0, 1.7),
        SamplingSettings(True, 1.5, 0, 1.0, 1.0, min_p=0.1),
        SamplingSettings(True, 2.0, 30, 0.95, 1.2, min_p=0.05),
        SamplingSettings(True, 1.0, 0, 1.0, 1.0, min_p=1.0),
    ],
)
def test_processed_logits_are_those_of_transformers(settings: SamplingSettings, seed: int) -> None:
    logits, history = _logits(seed), [3, 5, 5, 17, 299]
    seen = np.zeros(300, bool)
    seen[history] = True
    scores = process_logits(logits, seen, settings)
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(weights / weights.sum(), _transformers(logits, history, settings), atol=1e-6)


def test_top_p_sums_in_order_as_other_languages_do() -> None:
    # numpy's sum goes by pairs: the total, and with it what lies on the border, differed in the last bit
    for seed in range(200):
        logits = _logits(seed)
        scores = logits.astype(np.float64) - float(logits.max())
        ascending = np.argsort(scores, kind="stable")
        weights, total, running = np.exp(scores[ascending]), 0.0, 0.0
        for weight in weights:
            total += weight
        for place, weight in enumerate(weights[:-1]):  # the last always stays
            running += weight / total
            if 0.5 < running < 1:  # so that 1 - (1 - running) is exact
                top_p = 1.0 - running
                found = process_logits(logits, np.zeros(300, bool), SamplingSettings(True, top_p=top_p))
                assert np.isneginf(found).sum() == place + 1


def test_settings_come_from_the_file() -> None:
    settings = settings_in_force(FILE, seed=4)
    assert settings == SamplingSettings(True, 0.7, 20, 0.9, 1.3, 4, 0.02)


def test_arguments_override_the_file() -> None:
    settings = settings_in_force(FILE, temperature=0.5, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=1)
    assert settings == SamplingSettings(True, 0.5, 0, 1.0, 1.0, 1)


def test_without_a_file_choice_is_greedy() -> None:
    assert settings_in_force({}) == SamplingSettings()


def test_a_file_that_does_not_sample_stays_greedy_whatever_its_temperature() -> None:
    assert not settings_in_force({"do_sample": False, "temperature": 0.9}).do_sample


def test_a_given_temperature_samples_and_zero_is_greedy() -> None:
    assert settings_in_force({}, temperature=0.1).do_sample
    assert not settings_in_force(FILE, temperature=0).do_sample


def test_a_drawn_seed_is_shown_and_differs() -> None:
    assert len({settings_in_force(FILE).seed for _ in range(8)}) > 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("top_p", 2), ("top_p", 0), ("top_p", -0.1), ("top_k", -1), ("top_k", 1.5), ("top_k", True),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("min_p", -0.1), ("min_p", 1.1), ("min_p", "x"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_and_the_place_is_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected"):
        settings_in_force({}, **{name: value})
    with pytest.raises(ModelError, match=rf"generation_config.json, {name}: expected"):
        settings_in_force({name: value})


@pytest.mark.parametrize("value", ["yes", "", 0, 1, []])
def test_a_do_sample_that_is_no_truth_value_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=re.escape(f"do_sample: expected true or false, found {value!r}")):
        settings_in_force({"do_sample": value})


def test_settings_that_are_not_applied_are_listed() -> None:
    config = {"num_beams": 4, "min_p": 0.1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [],
              "penalty_alpha": None, "eos_token_id": 3, "bad_words_ids": [[1]]}  # fmt: skip
    assert unknown_settings(config) == ["num_beams", "bad_words_ids"]


def test_log_probabilities_are_those_of_the_softmax() -> None:
    scores = log_probabilities(_logits())
    np.testing.assert_allclose(scores, torch.tensor(_logits()).double().log_softmax(-1).numpy(), atol=1e-12)


def test_the_likeliest_come_highest_first_and_the_lowest_id_first_among_equals() -> None:
    scores = np.array([1.0, 3.0, 2.0, 3.0, 2.0])
    assert likeliest(scores, 0) == []
    assert likeliest(scores, 3) == [1, 3, 2]
    assert likeliest(scores, 5) == [1, 3, 2, 4, 0]


def test_greedy_takes_the_first_highest_logit() -> None:
    assert Sampler(SamplingSettings(), 4, []).choose(np.array([0, 2, 2, 1], np.float32)) == 1


def test_the_penalty_counts_prompt_and_text() -> None:
    sampler = Sampler(SamplingSettings(repetition_penalty=2.0), 3, [0])
    logits = np.array([3.0, 2.0, 1.4], np.float32)
    assert [sampler.choose(logits) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(BackendError, match="logits: expected finite numbers"):
        Sampler(SamplingSettings(), 3, []).choose(np.array([0, bad, 1], np.float32))


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow() -> None:
    sampler = Sampler(SamplingSettings(True, temperature=1e-300), 300, [])
    assert sampler.choose(_logits()) == int(_logits().argmax())


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("penalty", "temperature"), [(1e-310, 1.0), (1e308, 1.0), (1.0, 1e-308), (1e-310, 1e-308)])
@pytest.mark.filterwarnings("error")
def test_extreme_settings_choose_a_token_of_the_vocabulary(penalty: float, temperature: float, do_sample: bool) -> None:
    settings = SamplingSettings(do_sample=do_sample, temperature=temperature, repetition_penalty=penalty, seed=1)
    sampler = Sampler(settings, 4, [0, 1])
    for _ in range(20):
        assert 0 <= sampler.choose(np.array([3.0, -2.0, 1.0, 0.5], np.float32)) < 4


def test_one_seed_gives_one_series_and_other_seeds_others() -> None:
    def series(seed: int) -> list[int]:
        sampler = Sampler(SamplingSettings(True, temperature=2.0, seed=seed), 300, [])
        return [sampler.choose(_logits(step)) for step in range(8)]

    assert series(1) == series(1)
    assert len({tuple(series(seed)) for seed in range(1, 21)}) == 20


def test_draws_follow_the_probabilities() -> None:
    wanted = np.array([0.5, 0.3, 0.0, 0.2])
    with np.errstate(divide="ignore"):
        logits = np.log(wanted).astype(np.float32)
    sampler = Sampler(SamplingSettings(True, seed=1), 4, [])
    counts = np.bincount([sampler.choose(logits) for _ in range(20_000)], minlength=4)
    assert counts[2] == 0
    np.testing.assert_allclose(counts / 20_000, wanted, atol=0.0175)  # 5 standard deviations


def test_split_mix_64_gives_the_published_numbers() -> None:
    state, found = 1234567, []
    for _ in range(3):
        state, bits = split_mix_64(state)
        found.append(bits)
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]
