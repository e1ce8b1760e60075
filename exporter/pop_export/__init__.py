"""Export a decoder language model as a pruned prefill graph and a full decode graph over one set of weights.

from pop_export import ExportConfig, export
bundle = export(ExportConfig(model="smollm2-135m", out=Path("out/smollm2")))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pop_export.config import ExportConfig

if TYPE_CHECKING:
    from pop_export.bundle import Bundle
    from pop_export.pipeline import export

__all__ = ["Bundle", "ExportConfig", "export"]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for."""
    if name == "export":
        from pop_export.pipeline import export

        return export
    if name == "Bundle":
        from pop_export.bundle import Bundle

        return Bundle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
