"""Segments of a traced tiny model: where they are cut, and that chains of them compute what the graphs do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from pop_export.bundle import save_graphs
from pop_export.graph.build import build_decode_graph, kv_layout
from pop_export.graph.cut import cut_prefill_graph
from pop_export.graph.segments import cut_segments
from pop_export.reference import PrefillPlan, Surrogate
from pop_export.segmented import add_segments, segments_summary
from pop_export.verify import NUM_STEPS
from pop_runtime.kv_cache import allocate_cache
from pop_runtime.manifest import Manifest, Plan, Windows
from pop_runtime.sequence import Sequence
from pop_runtime.sessions import open_graphs, open_segments
from tests.exporter.families.configs import tiny_family_model

IDS = torch.randint(3, 250, (32 + NUM_STEPS,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def llama():
    model = tiny_family_model("llama")
    return model, build_decode_graph(model, kv_layout(model))


def segments_plan(model, skipped: set[int], surrogates: set[int] = frozenset()) -> PrefillPlan:
    size = model.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    made = {
        layer: Surrogate(
            f"model.layers.{layer}.self_attn.k_proj", torch.randn(size, size, generator=generator) / size
        )
        for layer in surrogates
    }  # fmt: skip
    return PrefillPlan(frozenset(skipped), {}, made)


def segments_manifest(model, skipped: set[int]) -> Manifest:
    layers = kv_layout(model)
    return Manifest(
        model={}, vocab_size=model.config.vocab_size, max_positions=model.config.max_position_embeddings,
        plan=Plan(len(layers), tuple(sorted(skipped)), "user"), windows=Windows(), kv_dtype="float32",
        kv_layers=layers, precision="fp32", eos_token_ids=(), bos_token_id=None, pad_token_id=None, tokenizer=None,
        chat_template=None, generation_config=None,
    )  # fmt: skip


def _borders(decode: ir.Model, plan: PrefillPlan) -> list[tuple[str, str | None, str | None]]:
    segments = cut_segments(decode, cut_prefill_graph(decode, plan), plan)
    return [(segment.file_name.removesuffix(".onnx"), segment.hidden_in, segment.hidden_out) for segment in segments]


def test_segments_end_where_kept_and_skipped_layers_meet(llama):
    model, decode = llama  # 4 layers
    assert _borders(decode, segments_plan(model, {1})) == [
        ("segment-0-kept", None, "layers.0.output"),
        ("segment-1-skipped", "layers.0.output", None),  # hidden states pass a skipped layer unchanged
        ("segment-1-full", "layers.0.output", "layers.1.output"),
        ("segment-2-kept", "layers.1.output", "layers.2.output"),
        ("segment-3-skipped", "layers.2.output", None),  # the last layer: nothing reads what it would leave
        ("segment-3-full", "layers.2.output", None),
    ]


def test_a_surrogate_leaves_a_segment_as_hidden_states_of_its_own(llama):
    model, decode = llama
    assert _borders(decode, segments_plan(model, {0, 1}, {1}))[0] == ("segment-0-skipped", None, "layers.1.passed_on")
    # the first of two has the surrogate, the second passes it on
    assert _borders(decode, segments_plan(model, {0, 1}, {0}))[0] == ("segment-0-skipped", None, "layers.0.passed_on")
    # without one, what leaves the first layers is the embedding
    assert _borders(decode, segments_plan(model, {0, 1}))[0] == ("segment-0-skipped", None, "layers.0.input")


@pytest.mark.parametrize(
    ("skipped", "surrogates"), [({1, 2}, set()), ({0, 2}, {0}), ({0, 1}, set()), ({2, 3}, {2}), (set(), set())]
)
def test_a_chain_computes_what_its_graph_does_and_holds_kept_layers_once(llama, tmp_path, skipped, surrogates):
    model, decode = llama
    plan, manifest, decode = (
        segments_plan(model, skipped, surrogates),
        segments_manifest(model, skipped),
        decode.clone(),
    )
    prefill = cut_prefill_graph(decode, plan)
    save_graphs(tmp_path, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights)
    weights = (tmp_path / manifest.weights).read_bytes()
    segmented = add_segments(tmp_path, manifest, (decode, prefill), plan, IDS, open_graphs(tmp_path, manifest, 1))
    assert segmented.why_not is None
    assert [check.passed for check in segmented.checks] == [True]
    assert segmented.checks[0].largest_difference < 1e-4
    assert (tmp_path / manifest.weights).read_bytes() == weights
    for part in segmented.manifest.segments:
        assert {str(layer) for layer in part.layers} == _layers(tmp_path / part.graph)
        assert part.hidden_size == model.config.hidden_size
    shared = [part for part in segmented.manifest.segments if part.stages == ("prefill", "decode")]
    assert sum(len(_layers(tmp_path / part.graph)) for part in shared) == len(set(range(3)) - skipped)
    assert _logits(open_segments(tmp_path, segmented.manifest, 1), manifest) == pytest.approx(
        _logits(open_graphs(tmp_path, manifest, 1), manifest), abs=1e-4
    )


def _layers(path: Path) -> set[str]:
    names = (value.name or "" for value in ir.load(path).graph.outputs)
    return {name.split(".")[1] for name in names if name.startswith("present.")}


def _logits(pair, manifest: Manifest) -> np.ndarray:
    """Feed stretches of several lengths, as turns do: hidden states change their size and change it back."""
    sequence = Sequence(pair, allocate_cache(manifest, 1, len(IDS)))
    rows = [
        sequence.feed(IDS[start:stop], stage)
        for start, stop, stage in ((0, 4, "decode"), (4, 20, "prefill"), (20, 36, "prefill"), (36, 37, "decode"),
                                   (37, 38, "decode"), (38, 40, "decode"))
    ]  # fmt: skip
    return np.concatenate([row for row in rows if row is not None])


def test_layers_that_read_more_than_hidden_states_leave_a_bundle_without_segments(llama, tmp_path):
    model, decode = llama
    plan, manifest, decode = segments_plan(model, {1}), segments_manifest(model, {1}), decode.clone()
    marked = {value.name: value for node in decode.graph for value in node.outputs}
    late = next(node for node in decode.graph if node.inputs and node.inputs[0] is marked["layers.2.output"])
    total = ir.node("Add", [marked["layers.2.output"], marked["layers.0.output"]])  # a skip across the borders
    total.outputs[0].type, total.outputs[0].shape = late.inputs[0].type, late.inputs[0].shape
    decode.graph.insert_before(late, total)
    late.replace_input_with(0, total.outputs[0])
    prefill = cut_prefill_graph(decode, plan)
    save_graphs(tmp_path, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights)
    segmented = add_segments(tmp_path, manifest, (decode, prefill), plan, IDS, open_graphs(tmp_path, manifest, 1))
    assert (segmented.manifest, segmented.checks) == (manifest, ())
    assert "expected" in segments_summary(segmented)["why_not"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.onnx", "prefill.onnx", "weights.bin"]


def test_a_wrong_hand_over_fails_the_comparison(llama, tmp_path):
    model, decode = llama
    plan, manifest, decode = segments_plan(model, {1}), segments_manifest(model, {1}), decode.clone()
    prefill = cut_prefill_graph(decode, plan)
    save_graphs(tmp_path, {manifest.decode_graph: decode, manifest.prefill_graph: prefill}, manifest.weights)
    segments = list(
        add_segments(
            tmp_path, manifest, (decode, prefill), plan, IDS, open_graphs(tmp_path, manifest, 1)
        ).manifest.segments
    )
    full = next(part for part in segments if part.graph == "segment-1-full.onnx")
    segments[segments.index(full)] = dataclasses.replace(full, stages=("prefill",))
    skipped = next(part for part in segments if part.graph == "segment-1-skipped.onnx")
    segments[segments.index(skipped)] = dataclasses.replace(skipped, stages=("decode",))
    swapped = dataclasses.replace(manifest, segments=tuple(segments))
    found, wanted = (
        _logits(pair, manifest) for pair in (open_segments(tmp_path, swapped, 1), open_graphs(tmp_path, manifest, 1))
    )
    assert np.abs(found - wanted).max() > 0.1
