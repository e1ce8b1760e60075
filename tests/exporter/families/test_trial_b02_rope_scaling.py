"""Trial B02: rope scaling that the config names is applied, and a type that nobody knows is refused."""

import json

import pytest

from pop_export.checkpoint import load_checkpoint
from pop_runtime.errors import ModelError
from tests.exporter.families import proof
from tests.exporter.families.configs import tiny_family_model
from tests.tiny_models import save_checkpoint

BASE = {"rope_theta": 10000.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn with attention_factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
}


def scaled(name: str, seed: int = 0):
    return tiny_family_model("llama", seed, max_position_embeddings=512, rope_parameters={**BASE, **SCALINGS[name]})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama3" else pytest.mark.slow) for name in SCALINGS]
)
def test_scaled_rope_is_in_the_graph(export_of, name):
    exported = export_of("llama", max_position_embeddings=512, rope_parameters={**BASE, **SCALINGS[name]})
    ids = proof.prompt_ids(220)
    truth = proof.true_logits(exported.model, ids, 200)
    for cuts in ((0, 200), (0, 13, 14, 200), (0, 199, 200)):
        feeds = [*proof.stretches(cuts, "decode"), *proof.stretches(tuple(range(200, 221)), "decode")]
        assert proof.relative(proof.bundle_logits(exported, ids, feeds, 21), truth) <= proof.TOLERANCE
    plain = tiny_family_model("llama", max_position_embeddings=512)
    assert proof.relative(proof.true_logits(plain, ids, 200), truth) > 10 * proof.TOLERANCE


def test_an_explicit_yarn_attention_factor_counts():
    ids = proof.prompt_ids(220)
    computed, explicit = (proof.true_logits(scaled(name), ids, 200) for name in ("yarn", "yarn with attention_factor"))
    assert proof.relative(computed, explicit) > 10 * proof.TOLERANCE


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", SCALINGS)
def test_both_spellings_of_the_scaling_type_load_alike(tmp_path, name, key):
    model, ids = scaled(name), proof.prompt_ids()
    folder = save_checkpoint(tmp_path / "model", model)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    scaling = dict(SCALINGS[name])
    config |= {"rope_theta": 10000.0, "rope_scaling": {key: scaling.pop("rope_type"), **scaling}}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_checkpoint(str(folder)).model
    assert proof.relative(proof.true_logits(loaded, ids), proof.true_logits(model, ids)) <= 1e-6


def test_an_invented_scaling_type_is_refused_by_name(tmp_path):
    folder = save_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "wobbly", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="wobbly"):
        load_checkpoint(str(folder))
