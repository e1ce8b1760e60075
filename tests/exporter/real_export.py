"""A real model exported with less text than the default takes, for tests that do not depend on how much there is."""

from __future__ import annotations

from pathlib import Path

import torch

from pop_export import ExportConfig
from pop_export.bundle import Bundle
from pop_export.pipeline import export
from pop_runtime.threads import visible_cores


def export_briefly(model: str, out: Path, *, calibration_samples: int, fitting_samples: int) -> Bundle:
    """Return the bundle, made on all cores; torch has as many threads afterwards as before.

    Args:
        model: a name from models/.
        out: folder.
        calibration_samples: of the gates.
        fitting_samples: of the corpus, and as many that the model writes itself.
    """
    threads = torch.get_num_threads()
    try:
        return export(
            ExportConfig(
                model=model, out=out, calibration_samples=calibration_samples, refit_samples=fitting_samples,
                self_samples=fitting_samples, curve=False, threads=visible_cores(),
            )
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
