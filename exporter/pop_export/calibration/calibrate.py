"""The calibration stage: samples in, layer importance per stage out."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import numpy as np

from pop_export.calibration.corpus import Samples
from pop_export.calibration.gates import BOUNDARY_RULE, Fisher, gate_gradients, gate_importance
from pop_export.calibration.record import Calibration, Scores
from pop_export.progress import progress

TOOLS = ("numpy", "torch", "transformers")


def calibrate(
    model: Any,
    samples: Samples,
    *,
    model_name: str,
    model_sha256: str,
    length: int,
    fisher: Fisher,
    seed: int,
    batch_size: int,
) -> Calibration:
    """Return how much each layer matters in prefill and in decode, measured with virtual gates on the samples.

    Args:
        model: a Hugging Face causal language model on the CPU; unchanged afterwards.
        samples: the text; only `samples.ids` is used.
        model_name: recorded for people.
        model_sha256: of the weights; recorded, so that the calibration is not used for another model.
        length: tokens per sample as asked for; recorded.
        fisher: "sampled" (the paper) or "empirical" targets.
        seed: fixes the sampled targets.
        batch_size: samples per pass; changes speed and memory, never the scores.

    Raises:
        ModelError: the model's loss has no finite gradient (names the sample and the layer).
    """
    with progress("calibrating", len(samples.ids)) as advance:
        gradients = gate_gradients(model, samples.ids, fisher=fisher, seed=seed, batch_size=batch_size, advance=advance)
    return Calibration(
        prefill=_scores(gradients.prefill),
        decode=_scores(gradients.decode),
        num_samples=len(samples.ids),
        length_tokens=length,
        boundary=BOUNDARY_RULE,
        fisher=fisher,
        seed=seed,
        corpus=samples.description,
        corpus_sha256=samples.sha256,
        model_name=model_name,
        model_sha256=model_sha256,
        tools={"python": platform.python_version()} | {tool: importlib.metadata.version(tool) for tool in TOOLS},
    )


def _scores(gate_grads: np.ndarray) -> Scores:
    """Return one stage's scores as plain numbers."""
    importance, standard_error = gate_importance(gate_grads)
    return Scores(
        tuple(importance.tolist()), tuple(None if np.isnan(error) else error for error in standard_error.tolist())
    )
