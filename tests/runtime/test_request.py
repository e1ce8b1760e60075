"""Options of an answer: windows that a fit does not cover, chunks, log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pop_runtime
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Plan, Windows
from pop_runtime.sampling import log_probabilities
from tests.runtime.tiny_bundle import PROMPT, SKIPPED, L, Twin, ids_of, make_bundle, tiny_weights


def _fitted(folder: Path, **parts: tuple[int, ...]) -> pop_runtime.Model:
    plan = Plan(L, SKIPPED, "user", **parts)
    return pop_runtime.load(make_bundle(folder, plan=plan, windows=Windows(4, 2)), threads=1)


@pytest.mark.parametrize("part", ["refitted_layers", "surrogate_layers"])
def test_a_sink_smaller_than_that_of_the_fit_is_refused_with_the_way_out(tmp_path: Path, part: str) -> None:
    model = _fitted(tmp_path, **{part: (1,)})
    message = "sink_tokens: expected at least 4, found 3; .*fitted without those positions.*--sink-tokens 3"
    with pytest.raises(UsageError, match=message):
        model.generate(PROMPT, sink_tokens=3)
    with pytest.raises(UsageError, match=message):
        model.generate_batch([PROMPT], sink_tokens=3)
    with pytest.raises(UsageError, match=message):
        model.sequence(50).append(PROMPT, windows=Windows(3, 2))
    conversation = model.conversation()
    conversation.append(PROMPT)
    with pytest.raises(UsageError, match=message):
        conversation.generate(sink_tokens=3)
    for options in ({}, {"sink_tokens": 4}, {"sink_tokens": 9}, {"sink_tokens": 0, "prefill": "full"}):
        chosen: Any = options
        assert len(ids_of(model.generate(PROMPT, max_new_tokens=2, ignore_eos=True, **chosen))) == 2


def test_without_a_fit_any_sink_will_do(tmp_path: Path) -> None:
    model = _fitted(tmp_path)
    generation = model.generate(PROMPT, sink_tokens=0, boundary_tokens=1, max_new_tokens=4, ignore_eos=True)
    assert ids_of(generation) == Twin(tiny_weights()).greedy(PROMPT, 4)


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 4096])
def test_chunks_change_no_token(model: pop_runtime.Model, chunk: int) -> None:
    generation = model.generate(PROMPT, prefill_chunk_tokens=chunk, max_new_tokens=8, ignore_eos=True)
    assert ids_of(generation) == Twin(tiny_weights()).greedy(PROMPT, 8)
    assert generation.stats.settings["prefill_chunk_tokens"] == chunk


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens: expected at least 1, found 0"),
        ({"prefill_chunk_tokens": 1.5}, "prefill_chunk_tokens: expected a whole number, found 1.5"),
        ({"prefill_chunk_tokens": True}, "prefill_chunk_tokens: expected a whole number, found True"),
        ({"sink_tokens": 2.5}, "sink_tokens: expected a whole number, found 2.5"),
        ({"sink_tokens": "4"}, "sink_tokens: expected a whole number, found '4'"),
        ({"boundary_tokens": 1.0}, "boundary_tokens: expected a whole number, found 1.0"),
        ({"seed": 1.5}, "seed: expected a whole number of 0..18446744073709551615, found 1.5"),
        ({"seed": "1"}, "seed: expected a whole number of 0..18446744073709551615, found '1'"),
        ({"seed": -1}, "seed: expected a whole number of 0..18446744073709551615, found -1"),
        ({"seed": 2**64}, "seed: expected a whole number of 0..18446744073709551615, found 18446744073709551616"),
        ({"temperature": 10**400}, "temperature: expected a number of at least 0, found 1000"),
        ({"logprobs": -1}, "logprobs: expected at least 0, found -1"),
        ({"logprobs": True}, "logprobs: expected a whole number, found True"),
        ({"logprobs": 301}, "logprobs: expected at most the vocabulary's 300, found 301"),
        ({"min_p": 2}, "min_p: expected a number from 0 to 1"),
        (
            {"prompt_logprobs": True},
            "prompt_logprobs: expected prefill='full', found 'pop'; the pruned graph has no head",
        ),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected a whole number, found 1.5"),
    ],
)
def test_an_option_out_of_range_is_refused(model: pop_runtime.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate([5, 6], **options)


def _scores(twin: Twin, token: int, pruned: bool) -> np.ndarray:
    return log_probabilities(twin.feed(token, pruned))


def test_log_probabilities_are_the_models_own_before_penalty_and_temperature(model: pop_runtime.Model) -> None:
    options: Any = {"temperature": 2.0, "seed": 4, "repetition_penalty": 1.5, "top_k": 5, "ignore_eos": True}
    generation = model.generate(PROMPT[:9], max_new_tokens=5, logprobs=3, **options)
    tokens, twin = list(generation), Twin(tiny_weights())
    scores = [_scores(twin, token, index < 8) for index, token in enumerate(PROMPT[:9])][-1]
    for token in tokens:
        assert token.logprob == pytest.approx(scores[token.id], abs=2e-3)
        best = np.argsort(-scores, kind="stable")[:3]
        assert [each for each, _ in token.alternatives] == best.tolist()
        np.testing.assert_allclose([score for _, score in token.alternatives], scores[best], atol=2e-3)
        scores = _scores(twin, token.id, False)
    plain = list(model.generate(PROMPT[:9], max_new_tokens=5, **options))
    assert [(token.id, None, ()) for token in tokens] == [(t.id, t.logprob, t.alternatives) for t in plain]


def test_logprobs_of_zero_gives_those_of_the_tokens_alone(model: pop_runtime.Model) -> None:
    token = next(model.generate(PROMPT[:9], logprobs=0))
    assert token.logprob is not None and token.alternatives == ()


def test_prompt_log_probabilities_are_those_of_the_full_model(model: pop_runtime.Model) -> None:
    generation = model.generate(PROMPT[:9], max_new_tokens=4, prefill="full", prompt_logprobs=True, ignore_eos=True)
    answer, twin = ids_of(generation), Twin(tiny_weights())
    scores = [_scores(twin, token, False) for token in PROMPT[:9]]
    found = generation.prompt_logprobs
    assert found is not None and found[0] is None
    wanted = [scores[index][token] for index, token in enumerate(PROMPT[1:9])]
    np.testing.assert_allclose(np.array(found[1:], float), wanted, atol=2e-3)
    assert answer == Twin(tiny_weights()).greedy(PROMPT[:9], 4, [False] * 9)
    assert model.generate(PROMPT[:9], prefill="full").prompt_logprobs is None


def test_a_batch_gives_the_log_probabilities_of_each_row(model: pop_runtime.Model) -> None:
    prompts, options = [PROMPT[:4], PROMPT[4:20]], {"max_new_tokens": 4, "logprobs": 2, "prefill": "full"}
    chosen: Any = {**options, "prompt_logprobs": True, "ignore_eos": True}
    for prompt, answer in zip(prompts, model.generate_batch(prompts, **chosen), strict=True):
        alone = model.generate(prompt, **chosen)
        tokens = list(alone)
        assert answer.token_ids == [token.id for token in tokens]
        for found, wanted in zip(answer.tokens, tokens, strict=True):
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [each for each, _ in found.alternatives] == [each for each, _ in wanted.alternatives]
        assert alone.prompt_logprobs is not None and answer.prompt_logprobs is not None
        np.testing.assert_allclose(
            np.array(answer.prompt_logprobs[1:], float), np.array(alone.prompt_logprobs[1:], float), atol=1e-4
        )
