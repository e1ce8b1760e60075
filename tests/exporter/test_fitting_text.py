from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pop_export.calibration import fitting_text as fitting
from pop_export.calibration import sources
from pop_export.calibration.corpus import Samples
from pop_export.calibration.self_text import self_text
from pop_export.checkpoint import Checkpoint
from pop_export.config import ExportConfig
from pop_export.damage import Protocol
from pop_export.quality import measuring_text
from pop_runtime.errors import UsageError
from pop_runtime.manifest import Windows
from tests.tiny_models import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint(tiny_model(), byte_tokenizer(), {"name": "tiny"}, (257,), 256, 258)


def config(**settings):
    return ExportConfig(model="m", out="out", refit_length=64, refit_samples=10, self_samples=12, **settings)


def fitting_text(config, checkpoint):
    return fitting.fitting_text(config, checkpoint, fitting.fitting_corpus(config, checkpoint))


def written(model, seed=0, num=5, bos=256):
    return self_text(model, num, bos_token_id=bos, eos_token_ids=(257, 3), seed=seed, length=20)


def test_own_text_begins_with_bos_holds_no_end_token_and_is_the_same_again():
    model = tiny_model()
    first, again, other = written(model), written(model), written(model, seed=1)
    assert [sample.shape for sample in first] == [(20,)] * 5 and first[0].dtype == np.int64
    assert all(sample[0] == 256 and not {257, 3} & set(sample.tolist()) for sample in first)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_without_a_bos_token_own_text_begins_anywhere():
    assert len({int(sample[0]) for sample in written(tiny_model(), num=8, bos=None)}) > 4


def test_own_text_is_drawn_from_the_models_distribution():
    """Sampled tokens are far likelier to the model than tokens drawn evenly."""
    model = tiny_model()
    own = torch.from_numpy(np.stack(written(model, num=16)))
    even = torch.from_numpy(np.random.default_rng(0).integers(0, 250, own.shape))
    with torch.no_grad():
        assert model(own, labels=own).loss + 0.5 < model(even, labels=even).loss


def test_the_default_text_is_topics_docstrings_and_own_text_and_nothing_kept_aside_is_fitted_on(checkpoint):
    text = fitting_text(config(), checkpoint)
    assert "pydoc_data.topics" in text.description and "docstrings of the standard library" in text.description
    assert text.description.endswith("12 samples of 128 tokens written by the model, 2 kept aside")
    assert len(text.fitting) == 10 + 10 and len(text.judging) == 8 + 2
    fitted_on = {tuple(window) for window in text.fitting}
    assert not fitted_on & {tuple(window) for window in text.judging}


def test_progress_of_more_samples_than_rows_ends_at_its_total(checkpoint, monkeypatch):
    monkeypatch.setattr("pop_export.calibration.self_text.ROWS_AT_A_TIME", 4)
    shown = []

    @contextmanager
    def progress(label, total):
        shown.append(total)
        yield lambda count: shown.append(-count)

    monkeypatch.setattr("pop_export.calibration.fitting_text.progress", progress)
    fitting_text(config(), checkpoint)
    assert shown[0] == 3 * 127 and sum(shown) == 0


def test_own_text_can_be_left_out_and_is_not_written_for_nothing(checkpoint):
    assert len(fitting_text(ExportConfig(model="m", out="out", refit_length=64, refit=False), checkpoint).fitting) == 24
    none = ExportConfig(model="m", out="out", refit_length=64, refit_samples=10, self_samples=0)
    assert len(fitting_text(none, checkpoint).judging) == 8
    with pytest.raises(UsageError, match="--self-samples: expected at least 0"):
        ExportConfig(model="m", out="out", self_samples=-1)


def test_a_corpus_of_the_users_takes_the_place_of_the_default_one(checkpoint, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("All work and no play makes Jack a dull boy. " * 100)
    text = fitting_text(config(calibration_data=(str(file),)), checkpoint)
    assert "pydoc" not in text.description and "docstrings" not in text.description


def test_damage_is_measured_on_windows_kept_aside_by_source(checkpoint):
    corpus = fitting.fitting_corpus(config(), checkpoint)
    found = measuring_text(corpus, Windows(2, 3))
    assert found.protocol == Protocol(48, 16, Windows(2, 3))
    assert sorted(map(len, found.by_source.values())) == [4, 4]
    assert all("default corpus" in source for source in found.by_source)


def _aside(*lengths):
    windows = tuple(np.arange(length) for length in lengths)
    return Samples(windows[:1], windows, "notes", "", tuple("ab"[index % 2] for index in range(len(lengths))))


def test_unequal_windows_are_cut_to_a_common_length_that_measures_at_least_half_as_much():
    found = measuring_text(_aside(100, 31, 60, 88), Windows(2, 3))
    assert found.protocol == Protocol(45, 15, Windows(2, 3))
    assert {source: [len(window) for window in windows] for source, windows in found.by_source.items()} == {
        "a": [60, 60],
        "b": [60],
    }
    barely = measuring_text(_aside(180, 150, 120, 95, 92), Windows(4, 64))  # 95 tokens: a prompt of 72, 4 of it pruned
    assert [len(window) for window in barely.windows] == [150, 150] and barely.protocol.num_pruned == 45


def test_windows_that_cover_the_prompts_show_no_damage():
    assert not measuring_text(_aside(100, 60), Windows(4, 71)).shows_damage
    assert measuring_text(_aside(100, 60), Windows(4, 70)).protocol.num_pruned == 1


def test_a_python_without_library_source_says_so(monkeypatch):
    monkeypatch.setattr(sources, "DOCSTRING_MODULES", ("no_such_module",))
    with pytest.raises(UsageError, match="ships no source of its library; give --calibration-data"):
        sources.docstring_source(byte_tokenizer())


def test_docstrings_are_of_modules_that_the_benchmarks_do_not_measure_on():
    measured = {"argparse", "ast", "asyncio", "calendar", "csv", "difflib", "email", "fractions", "heapq", "http"}
    assert not measured & set(sources.DOCSTRING_MODULES)
