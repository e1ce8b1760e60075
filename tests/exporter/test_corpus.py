"""Calibration text: windows, sources and every way a source can be unusable."""

import json
import sys
import types

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from pop_export.calibration import sources
from pop_export.calibration.corpus import calibration_samples
from pop_runtime.errors import UsageError
from tests.tiny_models import byte_tokenizer

BOS = 256


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def bos_tokenizer():
    """A byte tokenizer that puts <bos> before text by itself."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def samples(tokenizer, *data, num_samples=4, length=16, seed=0, **settings):
    return calibration_samples(
        tokenizer, data=tuple(map(str, data)), num_samples=num_samples, length=length, seed=seed, **settings
    )


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


def numbered(path, num_words=400, prefix=""):
    """A text in which every window of 16 characters occurs once."""
    return write(path, " ".join(f"{prefix}{number:05}" for number in range(num_words)))


def jsonl(path, *rows):
    return write(path, "\n".join(json.dumps(row) for row in rows))


def text_of(tokenizer, windows):
    return [tokenizer.decode(window) for window in windows]


def test_a_text_file_is_cut_into_windows_of_the_asked_length(tokenizer, tmp_path):
    path = numbered(tmp_path / "words.txt")
    found = samples(tokenizer, path, num_samples=5)
    assert [len(window) for window in found.ids] == [16] * 5
    assert all(window.dtype == np.int64 for window in found.ids)
    assert all(window in path.read_text() for window in text_of(tokenizer, found.ids))
    assert found.held_out == ()
    assert found.description == f"{path}; 5 samples of up to 16 tokens, 0 kept aside"


def test_windows_never_overlap_and_those_kept_aside_are_others(tokenizer, tmp_path):
    path = numbered(tmp_path / "words.txt")
    found = samples(tokenizer, path, num_samples=100, num_held_out=30)
    assert (len(found.ids), len(found.held_out)) == (100, 30)
    starts = sorted(path.read_text().index(window) for window in text_of(tokenizer, found.ids + found.held_out))
    assert min(np.diff(starts)) >= 16


def test_what_is_kept_aside_does_not_change_what_is_calibrated_on(tokenizer, tmp_path):
    path = numbered(tmp_path / "words.txt")
    alone, beside = samples(tokenizer, path), samples(tokenizer, path, num_held_out=7)
    np.testing.assert_array_equal(alone.ids, beside.ids)


def test_one_seed_gives_one_choice_and_another_seed_another(tokenizer, tmp_path):
    path = numbered(tmp_path / "words.txt")
    first, again, other = (samples(tokenizer, path, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.ids, again.ids)
    assert first.sha256 == again.sha256 != other.sha256


def test_sources_are_sampled_evenly_whatever_their_size(tokenizer, tmp_path):
    large = numbered(tmp_path / "large.txt", 2000, prefix="L")
    small = numbered(tmp_path / "small.txt", 40, prefix="s")
    found = samples(tokenizer, large, small, num_samples=6, num_held_out=4)
    for windows, share in ((found.ids, 3), (found.held_out, 2)):
        texts = text_of(tokenizer, windows)
        assert sum("L" in text for text in texts) == share
        assert sum("s" in text for text in texts) == share
    assert found.description.startswith(f"{large} (5), {small} (5); 6 samples")


def test_a_short_source_leaves_its_turns_to_the_others(tokenizer, tmp_path):
    large, small = numbered(tmp_path / "large.txt"), write(tmp_path / "small.txt", "one short line")
    found = samples(tokenizer, large, small, num_samples=6)
    assert len(found.ids) == 6
    assert text_of(tokenizer, found.ids).count("one short line") == 1


def test_too_little_text_for_all_is_shared_and_said(tokenizer, tmp_path):
    path = write(tmp_path / "words.txt", "x" * 16 * 6)
    found = samples(tokenizer, path, num_samples=9, num_held_out=3)
    assert (len(found.ids), len(found.held_out)) == (4, 2)
    assert found.description.endswith(
        "4 samples of up to 16 tokens, 2 kept aside; 12 were asked for, the text holds no more"
    )


def test_full_windows_come_before_short_texts_and_longer_before_shorter(tokenizer, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", *({"text": "x" * length} for length in (6, 3, 16, 9)))
    assert [len(window) for window in samples(tokenizer, path).ids] == [16, 9, 6]


def test_a_text_that_occurs_twice_counts_once(tokenizer, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", *[{"text": "the same line"}] * 5)
    assert len(samples(tokenizer, path).ids) == 1


def test_a_text_given_by_two_names_is_not_kept_aside_from_itself(tokenizer, tmp_path):
    path, other = numbered(tmp_path / "words.txt"), jsonl(tmp_path / "rows.jsonl", {"text": "another text"})
    repeated = tmp_path / "again.jsonl"
    repeated.write_text(json.dumps({"text": path.read_text()}) + "\n" + other.read_text())
    both = samples(tokenizer, path, repeated, num_samples=20, num_held_out=10)
    starts = [
        path.read_text().index(window)
        for window in text_of(tokenizer, both.ids + both.held_out)
        if window in path.read_text()
    ]
    assert len(set(starts)) == len(starts) > 20
    with pytest.raises(UsageError, match=r"expected text of its own, found only what is given before it; drop it"):
        samples(tokenizer, path, f"{path.parent}/./{path.name}")


def test_windows_spread_over_a_long_text(tokenizer, tmp_path):
    path = numbered(tmp_path / "words.txt", 4000)
    found = samples(tokenizer, path, num_samples=40)
    starts = [path.read_text().index(window) for window in text_of(tokenizer, found.ids)]
    assert np.histogram(starts, bins=4, range=(0, 24_000))[0].min() >= 4


def test_a_long_word_without_white_space_is_cut_all_the_same(tokenizer, tmp_path):
    assert len(samples(tokenizer, write(tmp_path / "word.txt", "x" * 1000), num_samples=50).ids) == 50


def test_each_sample_begins_with_bos_where_the_tokenizer_adds_it(bos_tokenizer, tmp_path):
    found = samples(bos_tokenizer, numbered(tmp_path / "words.txt"), num_samples=60)
    assert all(window[0] == BOS and BOS not in window[1:] and len(window) == 16 for window in found.ids)


def test_no_sample_begins_with_bos_where_the_tokenizer_does_not_add_it(tokenizer, tmp_path):
    found = samples(tokenizer, numbered(tmp_path / "words.txt"))
    assert not any(BOS in window for window in found.ids)


def test_conversations_are_rendered_with_the_chat_template(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    found = samples(tokenizer, jsonl(tmp_path / "chat.jsonl", {"messages": messages}), length=64)
    assert text_of(tokenizer, found.ids) == ["<turn>user:Hi<eos><turn>assistant:Hello<eos>"]


def test_a_template_that_writes_bos_gives_it_to_every_window_once(bos_tokenizer, tmp_path):
    bos_tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path = jsonl(tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": "x" * 900}]})
    found = samples(bos_tokenizer, path, num_samples=50)
    assert len(found.ids) == 50
    assert all(window[0] == BOS and BOS not in window[1:] for window in found.ids)


def test_rows_of_both_kinds_may_mix_and_blank_lines_are_passed_over(tokenizer, tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        '{"text": "plain text"}\n\n{"messages": [{"role": "user", "content": "a question"}]}\r\n',
    )
    found = text_of(tokenizer, samples(tokenizer, path, length=64).ids)
    assert sorted(found) == ["<turn>user:a question<eos>", "plain text"]


def test_a_line_separator_inside_a_json_string_ends_no_row(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"text": "before\u2028after"}')
    assert text_of(tokenizer, samples(tokenizer, path, length=64).ids) == ["before\u2028after"]


def test_a_byte_order_mark_is_dropped(tokenizer, tmp_path):
    path = tmp_path / "words.TXT"
    path.write_bytes(b"\xef\xbb\xbfsome words")
    assert text_of(tokenizer, samples(tokenizer, path).ids) == ["some words"]


def test_without_data_the_documentation_of_cpython_is_used_and_named(tokenizer):
    found = samples(tokenizer, num_samples=40, length=64, num_held_out=8)
    assert {len(window) for window in found.ids + found.held_out} == {64}
    assert found.description.startswith("default corpus: documentation text shipped in CPython 3.")
    assert "(pydoc_data.topics); 40 samples of up to 64 tokens, 8 kept aside" in found.description


def test_a_python_without_its_documentation_is_told_to_give_data(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UsageError, match="this Python ships no pydoc_data; give --calibration-data"):
        samples(tokenizer)


def test_a_missing_file_is_refused(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"none\.txt: no such file"):
        samples(tokenizer, tmp_path / "none.txt")


def test_a_folder_with_a_files_name_is_refused(tokenizer, tmp_path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UsageError, match=r"folder\.txt: cannot be read \(Is a directory\)"):
        samples(tokenizer, tmp_path / "folder.txt")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_file_is_refused(tokenizer, tmp_path, name, content):
    with pytest.raises(UsageError, match=rf"{name}: expected text, found none"):
        samples(tokenizer, write(tmp_path / name, content))


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tokenizer, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9 au lait".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.txt: expected UTF-8, found byte 0xe9 at offset 3"):
        samples(tokenizer, path)


def test_a_bad_json_line_is_refused_with_its_number(tokenizer, tmp_path):
    for line in ('{"text": ', "[" * 100_000, '{"text": ' + "1" * 5000 + "}"):  # the last two are no JSONDecodeError
        path = write(tmp_path / "rows.jsonl", f'{{"text": "fine"}}\n{line}\n')
        with pytest.raises(UsageError, match=r"rows\.jsonl:2: expected one JSON object, found bad JSON"):
            samples(tokenizer, path)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "x", "id": 3}, "keys prompt, id"),
        ({}, r"keys \(none\)"),
        ({"text": 5}, "keys text"),
        ({"messages": "hello"}, "keys messages"),
        ("text", "str"),
    ],
)
def test_a_row_with_neither_text_nor_messages_is_refused(tokenizer, tmp_path, row, found):
    with pytest.raises(UsageError, match=rf'rows\.jsonl:1: expected an object with "text".*found {found}$'):
        samples(tokenizer, jsonl(tmp_path / "rows.jsonl", row))


@pytest.mark.parametrize(
    "row", [{"text": "broken \ud83d"}, {"messages": [{"role": "user", "content": "broken \ud83d"}]}]
)
def test_half_a_surrogate_pair_is_refused(tokenizer, tmp_path, row):
    with pytest.raises(UsageError, match=r"rows\.jsonl:1: expected text, found half a surrogate pair"):
        samples(tokenizer, jsonl(tmp_path / "rows.jsonl", row))


def test_conversations_without_a_chat_template_are_refused(tmp_path):
    path = jsonl(tmp_path / "chat.jsonl", {"text": "fine"}, {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(UsageError, match=r'chat\.jsonl:2: "messages" needs a chat template'):
        samples(byte_tokenizer(chat_template=None), path)


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user"}], ["hello"], [{"role": "user", "content": None}]],
)
def test_messages_that_do_not_fit_the_template_are_refused(tokenizer, tmp_path, messages):
    with pytest.raises(UsageError, match=r'chat\.jsonl:1: "messages" does not fit the chat template \(.+\)'):
        samples(tokenizer, jsonl(tmp_path / "chat.jsonl", {"messages": messages}))


def test_a_template_that_fails_in_any_way_gives_one_line(tmp_path):
    path = jsonl(tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(
        UsageError, match=r'chat\.jsonl:1: "messages" does not fit the chat template \(division by zero'
    ):
        samples(byte_tokenizer(chat_template="{{ 1 / (messages | length - 1) }}"), path)


def test_a_source_of_a_name_that_no_file_can_have_is_one_line(tokenizer):
    with pytest.raises(UsageError, match="no such file, and a Hugging Face data set cannot be fetched with --offline"):
        samples(tokenizer, "x" * 300, offline=True)


def test_too_little_text_for_one_sample_is_refused(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"tiny\.txt: too little text for one calibration sample of 4 tokens"):
        samples(tokenizer, write(tmp_path / "tiny.txt", "abc"))


def test_text_for_one_sample_and_none_to_keep_aside_is_refused(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"one\.txt: enough text for one sample of 16 tokens, none to keep aside"):
        samples(tokenizer, write(tmp_path / "one.txt", "x" * 20), num_held_out=2)


@pytest.mark.parametrize("name", ["table.csv", "./folder/notes", "~/notes", "a/b/c", "org/notes.md"])
def test_a_file_of_another_kind_is_refused(tokenizer, name):
    with pytest.raises(UsageError, match=r"expected a \.txt file, a \.jsonl file or a Hugging Face data set id"):
        samples(tokenizer, name)


def test_an_existing_file_without_a_known_ending_is_not_taken_for_a_data_set(tokenizer, tmp_path, monkeypatch):
    write(tmp_path / "notes", "text")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="found another kind of file"):
        samples(tokenizer, "notes")


@pytest.fixture
def fake_datasets(monkeypatch):
    """A stand-in for the `datasets` package: returns `rows` and keeps the arguments it was called with."""
    module = types.ModuleType("datasets")
    module.rows, module.calls = [], []

    def load_dataset(*args, **settings):
        module.calls.append((args, settings))
        if isinstance(module.rows, Exception):
            raise module.rows
        return iter(module.rows)

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    ("item", "args", "split"),
    [
        ("org/set-v1.5", ("org/set-v1.5", None), "train"),
        ("wikitext@wikitext-2-raw-v1:test", ("wikitext", "wikitext-2-raw-v1"), "test"),
    ],
)
def test_a_data_set_id_is_read_as_rows(tokenizer, fake_datasets, item, args, split):
    fake_datasets.rows = [{"text": "some words"}, {"text": ""}]
    found = samples(tokenizer, item)
    assert text_of(tokenizer, found.ids) == ["some words"]
    assert fake_datasets.calls == [(args, {"split": split, "streaming": True})]
    assert found.description.startswith(f"{item}; 1 samples")


def test_a_named_column_holds_text_or_messages(tokenizer, fake_datasets):
    fake_datasets.rows = [{"body": "some words", "text": "no"}, {"body": [{"role": "user", "content": "Hi"}]}]
    found = text_of(tokenizer, samples(tokenizer, "org/set:train:body", length=64).ids)
    assert sorted(found) == ["<turn>user:Hi<eos>", "some words"]


def test_only_the_first_rows_of_a_data_set_are_read(tokenizer, fake_datasets, monkeypatch):
    monkeypatch.setattr(sources, "MAX_DATASET_ROWS", 2)
    fake_datasets.rows = [{"text": f"row number {number}"} for number in range(5)]
    assert sorted(text_of(tokenizer, samples(tokenizer, "org/set").ids)) == ["row number 0", "row number 1"]


def test_a_column_that_a_data_set_lacks_is_refused(tokenizer, fake_datasets):
    fake_datasets.rows = [{"text": "x", "id": 1}]
    with pytest.raises(UsageError, match="org/set:train:body, row 0: no column body; there are text, id"):
        samples(tokenizer, "org/set:train:body")


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("Unknown split\nmore"), "Unknown split"), (OSError(), "OSError")]
)
def test_a_data_set_that_cannot_be_read_is_refused(tokenizer, fake_datasets, error, reason):
    fake_datasets.rows = error
    with pytest.raises(UsageError, match=rf"org/set: the data set cannot be read \({reason}\)"):
        samples(tokenizer, "org/set")


def test_a_data_set_without_the_package_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"org/set: no such file, .*; pip install datasets"):
        samples(tokenizer, "org/set")


def test_a_data_set_is_refused_offline_before_anything_is_loaded(tokenizer, fake_datasets):
    with pytest.raises(
        UsageError, match="org/set: no such file, and a Hugging Face data set cannot be fetched with --offline"
    ):
        samples(tokenizer, "org/set", offline=True)
    assert fake_datasets.calls == []


@pytest.mark.parametrize("item", ["a b", "set::", "set:train:a:b", ""])
def test_what_is_neither_file_nor_data_set_id_is_refused(tokenizer, item):
    with pytest.raises(UsageError, match=r"expected a \.txt file"):
        samples(tokenizer, item)
