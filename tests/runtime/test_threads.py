"""One model in several threads."""

from __future__ import annotations

import threading

import numpy as np

import pop_runtime
from tests.runtime.tiny_bundle import PROMPT, ids_of


def _turns(seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [[int(token) for token in draw.integers(3, 250, size)] for size in (7, 4, 9)]


def _talk(model: pop_runtime.Model, seed: int) -> list[list[int]]:
    conversation, answers = model.conversation(), []
    for turn in _turns(seed):
        conversation.append(turn)
        answers.append(
            ids_of(conversation.generate(max_new_tokens=10, temperature=2.0, seed=seed, ignore_eos=True, stop=None))
        )
    return answers


def test_two_conversations_in_two_threads_give_what_they_give_alone(model: pop_runtime.Model) -> None:
    alone = [_talk(model, seed) for seed in (1, 2)]
    assert alone[0] != alone[1]
    found: dict[int, list[list[list[int]]]] = {1: [], 2: []}
    together = threading.Barrier(2)

    def run(seed: int) -> None:
        for _ in range(10):
            together.wait()
            found[seed].append(_talk(model, seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: [alone[0]] * 10, 2: [alone[1]] * 10}


def test_text_in_two_threads_is_the_text_of_each(chat_model: pop_runtime.Model) -> None:
    chat_model.__dict__.pop("tokenizer", None)  # both threads open it
    wanted = ["".join(token.text for token in chat_model.generate(text, max_new_tokens=8)) for text in ("hi", "you")]
    chat_model.__dict__.pop("tokenizer", None)
    found: dict[str, str] = {}

    def run(text: str) -> None:
        found[text] = "".join(token.text for token in chat_model.generate(text, max_new_tokens=8))

    threads = [threading.Thread(target=run, args=(text,)) for text in ("hi", "you")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found["hi"], found["you"]] == wanted


def test_a_batch_beside_a_conversation_is_not_disturbed(model: pop_runtime.Model) -> None:
    prompts = [PROMPT[:5], PROMPT[5:20]]
    wanted = [answer.token_ids for answer in model.generate_batch(prompts, max_new_tokens=8)]
    alone, found = _talk(model, 3), []
    thread = threading.Thread(target=lambda: found.append(_talk(model, 3)))
    thread.start()
    while thread.is_alive():
        assert [answer.token_ids for answer in model.generate_batch(prompts, max_new_tokens=8)] == wanted
    thread.join()
    assert found == [alone]
