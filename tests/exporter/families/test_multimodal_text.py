"""The text part of a multimodal checkpoint, exported, gives the logits of the whole model fed with text alone."""

import pytest
import torch

from pop_export.checkpoint import load_checkpoint
from tests.exporter.families import proof
from tests.exporter.test_multimodal import FAMILIES, saved

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_exported_text_part_gives_the_logits_of_the_whole_model(tmp_path, family):
    whole = saved(tmp_path / "model", FAMILIES[family])
    (tmp_path / "bundle").mkdir()
    exported = proof.export_pair(load_checkpoint(str(tmp_path / "model")).model, tmp_path / "bundle")
    ids = proof.prompt_ids()
    with torch.no_grad():
        truth = whole(input_ids=torch.tensor([ids])).logits[0, proof.NUM_PROMPT - 1 :].numpy()
    feeds = [*proof.stretches((0, 13, 14, 40), "decode"), *proof.STEPS]
    assert proof.relative(proof.bundle_logits(exported, ids, feeds, 21), truth) <= proof.TOLERANCE
    assert proof.prove_pruned(exported, ids) <= proof.TOLERANCE
