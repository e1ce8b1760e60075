"""`pop-export` on families beyond Llama: from a checkpoint folder to a verified bundle, or to one line."""

import pytest

from pop_export.cli import main
from tests.exporter.families.configs import tiny_family_model
from tests.tiny_models import save_checkpoint

FEW = ["--calibration-samples", "4", "--calibration-length", "32", "--threads", "1", "--offline"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bloom", "mixtral", "deepseek_v3", "opt"])
def test_a_family_without_code_of_its_own_is_exported_and_verified(tmp_path, capsys, model_type):
    folder = save_checkpoint(tmp_path / "model", tiny_family_model(model_type))
    code = main(["--model", str(folder), "--out", str(tmp_path / "bundle"), "--prune-layers", "1-2", *FEW])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "verified" in shown.out


@pytest.mark.parametrize("model_type", ["mamba", "roberta"])
def test_a_family_that_is_refused_ends_in_one_line_and_exit_code_3(tmp_path, capsys, model_type):
    folder = save_checkpoint(tmp_path / "model", tiny_family_model(model_type))
    capsys.readouterr()
    code = main(["--model", str(folder), "--out", str(tmp_path / "bundle"), *FEW])
    error = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("...")]
    assert code == 3
    assert len(error) == 1
    assert "not supported" in error[0]
    assert not (tmp_path / "bundle").exists()
