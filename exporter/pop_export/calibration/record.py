"""`calibration.json`: what a calibration found, and enough about how, to repeat it or to refuse another model's."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pop_runtime.errors import ModelError, UsageError

FORMAT = "pop-calibration"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Scores:
    """Importance of each layer in one stage, and its standard error: L numbers each, >= 0, loss in nats squared."""

    importance: tuple[float, ...]
    standard_error: tuple[float | None, ...]  # None: unknown, as for a single sample


@dataclass(frozen=True)
class Calibration:
    """Layer importance per stage, and how it was measured."""

    prefill: Scores
    decode: Scores
    num_samples: int
    length_tokens: int  # per sample at most
    boundary: str  # the rule that splits a sample into prompt and response
    fisher: str  # "sampled" or "empirical"
    seed: int
    corpus: str  # sources and counts, for people
    corpus_sha256: str
    model_name: str  # for people
    model_sha256: str  # of the weights: what a reader checks
    tools: dict[str, str] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Return how many decoder layers were measured."""
        return len(self.prefill.importance)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration as JSON, one object per layer with both stages."""
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": {
            "name": calibration.model_name,
            "sha256": calibration.model_sha256,
            "num_layers": calibration.num_layers,
        },
        "corpus": {
            "description": calibration.corpus,
            "sha256": calibration.corpus_sha256,
            "num_samples": calibration.num_samples,
            "length_tokens": calibration.length_tokens,
        },
        "method": {"boundary": calibration.boundary, "fisher": calibration.fisher, "seed": calibration.seed},
        "layers": [
            {
                "layer": layer,
                **{
                    stage: {"importance": scores.importance[layer], "standard_error": scores.standard_error[layer]}
                    for stage, scores in (("prefill", calibration.prefill), ("decode", calibration.decode))
                },
            }
            for layer in range(calibration.num_layers)
        ],
        "tools": calibration.tools,
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def read_calibration(path: Path, *, num_layers: int, model_sha256: str) -> Calibration:
    """Return a saved calibration of this very model, as `--calibration FILE` asks for.

    Args:
        path: a file written by `write_calibration`.
        num_layers: decoder layers of the model at hand.
        model_sha256: sha256 of its weights, as the calibration recorded it.

    Raises:
        UsageError: there is no such file.
        ModelError: the file is damaged, of a newer format, or of another model.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--calibration {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # nested too deep
        raise ModelError(f"{path}: expected JSON, found something else ({error}); calibrate again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ModelError(f'{path}: expected "format": "{FORMAT}", found another kind of file; calibrate again')
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise ModelError(
            f"{path}: expected format version {FORMAT_VERSION}, found {version!r}; update pop-export or calibrate again"
        )
    try:
        calibration = _parsed(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: damaged ({type(error).__name__}: {error}); calibrate again") from error
    if calibration.num_layers != num_layers:
        raise ModelError(
            f"{path}: expected {num_layers} layers, found {calibration.num_layers}: it is of another model "
            f"({calibration.model_name}); calibrate again"
        )
    if calibration.model_sha256 != model_sha256:
        raise ModelError(
            f"{path}: expected weights with sha256 {model_sha256[:12]}..., found {calibration.model_sha256[:12]}...: "
            f"it is of another model ({calibration.model_name}); calibrate again"
        )
    return calibration


def _parsed(document: dict[str, Any]) -> Calibration:
    """Return the calibration a document holds; whatever is missing or of the wrong type raises."""
    layers = document["layers"]
    if [entry["layer"] for entry in layers] != list(range(len(layers))):
        raise ValueError("layers are not numbered from 0")
    model, corpus, method = document["model"], document["corpus"], document["method"]
    return Calibration(
        prefill=_scores(layers, "prefill"),
        decode=_scores(layers, "decode"),
        num_samples=int(corpus["num_samples"]),
        length_tokens=int(corpus["length_tokens"]),
        boundary=str(method["boundary"]),
        fisher=str(method["fisher"]),
        seed=int(method["seed"]),
        corpus=str(corpus["description"]),
        corpus_sha256=str(corpus["sha256"]),
        model_name=str(model["name"]),
        model_sha256=str(model["sha256"]),
        tools={str(tool): str(version) for tool, version in document["tools"].items()},
    )


def _scores(layers: list[dict[str, Any]], stage: str) -> Scores:
    """Return one stage's scores of all layers."""
    importance = tuple(_score(entry[stage]["importance"]) for entry in layers)
    errors = (entry[stage]["standard_error"] for entry in layers)
    return Scores(importance, tuple(None if error is None else _score(error) for error in errors))


def _score(value: Any) -> float:
    """Return a score as it should be: finite and not negative."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"expected a number >= 0, found {value}")
    return number
