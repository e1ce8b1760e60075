import itertools
from pathlib import Path

import numpy as np
import pytest

import pop_runtime
from pop_runtime import batch
from pop_runtime.errors import UsageError
from tests.runtime.tiny_bundle import MAX_POSITIONS, make_bundle

PROMPTS = [[int(token) for token in np.random.default_rng(n).integers(3, 250, n)] for n in (3, 11, 40)]


@pytest.fixture(scope="module")
def ending_model(tmp_path_factory: pytest.TempPathFactory, model: pop_runtime.Model) -> pop_runtime.Model:
    """A model whose first two prompts end at different steps, and whose third does not end by itself."""
    free = [[token.id for token in model.generate(prompt, max_new_tokens=12, ignore_eos=True)] for prompt in PROMPTS]
    first = next(token for token in free[0][2:] if token not in free[1] + free[2])
    second = next(token for token in free[1][4:] if token not in free[0] + free[2])
    ending = pop_runtime.load(make_bundle(tmp_path_factory.mktemp("ends"), eos_token_ids=(first, second)), threads=1)
    lengths = [len(_alone(ending, prompt)[0]) for prompt in PROMPTS]
    assert 0 < lengths[0] < lengths[1] < lengths[2] == 12
    return ending


def _alone(model: pop_runtime.Model, prompt: list[int], **options: object) -> tuple[list[int], str | None]:
    generation = model.generate(prompt, max_new_tokens=12, **options)  # type: ignore[arg-type]
    return [token.id for token in generation], generation.stop_reason


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_row_is_its_own_run_whatever_the_order(ending_model: pop_runtime.Model, order: tuple[int, ...]) -> None:
    prompts = [PROMPTS[index] for index in order]
    answers = ending_model.generate_batch(prompts, max_new_tokens=12)
    assert [(answer.token_ids, answer.stop_reason) for answer in answers] == [
        _alone(ending_model, prompt) for prompt in prompts
    ]
    assert {answer.stop_reason for answer in answers} == {"end", "length"}


@pytest.mark.parametrize("size", [1, 2])
def test_small_batches_are_their_own_runs(ending_model: pop_runtime.Model, size: int) -> None:
    answers = ending_model.generate_batch(PROMPTS[:size], max_new_tokens=12)
    assert [answer.token_ids for answer in answers] == [_alone(ending_model, prompt)[0] for prompt in PROMPTS[:size]]


def test_rows_sample_as_they_would_alone(model: pop_runtime.Model) -> None:
    options = {"temperature": 1.5, "seed": 3, "repetition_penalty": 1.2}
    answers = model.generate_batch(PROMPTS, max_new_tokens=12, **options)
    assert [answer.token_ids for answer in answers] == [_alone(model, prompt, **options)[0] for prompt in PROMPTS]


def test_without_a_seed_one_is_drawn_for_all_rows_and_shown(model: pop_runtime.Model) -> None:
    # every row drew its own, and none was to be seen
    answers = model.generate_batch([PROMPTS[0]] * 3, max_new_tokens=12, temperature=1.5)
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    settings = answers[0].settings
    assert settings["do_sample"] and settings == answers[2].settings
    alone = model.generate(PROMPTS[0], max_new_tokens=12, temperature=1.5, seed=settings["seed"])
    assert [token.id for token in alone] == answers[0].token_ids
    assert alone.stats.settings == settings


def test_a_prompt_that_cannot_be_read_is_named_by_its_row(model: pop_runtime.Model) -> None:
    with pytest.raises(
        UsageError, match=r"row 1, prompt: expected fewer than 64 tokens, so that one more fits, found 70"
    ):
        model.generate_batch([[5], [5] * 70])
    with pytest.raises(UsageError, match=r"row 2, prompt, token 0: expected an id of 0\.\.299, found 300"):
        model.generate_batch([[5], [5], [300]])
    with pytest.raises(UsageError, match=r"^temperature: expected"):  # of no row
        model.generate_batch([[5], [5]], temperature=-1)


def test_a_message_is_a_prompt_of_a_batch(chat_model: pop_runtime.Model) -> None:
    message = {"role": "user", "content": "hi"}
    answers = chat_model.generate_batch([message, "hi", [message]], max_new_tokens=3)
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids


def test_a_row_near_the_limit_stops_alone(model: pop_runtime.Model) -> None:
    long = (PROMPTS[2] * 2)[: MAX_POSITIONS - 2]
    answers = model.generate_batch([long, PROMPTS[0]], max_new_tokens=9, ignore_eos=True)
    assert [len(answer.token_ids) for answer in answers] == [2, 9]


def test_no_buffer_holds_a_number_that_is_not_finite(
    ending_model: pop_runtime.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = []
    allocate = batch.allocate_cache
    monkeypatch.setattr(batch, "allocate_cache", lambda *args: caches.append(allocate(*args)) or caches[0])
    ending_model.generate_batch(PROMPTS, max_new_tokens=12)
    assert all(np.isfinite(buffer).all() for buffer in caches[0].buffers.values())
    lengths = (caches[0].depth > 0).sum(axis=1)
    assert (lengths >= [3, 11, 40]).all() and (lengths <= [6, 21, 52]).all()  # an ended row does not grow
    padded = next(iter(caches[0].buffers.values()))[0, :, lengths[0] :]
    assert not padded.any()


def test_texts_of_a_batch_are_decoded(chat_model: pop_runtime.Model) -> None:
    answers = chat_model.generate_batch(["hi", "you"], max_new_tokens=4)
    assert [answer.text for answer in answers] == [
        chat_model.generate(p, max_new_tokens=4) and _text(chat_model, p) for p in ("hi", "you")
    ]


def _text(model: pop_runtime.Model, prompt: str) -> str:
    return "".join(token.text for token in model.generate(prompt, max_new_tokens=4))


@pytest.mark.parametrize("prompts", [[], "text", {"role": "user", "content": "hi"}])
def test_a_batch_is_a_list_of_prompts(model: pop_runtime.Model, prompts: object) -> None:
    with pytest.raises(UsageError, match="prompts: expected a list of at least one prompt"):
        model.generate_batch(prompts)  # type: ignore[arg-type]


def test_an_unknown_option_is_not_swallowed(model: pop_runtime.Model) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        model.generate_batch(PROMPTS, max_tokens=3)


def test_a_batch_leaves_the_folder_alone(bundle: Path) -> None:
    assert sorted(path.name for path in bundle.iterdir()) == [
        "decode.onnx",
        "manifest.json",
        "prefill.onnx",
        "weights.bin",
    ]
