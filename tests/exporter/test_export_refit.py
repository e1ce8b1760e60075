"""One export end to end with refit, surrogates and windows, and one as published; both of a tiny model."""

import json

import pytest

from pop_export.cli import main
from pop_runtime.manifest import read_manifest
from tests.tiny_models import save_checkpoint

COMMON = ["--prune-layers", "1,3-4", "--calibration-samples", "4", "--calibration-length", "64", "--threads", "1"]
COMMON += ["--refit-samples", "12", "--refit-length", "64", "--self-samples", "6", "--boundary-tokens", "4"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    checkpoint = save_checkpoint(folder / "model")
    assert main(["--model", str(checkpoint), "--out", str(folder / "refit"), "--sink-tokens", "2", *COMMON]) == 0
    return folder


def test_manifest_and_report_name_what_was_fitted(exported):
    manifest = read_manifest(exported / "refit")
    report = json.loads((exported / "refit" / "report.json").read_text())
    assert manifest.plan.refitted_layers == (3, 4) and manifest.plan.surrogate_layers == (1,)
    kept = {(r["layer"], r["projection"]) for r in report["refit"]["layers"] if r["kept"]}
    assert {layer for layer, _ in kept} == {3, 4}
    assert [r["layer"] for r in report["surrogate"]["layers"]] == [1]
    assert (manifest.windows.sink_tokens, manifest.windows.boundary_tokens) == (2, 4)


def test_the_report_holds_damage_and_the_curve(exported):
    quality = json.loads((exported / "refit" / "report.json").read_text())["quality"]
    assert quality["protocol"] == {
        "context_tokens": 48, "continuation_tokens": 16, "windows": {"sink_tokens": 2, "boundary_tokens": 4},
    }  # fmt: skip
    assert quality["chosen"]["num_positions"] == 8 * 16 and len(quality["chosen"]["per_source"]) == 2
    assert [len(point["skipped_layers"]) for point in quality["curve"]] == [0, 1, 2, 3]


def test_the_ablation_leaves_out_one_part_after_the_other(exported):
    report = json.loads((exported / "refit" / "report.json").read_text())
    tuning, variants = report["refit"]["tuning"], report["ablation"]["variants"]
    assert (tuning["steps"], tuning["num_windows"]) == (100, 17)
    assert tuning["kept"] == (tuning["after"]["kl_mean_nats"] < tuning["before"]["kl_mean_nats"])
    published, windows, *untuned, fits, whole = variants
    rows = [(row["sink_tokens"], row["boundary_tokens"]) for row in (published, windows, fits, whole)]
    assert rows == [(0, 1), (2, 4), (2, 1), (2, 4)]
    assert [row["kl_mean_nats"] for row in untuned] == [tuning["before"]["kl_mean_nats"]] * tuning["kept"]
    exported_with = tuning["after" if tuning["kept"] else "before"]
    assert whole["kl_mean_nats"] == exported_with["kl_mean_nats"] == report["quality"]["chosen"]["kl_mean_nats"]
    assert whole["kl_mean_nats"] < windows["kl_mean_nats"] < published["kl_mean_nats"]
    assert whole["kl_mean_nats"] < fits["kl_mean_nats"]
    by_boundary = {row["boundary_tokens"]: row["kl_mean_nats"] for row in report["ablation"]["windows"]}
    assert list(by_boundary) == [1, 4, 16, 32] and by_boundary[1] == fits["kl_mean_nats"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-kl", "0.1", "--target-speedup", "1.5"],
        ["--prune-ratio", "0.3", "--prune-layers", "1"],
        ["--no-refit", "--surrogate", "auto"],
        ["--select", "search", "--prune-layers", "1"],
    ],
)
def test_contradicting_flags_end_with_exit_code_2_before_the_model_is_looked_for(flags, tmp_path, capsys):
    assert main(["--model", "no-such-model", "--out", str(tmp_path / "out"), *flags]) == 2
    assert capsys.readouterr().err.startswith("pop-export: error: --")


def test_an_impossible_budget_ends_with_exit_code_5_and_leaves_nothing(exported, capsys):
    out = exported / "too-fast"
    flags = [flag for flag in COMMON if flag not in ("--prune-layers", "1,3-4")]
    assert main(["--model", str(exported / "model"), "--out", str(out), *flags, "--target-speedup", "30"]) == 5
    assert "found at most" in capsys.readouterr().err and not out.exists()
