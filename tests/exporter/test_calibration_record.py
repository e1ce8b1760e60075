"""`calibration.json`: round trip, what it looks like, and what is refused."""

import dataclasses
import json

import pytest

from pop_export.calibration.record import Calibration, Scores, read_calibration, write_calibration
from pop_runtime.errors import ModelError, UsageError

CALIBRATION = Calibration(
    prefill=Scores(importance=(42.5, 0.0), standard_error=(3.25, 0.0)),
    decode=Scores(importance=(81.0, 825.0), standard_error=(9.0, 100.0)),
    num_samples=48,
    length_tokens=256,
    boundary="half",
    fisher="sampled",
    seed=7,
    corpus="notes.txt; 48 samples",
    corpus_sha256="c0ffee",
    model_name="tiny",
    model_sha256="abcdef",
    tools={"torch": "2.13.0"},
)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(path, CALIBRATION)
    return path


def read(path, num_layers=2, model_sha256="abcdef"):
    return read_calibration(path, num_layers=num_layers, model_sha256=model_sha256)


def altered(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


def test_a_calibration_reads_back_as_it_was_written(path):
    assert read(path) == CALIBRATION


def test_an_unknown_standard_error_reads_back_as_unknown(path):
    single = dataclasses.replace(CALIBRATION, prefill=Scores((1.0, 0.0), (None, None)), num_samples=1)
    write_calibration(path, single)
    assert read(path) == single


def test_the_file_lists_both_stages_per_layer(path):
    document = json.loads(path.read_text())
    assert (document["format"], document["format_version"]) == ("pop-calibration", 1)
    assert document["layers"][1] == {
        "layer": 1,
        "prefill": {"importance": 0.0, "standard_error": 0.0},
        "decode": {"importance": 825.0, "standard_error": 100.0},
    }


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"--calibration .*none.json: cannot be read \(No such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"\x80\x04pickle.", b"[" * 100_000])
def test_a_file_that_is_not_json_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"calibration.json: expected JSON, found something else"):
        read(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "pop-bundle"}'])
def test_json_of_another_kind_is_refused(path, content):
    path.write_text(content)
    with pytest.raises(ModelError, match='expected "format": "pop-calibration"'):
        read(path)


@pytest.mark.parametrize("version", [2, None, "1"])
def test_another_format_version_is_refused(path, version):
    altered(path, lambda document: document.update(format_version=version))
    with pytest.raises(ModelError, match="expected format version 1, found"):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("layers"),
        lambda document: document.update(layers=3),
        lambda document: document["layers"].reverse(),
        lambda document: document["layers"][0].pop("decode"),
        lambda document: document["layers"][0]["prefill"].update(importance="high"),
        lambda document: document["layers"][0]["prefill"].update(importance=-1),
        lambda document: document["layers"][0]["prefill"].update(importance=float("nan")),
        lambda document: document["corpus"].pop("sha256"),
        lambda document: document.update(tools=[]),
    ],
)
def test_a_damaged_file_is_refused(path, change):
    with pytest.raises(ModelError, match=r"calibration.json: damaged \("):
        read(altered(path, change))


def test_a_calibration_of_a_model_with_other_layers_is_refused(path):
    with pytest.raises(ModelError, match=r"expected 30 layers, found 2: it is of another model \(tiny\)"):
        read(path, num_layers=30)


def test_a_calibration_of_other_weights_is_refused(path):
    with pytest.raises(ModelError, match=r"expected weights with sha256 123.*, found abcdef.*another model \(tiny\)"):
        read(path, model_sha256="123")
