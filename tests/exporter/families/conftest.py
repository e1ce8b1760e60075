"""Tiny exports, each made once for all tests that look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pop_export.config import Dialect
from pop_export.quiet import quiet_transformers
from tests.exporter.families.configs import tiny_family_model
from tests.exporter.families.proof import Exported, export_pair

ExportOf = Callable[..., Exported]


@pytest.fixture(scope="session")
def export_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExportOf]:
    """Return a function (model type, dialect, config changes) -> its export with layers 1 and 2 skipped."""
    made: dict[str, Exported] = {}

    def make(model_type: str, dialect: Dialect = "ort", **changes: object) -> Exported:
        key = repr((model_type, dialect, sorted(changes.items(), key=str)))
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(model_type)
            with quiet_transformers():
                made[key] = export_pair(tiny_family_model(model_type, **changes), folder, dialect=dialect)
        return made[key]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)
