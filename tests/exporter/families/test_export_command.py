"""`pop-export` on families beyond Llama: from a checkpoint folder to a verified bundle, or to one line."""

import json

import pytest

from pop_export.cli import main
from pop_export.projections import find_kv_projections
from tests.exporter.families.configs import COMMON_FAMILIES, NUM_LAYERS, tiny_family_model
from tests.tiny_models import save_checkpoint

FEW = ["--calibration-samples", "4", "--calibration-length", "32", "--threads", "1", "--offline"]
FEW_FITS = ["--refit-samples", "4", "--refit-length", "96", "--self-samples", "2", "--tune-steps", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*COMMON_FAMILIES, "bloom", "deepseek_v3", "gemma3_text", "gpt_oss", "phimoe"])
def test_every_stage_of_an_export_takes_a_family_without_code_of_its_own(tmp_path, capsys, model_type):
    folder = save_checkpoint(tmp_path / "model", tiny_family_model(model_type))
    out = tmp_path / "bundle"
    code = main(["--model", str(folder), "--out", str(out), "--prune-layers", "1,3", *FEW, *FEW_FITS])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "verified" in shown.out
    assert json.loads((out / "report.json").read_text())["surrogate"]["layers"]


@pytest.mark.parametrize("model_type", ["falcon", "phimoe"])  # one changes K in place, one has routers that are linear
def test_k_and_v_projections_are_found(model_type):
    found = find_kv_projections(tiny_family_model(model_type))
    assert {(projection.layer, projection.part) for projection in found} == {
        (layer, part) for layer in range(NUM_LAYERS) for part in ("key", "value")
    }


@pytest.mark.parametrize("model_type", ["mamba", "roberta", "gemma3n_text"])
def test_a_family_that_is_refused_ends_in_one_line_and_exit_code_3(tmp_path, capsys, model_type):
    folder = save_checkpoint(tmp_path / "model", tiny_family_model(model_type))
    capsys.readouterr()
    code = main(["--model", str(folder), "--out", str(tmp_path / "bundle"), *FEW])
    error = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("...")]
    assert code == 3
    assert len(error) == 1
    assert "not supported" in error[0]
    assert not (tmp_path / "bundle").exists()
