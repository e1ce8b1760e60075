"""Stock onnxruntime-genai runs the pair of any family from genai_config.json and gets the runtime's tokens."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from pop_export.genai_config import genai_config
from pop_runtime.model import Model
from pop_runtime.sequence import Prefill
from tests.exporter.families import proof
from tests.exporter.families.page import proven_families
from tests.exporter.families.sweep import TEXT_PARTS
from tests.exporter.families.test_families import CORE
from tests.exporter.genai_pair import NUM_NEW, genai_tokens

GENAI_PAGE = Path(__file__).parents[3] / "docs" / "genai.md"
BEYOND_GENAI = re.findall(r"^\| (\w+) \| .*differ", GENAI_PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def write_config(exported: proof.Exported, tokens: list[int]) -> None:
    """Write genai_config.json, with an end token that is not among `tokens`: without one genai takes id 0."""
    unused = max(set(range(exported.manifest.vocab_size)) - set(tokens))
    config = genai_config(dataclasses.replace(exported.manifest, eos_token_ids=(unused,)))
    assert config is not None
    (exported.folder / "genai_config.json").write_text(json.dumps(config))


def check(exported: proof.Exported) -> None:
    """Compare 200 greedy tokens, pruned and full, at sink 0 and boundary 1."""
    model = Model(exported.folder, exported.manifest, exported.sessions)

    def ours(ids: list[int], prefill: Prefill) -> list[int]:
        return [token.id for token in model.generate(ids, max_new_tokens=NUM_NEW, prefill=prefill)]

    prompts = (proof.prompt_ids(proof.NUM_PROMPT, seed) for seed in range(20))
    ids = next(ids for ids in prompts if ours(ids, "pop") != ours(ids, "full"))  # or the stages could not be told apart
    pruned, full = ours(ids, "pop"), ours(ids, "full")
    assert len(pruned) == len(full) == NUM_NEW
    write_config(exported, pruned + full)
    assert genai_tokens(exported.folder, ids, NUM_NEW, "pop") == pruned
    assert genai_tokens(exported.folder, ids, NUM_NEW, "full") == full


@pytest.mark.parametrize("model_type", sorted(CORE.keys() - {"deepseek_v3"}))
def test_genai_gets_the_tokens_of_a_core_family(export_of, model_type):
    check(export_of(model_type))


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", proven_families())
def test_genai_gets_the_tokens_of_every_family_but_those_that_the_page_names(export_of, model_type):
    exported = export_of(TEXT_PARTS.get(model_type, model_type))
    if model_type in BEYOND_GENAI:
        assert genai_config(exported.manifest) is None
    else:
        check(exported)


def test_a_later_turn_is_that_of_a_conversation(export_of):
    genai = pytest.importorskip("onnxruntime_genai")
    exported = export_of("llama")
    turns, num_new, wanted = [proof.prompt_ids(20, seed) for seed in (1, 2)], 10, []
    conversation = Model(exported.folder, exported.manifest, exported.sessions).conversation()
    for turn in turns:
        conversation.append(turn)
        wanted += [token.id for token in conversation.generate(max_new_tokens=num_new)]
    write_config(exported, wanted)
    parameters = genai.GeneratorParams(model := genai.Model(str(exported.folder)))
    parameters.set_search_options(max_length=100)
    generator, found = genai.Generator(model, parameters), []
    for turn in turns:
        if found:
            generator.get_logits()  # feeds the answer's last token by itself
        for piece in (turn[:-1], turn[-1:]):
            generator.append_tokens(np.array([piece], np.int32))
        for _ in range(num_new):
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
    assert found == wanted
