"""Turns fed to both graphs at once, on segments of a traced tiny model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pop_export.bundle import save_graphs
from pop_export.graph.cut import cut_prefill_graph
from pop_export.segmented import add_segments
from pop_runtime import chain
from pop_runtime.cancel import Cancellation, Cancelled
from pop_runtime.chain import BoundLink, ChainedBinding, ChainedSession
from pop_runtime.device_buffer import to_device
from pop_runtime.joined import joined_graphs
from pop_runtime.kv_cache import BoundGraph, allocate_cache
from pop_runtime.manifest import Manifest, Windows
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import SessionPair, open_graphs, open_segments
from tests.exporter.test_segments import IDS, llama, segments_manifest, segments_plan

__all__ = ["llama"]  # a fixture
WINDOWS = Windows(2, 3)


@pytest.fixture(scope="module", params=[({1, 2}, set()), ({0, 2}, {0}), ({2, 3}, {2}), (set(), set())], ids=str)
def exported(request, llama, tmp_path_factory) -> tuple[Path, Manifest]:
    (model, decode), (skipped, surrogates) = llama, request.param
    folder, decode = tmp_path_factory.mktemp("bundle"), decode.clone()
    plan, manifest = segments_plan(model, skipped, surrogates), segments_manifest(model, skipped)
    prefill = cut_prefill_graph(decode, plan)
    save_graphs(folder, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights)
    return folder, add_segments(
        folder, manifest, (decode, prefill), plan, IDS, open_graphs(folder, manifest, 1)
    ).manifest


def _sequence(pair: SessionPair, manifest: Manifest) -> Sequence:
    return Sequence(pair, allocate_cache(manifest, 1, 64))


@pytest.fixture
def runs(monkeypatch) -> list[object]:
    """Collect the session of each run of a link."""
    found: list[object] = []
    own = BoundLink.run

    def run(self, run_options=None):
        found.append(self.link.session)
        own(self, run_options)

    monkeypatch.setattr(BoundLink, "run", run)
    return found


@pytest.mark.parametrize("chunk", [5, 512])
def test_a_turn_gives_what_its_stretches_give_one_after_another(exported, chunk):
    folder, manifest = exported
    pair = open_segments(folder, manifest, 1)
    joined, apart = (_sequence(pair, manifest) for _ in range(2))
    apart._joined = None
    for start, stop in ((0, 21), (21, 22), (22, 31)):  # later turns have no sink
        found, wanted = (row.append(IDS[start:stop], "pop", WINDOWS, chunk) for row in (joined, apart))
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        np.testing.assert_allclose(joined.step(), apart.step(), atol=1e-4)
    np.testing.assert_array_equal(joined.depth, apart.depth)
    for name, buffer in joined.cache.buffers.items():
        np.testing.assert_allclose(buffer, apart.cache.buffers[name], atol=1e-4)


def test_kept_layers_read_each_chunk_once(exported, runs):
    folder, manifest = exported
    pair = open_segments(folder, manifest, 1)
    assert isinstance(pair.prefill, ChainedSession) and isinstance(pair.decode, ChainedSession)
    _sequence(pair, manifest).append(IDS[:20], "pop", WINDOWS)
    kept = [full.session for full, pruned in zip(pair.decode.links, pair.prefill.links, strict=True)
            if full.session is pruned.session]  # fmt: skip
    others = [link.session for link in (*pair.decode.links, *pair.prefill.links) if link.session not in kept]
    assert [runs.count(session) for session in kept] == [1] * len(kept)
    assert sum(map(runs.count, others)) == 3 * len(others) // 2  # sink and boundary in full, pruned between


def test_turns_on_whole_graphs_are_fed_stretch_by_stretch_and_say_the_same(exported):
    folder, manifest = exported
    whole, chained = (_sequence(open_with(folder, manifest, 1), manifest) for open_with in (open_graphs, open_segments))
    assert whole._joined is None and chained._joined is not None
    wanted = whole.append(IDS[:20], "pop", WINDOWS)
    np.testing.assert_allclose(chained.append(IDS[:20], "pop", WINDOWS), wanted, atol=1e-4)


def test_hidden_states_outside_of_numpy_give_the_same_logits(exported, monkeypatch):
    """The path of a device's memory, with ONNX Runtime's own allocation on the CPU in the place of a device."""
    folder, manifest = exported
    pair = open_segments(folder, manifest, 1)
    in_numpy, outside = (_sequence(pair, manifest) for _ in range(2))
    in_numpy._joined = outside._joined = None  # which devices have not
    wanted = in_numpy.append(IDS[:20], "pop", WINDOWS)
    made = []
    monkeypatch.setattr(chain, "zeros", lambda *what: made.append(to_device(np.zeros(*what[:2]), what[2])) or made[-1])
    np.testing.assert_array_equal(outside.append(IDS[:20], "pop", WINDOWS), wanted)
    np.testing.assert_array_equal(outside.step(), in_numpy.step())
    assert made


def test_a_turn_cancelled_between_two_segments_is_undone(exported, monkeypatch):
    folder, manifest = exported
    sequence, fresh = (_sequence(open_segments(folder, manifest, 1), manifest) for _ in range(2))
    sequence.append(IDS[:8], "pop", WINDOWS)
    fresh.append(IDS[:8], "pop", WINDOWS)
    own = BoundLink.run
    for after in range(3):
        cancellation, count = Cancellation(), iter(range(99))

        def run(self, run_options=None, after=after, cancellation=cancellation, count=count):
            if next(count) == after:
                cancellation.cancel()
            own(self, run_options)

        monkeypatch.setattr(BoundLink, "run", run)
        with pytest.raises(Cancelled):
            sequence.append(IDS[8:20], "pop", WINDOWS, cancellation=cancellation)
        assert (len(sequence), sequence.num_cached) == (8, 8)
    monkeypatch.setattr(BoundLink, "run", own)
    np.testing.assert_array_equal(sequence.append(IDS[8:20], "pop", WINDOWS), fresh.append(IDS[8:20], "pop", WINDOWS))


def test_chains_cut_at_different_places_are_fed_stretch_by_stretch(exported):
    folder, manifest = exported
    pair, cache = open_segments(folder, manifest, 1), allocate_cache(manifest, 1, 8)
    assert isinstance(pair.prefill, ChainedSession)
    decode = BoundGraph(pair.decode, cache, "decode", has_logits=True)
    shorter, first_makes_nothing = list(pair.prefill.links[:-1]), list(pair.prefill.links)
    first_makes_nothing[0] = dataclasses.replace(first_makes_nothing[0], hidden_out=None)
    for links in (shorter, first_makes_nothing):
        prefill = BoundGraph(ChainedSession(tuple(links), manifest.input_ids), cache, "prefill", has_logits=False)
        assert joined_graphs(prefill, decode) is None
    prefill = BoundGraph(pair.prefill, cache, "prefill", has_logits=False)
    assert joined_graphs(prefill, decode) is not None
    assert isinstance(prefill.binding, ChainedBinding)
    first = prefill.binding.links[0]
    made = first.hidden_made()
    assert made is not None
    first.outputs[made.name] = SimpleNamespace(
        name=made.name, type=made.type, shape=[*made.shape[:2], made.shape[2] + 1]
    )
    assert joined_graphs(prefill, decode) is None
