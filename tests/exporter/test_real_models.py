"""SmolLM2-135M from download to text: the figures of the main job that are not times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import pop_runtime
from pop_export.bundle import Bundle, save_graphs
from pop_export.checkpoint import Checkpoint, load_checkpoint
from pop_export.graph.build import build_decode_graph
from pop_export.graph.cut import cut_prefill_graph
from pop_export.layer_plan import parse_layers
from pop_export.reference import PrefillPlan
from pop_export.verify import NUM_STEPS, prompt_length, verify
from pop_runtime.manifest import Windows
from pop_runtime.sessions import open_pair
from pop_runtime.threads import visible_cores
from tests.exporter.genai_pair import NUM_NEW, genai_tokens
from tests.exporter.real_export import export_briefly

pytestmark = pytest.mark.real
QUESTION = "Explain in two sentences why the sky is blue."


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return load_checkpoint("smollm2-135m")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    return export_briefly("smollm2-135m", folder, calibration_samples=16, fitting_samples=8)


def test_every_comparison_with_pytorch_is_within_1e_3(bundle):
    differences = {check["name"]: check["largest_difference"] for check in bundle.report["verification"]["checks"]}
    assert len(differences) == 5
    assert max(differences.values()) <= 1e-3, differences


def test_ten_of_thirty_layers_are_skipped_by_default(bundle):
    assert len(bundle.manifest.plan.skipped_layers) == 10
    assert bundle.manifest.plan.num_layers == 30


def test_the_last_layer_does_not_matter_to_the_prompt_and_the_deep_third_matters_least(bundle):
    importance = bundle.report["calibration"]["prefill_importance"]
    assert importance[-1] == pytest.approx(0, abs=1e-9)
    deep, rest = importance[20:], importance[:20]
    assert sum(deep) / len(deep) < 0.5 * sum(rest) / len(rest)


def test_the_weights_file_holds_the_embedding_once(bundle):
    assert bundle.report["size"]["weights_per_fp32_parameters"] <= 1.05


def test_a_scattered_plan_equals_its_twin(bundle, smollm2, tmp_path):
    skipped = parse_layers("5,12-14,18,20-29", 30)
    plan = PrefillPlan(frozenset(skipped))
    manifest = dataclasses.replace(bundle.manifest, segments=())  # they are those of the bundle's plan
    decode = build_decode_graph(smollm2.model, manifest.kv_layers)  # a written one is fused and cannot be cut
    graphs = {manifest.decode_graph: decode, manifest.prefill_graph: cut_prefill_graph(decode, plan)}
    save_graphs(tmp_path, graphs, manifest.weights)
    ids = smollm2.tokenizer(QUESTION * 20)["input_ids"][: prompt_length(smollm2.model) + NUM_STEPS]
    found = verify(open_pair(tmp_path, manifest, None), manifest, smollm2.model, plan, ids)
    assert max(check.largest_difference for check in found.checks) <= 1e-3


def test_the_full_prefill_answers_like_transformers(bundle, smollm2):
    model = pop_runtime.load(bundle.folder)
    messages = [{"role": "user", "content": QUESTION}]
    ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    expected = smollm2.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    answer = model.generate(QUESTION, max_new_tokens=24, prefill="full")
    found = [token.id for token in answer]
    assert list(answer.request.prompt_token_ids) == ids
    assert found == [token for token in expected if token not in bundle.manifest.eos_token_ids]


def test_the_pair_answers_the_question_in_words(bundle):
    text = "".join(token.text for token in pop_runtime.load(bundle.folder).generate(QUESTION, max_new_tokens=48))
    assert "sky" in text.lower() or "light" in text.lower()


@pytest.mark.parametrize("prefill", ["pop", "full"])
def test_genai_gets_the_runtimes_tokens(bundle, prefill):
    """At sink 0 and boundary 1, which is all genai can do; the graphs do not depend on the windows."""
    manifest = dataclasses.replace(bundle.manifest, windows=Windows(0, 1))
    model = pop_runtime.Model(bundle.folder, manifest, open_pair(bundle.folder, manifest, visible_cores()))
    ids = model.encode_prompt("Write a long story about a lighthouse keeper who finds a letter.")
    generation = model.generate(
        ids, max_new_tokens=NUM_NEW, prefill=prefill, temperature=0, repetition_penalty=1, ignore_eos=False
    )
    wanted = [token.id for token in generation]
    found = genai_tokens(bundle.folder, ids, NUM_NEW, prefill)
    if generation.stop_reason == "end":
        assert found.pop() in manifest.eos_token_ids
    assert found == wanted and len(wanted) > 50


def test_a_batch_of_mixed_lengths_gives_what_each_prompt_gives_alone(bundle):
    model = pop_runtime.load(bundle.folder)
    prompts = [" ".join([f"The keeper of tower {row} walks to the sea."] * (1 + 2 * row)) for row in range(8)]
    options = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    alone = [[token.id for token in model.generate(prompt, **options)] for prompt in prompts]
    assert [answer.token_ids for answer in model.generate_batch(prompts, **options)] == alone


def test_a_conversation_gives_what_its_whole_text_gives_read_at_once(bundle):
    model = pop_runtime.load(bundle.folder)
    conversation = model.conversation()
    for question in ("Name a river in Africa.", "How long is it?", "And one in Asia?", "Which is longer?"):
        conversation.append(question)
        generation = conversation.generate(max_new_tokens=16, prefill="full", temperature=0)
        answer = [token.id for token in generation]
        whole = conversation.token_ids[: len(conversation) - len(answer)]
        again = model.generate(whole, max_new_tokens=16, prefill="full", temperature=0)
        assert [token.id for token in again] == answer
        assert generation.stats.num_rewound_tokens == 0
    text = model.render_prompt(conversation.messages[:-1])
    assert model.tokenizer.decode(whole, skip_special_tokens=False) == text
