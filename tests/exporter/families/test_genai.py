"""Stock onnxruntime-genai runs the pair of any family from genai_config.json and gets the runtime's tokens."""

from __future__ import annotations

import json

import pytest

from pop_export.genai_config import genai_config
from pop_runtime.model import Model
from tests.exporter.families import proof
from tests.exporter.families.configs import COMMON_FAMILIES
from tests.exporter.families.test_families import CORE
from tests.exporter.genai_pair import NUM_NEW, genai_tokens


def check(exported: proof.Exported, folder) -> None:
    """Compare 200 greedy tokens, pruned and full, at sink 0 and boundary 1."""
    (folder / "genai_config.json").write_text(json.dumps(genai_config(exported.manifest)))
    model, ids = Model(folder, exported.manifest, exported.sessions), proof.prompt_ids(proof.NUM_PROMPT)
    found = {}
    for prefill in ("pop", "full"):
        generation = model.generate(ids, max_new_tokens=NUM_NEW, prefill=prefill)
        found[prefill] = [token.id for token in generation]
        assert len(found[prefill]) == NUM_NEW
        assert genai_tokens(folder, ids, NUM_NEW, prefill) == found[prefill]
    assert found["pop"] != found["full"]  # or the stages could not be told apart


@pytest.mark.parametrize("model_type", CORE)
def test_genai_gets_the_tokens_of_a_core_family(export_of, model_type):
    exported = export_of(model_type)
    check(exported, exported.folder)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", COMMON_FAMILIES)
def test_genai_gets_the_tokens_of_a_common_family(export_of, model_type):
    exported = export_of(model_type)
    check(exported, exported.folder)
