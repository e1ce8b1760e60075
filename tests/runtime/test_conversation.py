"""Conversations: what is read, what stays, and what the template's rule costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pop_runtime
from pop_runtime.errors import UsageError
from pop_runtime.sequence import Sequence
from tests.runtime.conftest import CHAT_TEMPLATE, chat_files
from tests.runtime.tiny_bundle import (
    MAX_POSITIONS,
    PROMPT,
    E,
    Twin,
    ids_of,
    make_bundle,
    tiny_weights,
)

POSITIONS = 4096
TRIMMING = CHAT_TEMPLATE.replace("m['content']", "(m['content'] | trim)")
# keeps only what follows "=" of answers that are not the last message, as templates drop reasoning
DROPPING = CHAT_TEMPLATE.replace(
    "m['content']", "(m['content'].split('=')[-1] if m['role'] == 'assistant' else m['content'])"
)
NEEDS_USER = "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no user') }}{% endif %}" + CHAT_TEMPLATE


def _long_weights() -> dict[str, np.ndarray]:
    weights = tiny_weights()
    weights["positions"] = (np.random.default_rng(5).standard_normal((POSITIONS, E)) * 0.5).astype(np.float32)
    return weights


def _load(folder: Path, template: str = CHAT_TEMPLATE, weights: Any = None) -> pop_runtime.Model:
    weights = _long_weights() if weights is None else weights
    make_bundle(folder, weights, text_files=chat_files(template), max_positions=POSITIONS)
    return pop_runtime.load(folder, threads=1)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> pop_runtime.Model:
    return _load(tmp_path_factory.mktemp("long"))


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """Every stretch that is fed: how many tokens, and to which stage."""
    stretches: list[tuple[int, str]] = []
    feed = Sequence.feed

    def spy(self: Sequence, ids: Any, stage: Any, cancellation: Any = None) -> Any:
        stretches.append((len(ids), stage))
        return feed(self, ids, stage, cancellation)

    monkeypatch.setattr(Sequence, "feed", spy)
    yield stretches


def _text_ids(model: pop_runtime.Model, text: str) -> list[int]:
    assert model.tokenizer is not None
    return list(model.tokenizer.encode(text, add_special_tokens=False).ids)


def test_turns_read_only_what_is_new_and_end_at_full_depth(
    long_model: pop_runtime.Model, fed: list[tuple[int, str]]
) -> None:
    conversation, twin = long_model.conversation(), Twin(_long_weights())
    conversation.append("hi")
    first = ids_of(conversation.generate(max_new_tokens=4, ignore_eos=True))
    opening = _text_ids(long_model, "<turn>user:hi<eos><turn>assistant:")
    assert first == twin.greedy(opening, 4)
    assert fed == [(len(opening) - 1, "prefill"), (1, "decode")] + [(1, "decode")] * 3
    fed.clear()
    conversation.append("and?")
    second = ids_of(conversation.generate(max_new_tokens=5, ignore_eos=True))
    turn = _text_ids(long_model, "<eos><turn>user:and?<eos><turn>assistant:")
    assert second == twin.greedy(turn, 5)
    assert fed == [(1, "decode"), (len(turn) - 1, "prefill"), (1, "decode")] + [(1, "decode")] * 4
    assert conversation.token_ids == [*opening, *first, *turn, *second]
    depth = ["pruned"] * (len(opening) - 1) + ["full"] * 5 + ["pruned"] * (len(turn) - 1) + ["full"] * 5
    assert conversation.provenance == tuple(depth)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


def test_twenty_turns_are_the_full_computation_of_one_long_prompt(
    long_model: pop_runtime.Model, fed: list[tuple[int, str]]
) -> None:
    conversation = long_model.conversation()
    for turn in range(20):
        conversation.append(f"question {turn}")
        past = len(conversation)
        fed.clear()
        generation = conversation.generate(max_new_tokens=6, prefill="full", ignore_eos=True)
        answer = ids_of(generation)
        num_read = sum(count for count, _ in fed)
        whole = conversation.token_ids[: len(conversation) - len(answer)]
        assert num_read == len(whole) - past + bool(past) + len(answer) - 1  # the last answer's last token, and steps
        assert generation.stats.num_rewound_tokens == 0
        alone = long_model.generate(whole, max_new_tokens=6, prefill="full", ignore_eos=True)
        assert answer == ids_of(alone)
    assert set(conversation.provenance) == {"full"}


def test_ids_and_raw_text_are_turns_too(model: pop_runtime.Model, chat_model: pop_runtime.Model) -> None:
    conversation, twin = model.conversation(), Twin(tiny_weights())
    conversation.append(PROMPT[:4])
    conversation.append(PROMPT[4:9])
    assert ids_of(conversation.generate(max_new_tokens=4, ignore_eos=True)) == twin.greedy(PROMPT[:9], 4)
    conversation.append(PROMPT[9:20])
    assert ids_of(conversation.generate(max_new_tokens=5, ignore_eos=True)) == twin.greedy(PROMPT[9:20], 5)
    assert conversation.messages == ()
    text = chat_model.conversation()
    text.append("one ", raw=True)
    text.append("two", raw=True)
    ids_of(text.generate(max_new_tokens=1))
    assert text.token_ids[:7] == _text_ids(chat_model, "one two")


def test_a_first_token_at_full_depth_is_the_sinks_only_once(tmp_path: Path) -> None:
    model = _load(tmp_path)
    conversation = model.conversation()
    for ids in (PROMPT[:6], PROMPT[6:16]):
        conversation.append(ids)
        ids_of(conversation.generate(max_new_tokens=1, sink_tokens=4, boundary_tokens=2, ignore_eos=True))
    wanted = ["full"] * 6 + ["full"] + ["pruned"] * 8 + ["full"] * 2
    assert conversation.provenance == tuple(wanted)


# What the template changes


def _liking(model: pop_runtime.Model, character: str) -> dict[str, np.ndarray]:
    """Return weights that favour a character."""
    weights = _long_weights()
    weights["head"][:, _text_ids(model, character)[0]] += weights["head"].std() * 0.5
    return weights


def test_an_answer_that_the_template_trims_costs_the_tokens_that_differ(
    tmp_path: Path, long_model: pop_runtime.Model
) -> None:
    weights = _long_weights()
    weights["head"][:, 94:] = 0  # ids of printable ASCII bytes stay
    weights["head"][:, :94] *= 10
    weights["head"][:, _text_ids(long_model, " ")[0]] = weights["head"][:, 5] * 1.5
    model = _load(tmp_path, TRIMMING, weights)
    texts = ((seed, _sampled(model, seed)) for seed in range(300))
    seed = next(seed for seed, text in texts if len(text) == 12 and text.isascii() and text.endswith(" "))
    conversation = model.conversation()
    conversation.append("a")
    answer = ids_of(conversation.generate(max_new_tokens=12, temperature=3.0, seed=seed, ignore_eos=True))
    past, text = len(conversation), conversation.messages[-1]["content"]
    conversation.append("b")
    generation = conversation.generate(max_new_tokens=1, ignore_eos=True)
    num_spaces = len(text) - len(text.rstrip())
    assert generation.stats.num_rewound_tokens == num_spaces > 0
    assert generation.stats.num_past_tokens == past - num_spaces
    ids_of(generation)
    turn = _text_ids(model, "<eos><turn>user:b<eos><turn>assistant:")
    assert conversation.token_ids[past - 12 : -1] == [*answer[: 12 - num_spaces], *turn]


def test_reasoning_that_the_template_drops_is_given_up_and_the_rest_read_again(
    tmp_path: Path, long_model: pop_runtime.Model
) -> None:
    model = _load(tmp_path, DROPPING, _liking(long_model, "="))
    seed = next(seed for seed in range(200) if "=" in _sampled(model, seed)[:-1])
    conversation = model.conversation()
    conversation.append("a")
    ids_of(conversation.generate(max_new_tokens=12, temperature=3.0, seed=seed, ignore_eos=True))
    conversation.append("b")
    generation = conversation.generate(max_new_tokens=2, ignore_eos=True)
    assert generation.stats.num_rewound_tokens > 0
    ids_of(generation)
    wanted = model.render_prompt(conversation.messages[:3])
    assert model.tokenizer is not None
    assert model.tokenizer.decode(conversation.token_ids[:-2], skip_special_tokens=False) == wanted


def _sampled(model: pop_runtime.Model, seed: int) -> str:
    generation = model.generate("a", max_new_tokens=12, temperature=3.0, seed=seed, ignore_eos=True)
    list(generation)
    return generation.text


def test_a_system_message_may_come_alone_though_the_template_refuses_it(tmp_path: Path) -> None:
    model = _load(tmp_path, NEEDS_USER)
    conversation = model.conversation()
    conversation.append({"role": "system", "content": "S"})
    conversation.append("hi")
    ids_of(conversation.generate(max_new_tokens=1, ignore_eos=True))
    assert conversation.token_ids[:-1] == model.encode_prompt(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    )


def test_messages_that_the_template_refuses_change_nothing(tmp_path: Path) -> None:
    model = _load(
        tmp_path, "{% if messages | length > 1 %}{{ raise_exception('too many') }}{% endif %}" + CHAT_TEMPLATE
    )
    conversation = model.conversation()
    conversation.append("hi")
    with pytest.raises(UsageError, match="too many"):
        conversation.append("more")
    assert [message["content"] for message in conversation.messages] == ["hi"]
    assert ids_of(conversation.generate(max_new_tokens=2, ignore_eos=True))


# Limits


def test_a_prompt_over_capacity_is_refused_and_the_conversation_goes_on(chat_model: pop_runtime.Model) -> None:
    conversation = chat_model.conversation()
    conversation.append("hi")
    before = ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    tokens = conversation.token_ids
    with pytest.raises(UsageError, match=f"expected fewer than {MAX_POSITIONS} tokens, so that one more fits, found"):
        conversation.append("x" * 60)
    assert conversation.token_ids == tokens and len(conversation.messages) == 2
    conversation.append("y")
    assert ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    assert conversation.token_ids[: len(tokens)] == tokens and before == tokens[-3:]


def test_a_given_capacity_is_the_limit(model: pop_runtime.Model) -> None:
    conversation = model.conversation(capacity=12)
    conversation.append(PROMPT[:6])
    with pytest.raises(UsageError, match="expected fewer than 12 tokens, so that one more fits, found 12"):
        conversation.append(PROMPT[:6])
    assert len(ids_of(conversation.generate(ignore_eos=True))) == 6
    with pytest.raises(UsageError, match="expected fewer than 12 tokens"):
        conversation.generate()
    with pytest.raises(UsageError, match="capacity: expected 1"):
        model.conversation(capacity=MAX_POSITIONS + 1)


def test_the_cache_is_sized_by_need_and_grows(long_model: pop_runtime.Model) -> None:
    conversation, fixed = long_model.conversation(), long_model.conversation(capacity=600)
    sizes = []
    for turn in range(8):
        prompt = [int(token) for token in np.random.default_rng(turn).integers(3, 250, 40)]
        answers = []
        for each in (conversation, fixed):
            each.append(prompt)
            answers.append(ids_of(each.generate(max_new_tokens=10, ignore_eos=True)))
        assert answers[0] == answers[1]
        sizes.append(conversation._sequence.capacity)
    assert sizes == [50, 100, 200, 200, 400, 400, 400, 400]
    assert conversation.provenance == fixed.provenance


# Rewinding


def test_a_rewound_answer_comes_again(long_model: pop_runtime.Model, fed: list[tuple[int, str]]) -> None:
    conversation = long_model.conversation()
    conversation.append("hi")
    ids_of(conversation.generate(max_new_tokens=4, ignore_eos=True))
    conversation.append("and?")
    answer = ids_of(conversation.generate(max_new_tokens=8, ignore_eos=True))
    tokens, messages = conversation.token_ids, conversation.messages
    for kept in (0, 1):
        assert conversation.rewind(len(tokens) - 8 + kept) in (len(tokens) - 8, len(tokens) - 8 + kept)
        assert conversation.messages == messages[:-1]
        at = len(conversation)
        fed.clear()
        assert (
            ids_of(conversation.generate(max_new_tokens=len(tokens) - at, ignore_eos=True))
            == answer[at - len(tokens) :]
        )
        assert fed[0] == (1, "decode")  # the last token again, for its logits
        assert conversation.token_ids == tokens
        assert conversation.messages == messages


def test_rewinding_into_a_message_drops_it(long_model: pop_runtime.Model) -> None:
    conversation = long_model.conversation()
    conversation.append("hi")
    ids_of(conversation.generate(max_new_tokens=4, ignore_eos=True))
    conversation.rewind(5)
    assert conversation.messages == () and len(conversation) == len(conversation.provenance) == 5
    conversation.append("you")
    generation = conversation.generate(max_new_tokens=3, ignore_eos=True)
    assert ids_of(generation) == ids_of(long_model.generate("you", max_new_tokens=3, ignore_eos=True))
    conversation.rewind(0)
    with pytest.raises(UsageError, match="expected something to answer, found nothing"):
        conversation.generate()


def test_a_rewound_position_is_given_back_to_the_graph_that_reads_it_now(model: pop_runtime.Model) -> None:
    conversation = model.conversation()
    conversation.append(PROMPT[:10])
    ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    assert conversation.rewind(7) == 7
    assert conversation.provenance == ("pruned",) * 7
    conversation.append(PROMPT[7:10])
    tokens = ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    assert tokens == Twin(tiny_weights()).greedy(PROMPT[:10], 3)
    conversation.rewind(7)
    ids_of(conversation.generate(max_new_tokens=1, ignore_eos=True))
    assert conversation.provenance == ("pruned",) * 6 + ("full",)  # the last token was fed again, in full


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_outside_is_refused(model: pop_runtime.Model, position: int) -> None:
    conversation = model.conversation()
    conversation.append(PROMPT[:6])
    ids_of(conversation.generate(max_new_tokens=1, ignore_eos=True))
    with pytest.raises(UsageError, match=r"rewind: expected a position of 0\.\.7, found"):
        conversation.rewind(position)


def test_undo_takes_back_what_is_pending_and_then_whole_turns(long_model: pop_runtime.Model) -> None:
    conversation = long_model.conversation()
    states = []
    for text in ("one", "two", "three"):
        states.append((conversation.token_ids, conversation.messages))
        conversation.append(text)
        ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    states.append((conversation.token_ids, conversation.messages))
    conversation.append("four")
    for tokens, messages in reversed(states):
        conversation.undo()
        assert (conversation.token_ids, conversation.messages) == (tokens, messages)
    with pytest.raises(UsageError, match="undo: expected at least one turn, found none"):
        conversation.undo()
    conversation.append("one")
    ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    assert conversation.token_ids == states[1][0]


def test_undo_goes_back_turn_by_turn_though_the_template_forgets_the_oldest(tmp_path: Path) -> None:
    model = _load(tmp_path, CHAT_TEMPLATE.replace("in messages", "in messages[-3:]"))
    conversation = model.conversation()
    for text in ("one", "two", "three"):
        conversation.append(text)
        list(conversation.generate(max_new_tokens=3, ignore_eos=True))
    for num_turns in (2, 1, 0):
        conversation.undo()
        assert [message["content"] for message in conversation.messages if message["role"] == "user"] == [
            "one", "two", "three",
        ][:num_turns]  # fmt: skip
    assert len(conversation) == 0


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, NEEDS_USER])
def test_undo_leaves_the_system_messages_that_open_a_conversation(tmp_path: Path, template: str) -> None:
    # deleted with the first turn, the rest of the chat ran without them
    conversation = _load(tmp_path, template).conversation()
    opening = {"role": "system", "content": "S"}
    conversation.append(opening)
    with pytest.raises(UsageError, match="undo: expected at least one turn, found none"):
        conversation.undo()
    conversation.append("one")
    conversation.undo()  # pending
    assert conversation.messages == (opening,)
    conversation.append("one")
    wanted = ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    conversation.undo()  # read and answered
    assert (conversation.messages, conversation.token_ids) == ((opening,), [])
    conversation.append("one")
    assert ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True)) == wanted
    conversation.append([{"role": "system", "content": "T"}, {"role": "user", "content": "two"}])
    conversation.undo()  # a system message further on belongs to its turn
    assert [message["content"] for message in conversation.messages[:2]] == ["S", "one"]


# Leaving


def test_an_answer_that_is_left_stays_as_far_as_it_was_handed_out(long_model: pop_runtime.Model) -> None:
    conversation = long_model.conversation()
    conversation.append("hi")
    generation = conversation.generate(max_new_tokens=30, ignore_eos=True)
    for _ in range(5):
        next(generation)
    conversation.append("and?")  # closes it
    assert generation.stop_reason == "cancelled"
    assert list(generation) == []
    assert conversation.messages[1] == {"role": "assistant", "content": generation.text}
    assert ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True))
    whole = long_model.render_prompt(conversation.messages[:3])
    assert long_model.tokenizer is not None
    assert long_model.tokenizer.decode(conversation.token_ids[:-3], skip_special_tokens=False) == whole


def test_a_turn_that_was_never_read_is_still_to_be_read(long_model: pop_runtime.Model) -> None:
    conversation = long_model.conversation()
    conversation.append("hi")
    conversation.generate().close()
    assert len(conversation) == 0 and len(conversation.messages) == 1
    wanted = ids_of(long_model.generate("hi", max_new_tokens=3, ignore_eos=True))
    assert ids_of(conversation.generate(max_new_tokens=3, ignore_eos=True)) == wanted


def test_an_answer_with_a_stop_string_is_cached_without_it(tmp_path: Path) -> None:
    model = _load(tmp_path)
    seed = 7
    text = _sampled(model, seed)
    stop = text[-3:]
    conversation = model.conversation()
    conversation.append("a")
    generation = conversation.generate(max_new_tokens=12, temperature=3.0, seed=seed, ignore_eos=True, stop=stop)
    list(generation)
    assert generation.stop_reason == "stop"
    assert conversation.messages[-1]["content"] == generation.text == text[: text.index(stop)]
    conversation.append("b")
    after = conversation.generate(max_new_tokens=1, ignore_eos=True)
    ids_of(after)
    assert model.tokenizer is not None
    whole = model.render_prompt(conversation.messages[:3])
    assert model.tokenizer.decode(conversation.token_ids[:-1], skip_special_tokens=False) == whole
    assert after.stats.num_rewound_tokens == 0


# Misuse


def test_messages_and_plain_tokens_do_not_mix(chat_model: pop_runtime.Model, model: pop_runtime.Model) -> None:
    conversation = chat_model.conversation()
    conversation.append("hi")
    with pytest.raises(UsageError, match="expected messages as before, found ids or raw text"):
        conversation.append([5, 6])
    plain = chat_model.conversation()
    plain.append([5, 6])
    with pytest.raises(UsageError, match="expected ids or raw text as before, found messages"):
        plain.append("hi")
    with pytest.raises(UsageError, match="expected a tokenizer for messages, found none"):
        model.conversation().append([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", ["", [], [300], [{"role": "user"}], {"role": "user"}])
def test_what_cannot_be_read_is_refused_and_changes_nothing(chat_model: pop_runtime.Model, prompt: Any) -> None:
    conversation = chat_model.conversation()
    with pytest.raises(UsageError, match="prompt"):
        conversation.append(prompt, raw=isinstance(prompt, str))
    with pytest.raises(UsageError, match="expected something to answer, found nothing"):
        conversation.generate()
    conversation.append("hi")
    assert ids_of(conversation.generate(max_new_tokens=1, ignore_eos=True))


def test_options_are_those_of_generate_except_raw(chat_model: pop_runtime.Model) -> None:
    conversation = chat_model.conversation()
    conversation.append("hi")
    with pytest.raises(TypeError, match="takes no 'raw'"):
        conversation.generate(raw=True)
    with pytest.raises(TypeError, match="max_tokens"):
        conversation.generate(max_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="temperature"):
        conversation.generate(temperature=-1)
    assert ids_of(conversation.generate(max_new_tokens=1, ignore_eos=True))
