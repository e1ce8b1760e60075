"""pop-eval's figures against a plain twin in numpy, and the parts they are made of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import pop_runtime
from pop_export.evaluate import EvalConfig, evaluate
from pop_export.evaluation.retrieval import DEPTHS, make_tasks, run_tasks, summarise_tasks
from pop_export.evaluation.scores import kl_divergence, log_softmax
from pop_export.evaluation.sides import BundleSide
from pop_export.evaluation.text import Document, cut_windows, encode_document
from pop_runtime.errors import BackendError, UsageError
from pop_runtime.manifest import Windows
from tests.runtime.conftest import chat_files
from tests.runtime.tiny_bundle import SKIPPED, Twin, make_bundle, tiny_weights

CONTEXT, CONTINUATION = 20, 8
TEXT = " ".join(f"In the year {year} the harbour was dug {year % 7} feet deeper." for year in range(1700, 1760))
CONFIG = EvalConfig(context=CONTEXT, continuation=CONTINUATION, windows=3, retrieval=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return pop_runtime.load(make_bundle(tmp_path_factory.mktemp("bundle"), text_files=chat_files()), threads=1)


@pytest.fixture(scope="module")
def document(model):
    return encode_document("a.txt", TEXT, model.tokenizer)


def _twin_logits(ids, pruned_positions, num_scored):
    """Return the twin's logits before each scored token, [C, V] float64."""
    twin = Twin(tiny_weights(), SKIPPED)
    rows = [twin.feed(int(token), at in pruned_positions) for at, token in enumerate(ids[:-1])]
    return np.stack(rows[-num_scored:])


@pytest.mark.parametrize("windows", [Windows(), Windows(2, 3), Windows(0, 18)])
def test_every_figure_is_that_of_a_plain_twin(model, document, windows):
    config = dataclasses.replace(CONFIG, **dataclasses.asdict(windows))
    found = evaluate(model, [document], config).files["a.txt"]
    kl, agrees, nll_full, nll_pruned, common = [], [], [], [], []
    pruned_positions = set(range(windows.sink_tokens, CONTEXT - windows.boundary_tokens))
    for ids in cut_windows(document, CONTEXT + CONTINUATION, 3, seed=0):
        full, pruned = (_twin_logits(ids, chosen, CONTINUATION) for chosen in (set(), pruned_positions))
        p, q = (np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) for logits in (full, pruned))
        kl += (p * np.log(p / q)).sum(axis=1).tolist()
        agrees += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
        truth = ids[CONTEXT:]
        nll_full += (-np.log(p[np.arange(CONTINUATION), truth])).tolist()
        nll_pruned += (-np.log(q[np.arange(CONTINUATION), truth])).tolist()
        prompt, is_pruned = ids[:CONTEXT].tolist(), [at in pruned_positions for at in range(CONTEXT)]
        answers = [
            Twin(tiny_weights(), SKIPPED).greedy(prompt, CONTINUATION, chosen)
            for chosen in ([False] * CONTEXT, is_pruned)
        ]
        equal = [a == b for a, b in zip(*answers, strict=True)]
        common.append(equal.index(False) if False in equal else CONTINUATION)
    assert found.kl_mean_nats == pytest.approx(np.mean(kl), rel=1e-2) and found.kl_mean_nats > 1e-3
    assert found.kl_p95_nats == pytest.approx(np.percentile(kl, 95), rel=1e-2)
    assert found.top1_agreement == np.mean(agrees)
    assert found.perplexity_full == pytest.approx(np.exp(np.mean(nll_full)), rel=1e-3)
    assert found.perplexity_pruned == pytest.approx(np.exp(np.mean(nll_pruned)), rel=1e-3)
    assert found.common_greedy_tokens == pytest.approx(np.mean(common))


def test_full_against_full_differs_by_nothing(model, document):
    evaluation = evaluate(model, [document], dataclasses.replace(CONFIG, prefill="full"))
    assert evaluation.overall.kl_mean_nats == evaluation.overall.kl_p95_nats == 0.0
    assert evaluation.overall.top1_agreement == 1.0
    assert evaluation.overall.perplexity_full == evaluation.overall.perplexity_pruned
    assert evaluation.overall.common_greedy_tokens == CONTINUATION
    assert evaluation.num_pruned_tokens == 0


def test_how_windows_are_batched_changes_nothing(model, document):
    other = Document("b.txt", document.ids[::-1].copy(), ())
    whole = evaluate(model, [document, other], CONFIG)
    single = evaluate(model, [document, other], dataclasses.replace(CONFIG, batch=1))
    for name in ("a.txt", "b.txt"):
        assert dataclasses.astuple(whole.files[name]) == pytest.approx(
            dataclasses.astuple(single.files[name]), rel=1e-3
        )
    assert whole.overall.num_windows == 6
    assert whole.overall.kl_mean_nats == pytest.approx(
        np.mean([whole.files[name].kl_mean_nats for name in ("a.txt", "b.txt")])
    )


def test_windows_do_not_overlap_are_spread_and_follow_the_seed():
    document = Document("a", np.arange(1000), ())
    first, again, other = (cut_windows(document, 100, 6, seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.shape == (6, 100)
    assert len(np.unique(first)) == 600
    assert (np.diff(first[:, 0]) >= 100).all()


def test_windows_begin_with_what_the_tokenizer_puts_before_text():
    rows = cut_windows(Document("a", np.arange(10, 40), (1,)), 11, 3, seed=0)
    assert rows[:, 0].tolist() == [1, 1, 1]
    assert sorted(rows[:, 1:].ravel().tolist()) == list(range(10, 40))


def test_a_short_document_gives_fewer_windows_and_a_shorter_one_none():
    assert len(cut_windows(Document("a", np.arange(25), ()), 10, 6, seed=0)) == 2
    with pytest.raises(UsageError, match=r"--data a: expected at least 10 tokens for one window, found 9; give"):
        cut_windows(Document("a", np.arange(9), ()), 10, 6, seed=0)


def test_a_divergence_counts_nothing_where_the_full_model_rules_a_token_out():
    p, q = np.log([0.5, 0.5, 1e-300]), np.log([0.25, 0.25, 0.5])
    p[2] = -np.inf
    assert kl_divergence(p, q) == pytest.approx(np.log(2))
    assert log_softmax(np.array([1000.0, 1000.0])) == pytest.approx(np.log([0.5, 0.5]))


class _Broken:
    """A side whose logits are no numbers."""

    def start(self, prompts, num_new):
        return np.full((len(prompts), 300), np.nan, np.float32)

    def step(self, tokens):
        raise AssertionError

    def rewind(self):
        raise AssertionError


def test_logits_that_are_no_numbers_are_an_error(model, document):
    with pytest.raises(BackendError, match="full side: expected logits that are numbers, found NaN"):
        evaluate(model, [document], CONFIG, _Broken())


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """A raw-text bundle with room for the retrieval prompt."""
    from tests.runtime import tiny_bundle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_bundle, "MAX_POSITIONS", 320)
        folder = make_bundle(tmp_path_factory.mktemp("long"), text_files=chat_files(None))
    return pop_runtime.load(folder, threads=1)


def test_retrieval_prompts_have_one_length_and_hide_the_key_at_its_depth(long_model):
    document = encode_document("a.txt", TEXT, long_model.tokenizer)
    tasks = make_tasks(long_model, [document], 300, 2, seed=0)
    assert [task.depth for task in tasks] == [*DEPTHS, *DEPTHS]
    assert {len(task.prompt) for task in tasks} == {300}
    places = []
    for task in tasks[:5]:
        text = long_model.tokenizer.decode(task.prompt.tolist())
        assert text.count(task.key) == 1 and text.endswith(" is")
        assert long_model.tokenizer.decode(task.answer.tolist()) == f" {task.key}"
        places.append(text.index(task.key))
    assert places == sorted(places)


def test_every_depth_is_tried_in_every_document(long_model):
    documents = [
        encode_document(name, TEXT.replace("harbour", name), long_model.tokenizer)
        for name in ("quay", "pier", "dock", "lock", "weir")
    ]
    tasks = make_tasks(long_model, documents, 300, 5, seed=0)
    found = {
        (task.depth, name)
        for task in tasks
        for name in ("quay", "pier", "dock", "lock", "weir")
        if name in long_model.tokenizer.decode(task.prompt.tolist())
    }
    assert len(found) == len(DEPTHS) * 5


class _Oracle:
    """A side that knows the keys of some tasks: its answer to any other is a row of spaces."""

    def __init__(self, tasks, known):
        self.answers = {bytes(task.prompt): task.answer for task in tasks if task.depth in known}

    def start(self, prompts, num_new):
        self.prompts, self.at = prompts, 0
        return self._logits()

    def step(self, tokens):
        self.at += 1
        return self._logits()

    def rewind(self):
        self.at = 0

    def _logits(self):
        logits = np.zeros((len(self.prompts), 300), np.float32)
        for row, prompt in enumerate(self.prompts):
            answer = self.answers.get(bytes(prompt), ())
            logits[row, answer[self.at] if self.at < len(answer) else 32] = 50.0
        return logits


def test_retrieval_counts_answers_that_begin_with_the_key(long_model):
    document = encode_document("a.txt", TEXT, long_model.tokenizer)
    tasks = make_tasks(long_model, [document], 300, 2, seed=0)
    results = [
        run_tasks(_Oracle(tasks, known), tasks, long_model.tokenizer, 3, lambda _: None) for known in (DEPTHS, (0.1,))
    ]
    retrieval = summarise_tasks(tasks, *results, "raw")
    assert retrieval.accuracy_full == 1.0 and retrieval.accuracy_pruned == 0.2
    assert [depth.accuracy_pruned for depth in retrieval.depths] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert retrieval.depths[0].key_logprob_pruned == pytest.approx(0.0, abs=1e-6)
    assert retrieval.depths[1].key_logprob_pruned == pytest.approx(-6 * 50, rel=0.2)


def test_the_log_probability_of_a_key_is_that_of_a_plain_twin(long_model, monkeypatch):
    from tests.runtime import tiny_bundle

    monkeypatch.setattr(tiny_bundle, "MAX_POSITIONS", 320)
    document = encode_document("a.txt", TEXT, long_model.tokenizer)
    task = make_tasks(long_model, [document], 290, 1, seed=3)[2]
    side = BundleSide(long_model, "pop", Windows())
    (_, found), *_ = run_tasks(side, [task], long_model.tokenizer, 1, lambda _: None)
    twin, wanted = Twin(tiny_weights(), SKIPPED), 0.0
    ids = [*task.prompt.tolist(), *task.answer.tolist()]
    for at, token in enumerate(ids[:-1]):
        logits = twin.feed(token, at < len(task.prompt) - 1)
        if at >= len(task.prompt) - 1:
            wanted += log_softmax(logits)[ids[at + 1]]
    assert found == pytest.approx(wanted, abs=1e-2)


def test_retrieval_goes_through_the_chat_template_where_there_is_one(exported_bundle):
    model = pop_runtime.load(exported_bundle, threads=1)
    document = encode_document("a.txt", TEXT, model.tokenizer)
    text = model.tokenizer.decode(
        make_tasks(model, [document], 240, 1, 0)[0].prompt.tolist(), skip_special_tokens=False
    )
    assert text.startswith("<turn>user:There is a secret number")
    assert "<turn>assistant:The secret number for the" in text


def test_retrieval_refuses_what_does_not_fit(long_model):
    document = encode_document("a.txt", TEXT, long_model.tokenizer)
    with pytest.raises(UsageError, match=r"--retrieval-length: expected at least \d+ tokens, found 50"):
        make_tasks(long_model, [document], 50, 1, 0)
    with pytest.raises(UsageError, match=r"--data a: expected \d+ tokens of filler for the retrieval task, found 9"):
        make_tasks(long_model, [Document("a", np.arange(9), ())], 300, 1, 0)
    with pytest.raises(UsageError, match=r"--retrieval-length: expected at most 304 tokens"):
        evaluate(long_model, [document], EvalConfig(context=8, continuation=4, retrieval_length=310))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("context", 1, "--context: expected at least 2, found 1"),
        ("continuation", 0, "--continuation: expected at least 1, found 0"),
        ("windows", 0, "--windows: expected at least 1"),
        ("batch", 0, "--batch: expected at least 1"),
        ("retrieval_keys", 0, "--retrieval-keys: expected at least 1"),
        ("retrieval_length", 0, "--retrieval-length: expected at least 1"),
        ("seed", -1, "--seed: expected at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(field, value, message):
    with pytest.raises(UsageError, match=message):
        EvalConfig(**{field: value})


def test_windows_longer_than_the_model_are_refused(model, document):
    with pytest.raises(UsageError, match="--context, --continuation: expected at most 64 tokens together"):
        evaluate(model, [document], EvalConfig(context=60, continuation=8))
    with pytest.raises(UsageError, match="boundary_tokens: expected at least 1"):
        evaluate(model, [document], dataclasses.replace(CONFIG, boundary_tokens=0))
