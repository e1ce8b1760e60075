"""The text that prefill is fitted on: a corpus, and what the model writes itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pop_export.calibration.corpus import Samples, calibration_samples
from pop_export.calibration.self_text import LENGTH_TOKENS, num_steps_of, self_text
from pop_export.checkpoint import Checkpoint
from pop_export.config import ExportConfig
from pop_export.decoder import max_positions_of
from pop_export.progress import progress

NUM_HELD_OUT = 8  # windows of the corpus kept aside: fits are judged and plans measured on them
HELD_OUT_SHARE = 6  # of the model's own text, one sample in so many is kept aside


@dataclass(frozen=True)
class FittingText:
    """Windows of token ids to fit on, and others to judge the fits by."""

    fitting: tuple[np.ndarray, ...]
    judging: tuple[np.ndarray, ...]  # what was kept aside of the corpus among them: plans are measured on that alone
    description: str


def fitting_corpus(config: ExportConfig, checkpoint: Checkpoint) -> Samples:
    """Return the corpus for fits and what is kept aside of it, the same for the same settings.

    Raises:
        UsageError: it cannot be read or holds too little text.
    """
    return calibration_samples(
        checkpoint.tokenizer,
        data=config.calibration_data,
        num_samples=config.refit_samples,
        length=min(config.refit_length, max_positions_of(checkpoint.model)),
        seed=config.seed,
        num_held_out=NUM_HELD_OUT,
        offline=config.offline,
        with_docstrings=True,
        length_flag="--refit-length",
    )


def fitting_text(config: ExportConfig, checkpoint: Checkpoint, corpus: Samples) -> FittingText:
    """Return the corpus with what the model writes itself, the same for the same settings."""
    own: list[np.ndarray] = []
    length = min(LENGTH_TOKENS, max_positions_of(checkpoint.model))
    if config.self_samples and config.refit:
        with progress("sampling text from the model", num_steps_of(config.self_samples, length)) as advance:
            own = self_text(
                checkpoint.model,
                config.self_samples,
                bos_token_id=checkpoint.bos_token_id,
                eos_token_ids=checkpoint.eos_token_ids,
                seed=config.seed,
                length=length,
                advance=advance,
            )
    aside = len(own) // HELD_OUT_SHARE
    written = f"; {len(own)} samples of {length} tokens written by the model, {aside} kept aside" if own else ""
    return FittingText(
        fitting=(*corpus.ids, *own[aside:]),
        judging=(*corpus.held_out, *own[:aside]),
        description=corpus.description + written,
    )
